"""Presence of a person: seconds since the last key press or mouse movement, and newest login."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import psutil

from shared.errors import Unreachable
from volunteer.machine import sandbox_helper

COMMAND_S = 5.0
CLOCK_S = 1.0  # difference between the times of files and the clock
GNOME_IDLE = (
    "gdbus",
    "call",
    "--session",
    "--dest=org.gnome.Mutter.IdleMonitor",
    "--object-path=/org/gnome/Mutter/IdleMonitor/Core",
    "--method=org.gnome.Mutter.IdleMonitor.GetIdletime",
)
MAC_IDLE = ("ioreg", "-c", "IOHIDSystem", "-d", "4")

Run: TypeAlias = Callable[[Sequence[str]], str]


def run_command(command: Sequence[str]) -> str:
    """Return the output of a system command run outside of the sandbox; "" if it fails."""
    with contextlib.suppress(Unreachable):
        return sandbox_helper.do(run_here, command)
    return ""


def run_here(command: Sequence[str]) -> str:
    """Return the output of a system command; "" if the command is missing, fails or hangs."""
    try:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=COMMAND_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout.decode(errors="replace") if process.returncode == 0 else ""


def unused_s(system: str, run: Run) -> float | None:
    """Return the seconds since the last key press or mouse movement; None if unknown."""
    if system == "linux":
        return _linux_unused_s(run)
    if system == "darwin":
        match = re.search(r'"HIDIdleTime"\s*=\s*(\d+)', run(MAC_IDLE))
        return int(match[1]) / 1e9 if match else None
    return _windows_unused_s()


def _linux_unused_s(run: Run) -> float | None:
    """Return the smaller of the idle seconds of desktop and terminals; None for a desktop that does
    not report its idle time.
    """
    touched = [terminals_unused_s()]
    wayland = bool(os.environ.get("WAYLAND_DISPLAY"))
    desktop = _gnome_unused_s(run)
    if desktop is None and os.environ.get("DISPLAY") and not wayland:
        with contextlib.suppress(Unreachable):
            desktop = sandbox_helper.do(x11_unused_s)
    if desktop is not None:
        touched.append(desktop)
    elif wayland or os.environ.get("DISPLAY"):
        return None  # a desktop without an idle time: terminals alone would say "nobody is there"
    return min(touched)


def _gnome_unused_s(run: Run) -> float | None:
    if not os.environ.get("DBUS_SESSION_BUS_ADDRESS"):
        return None
    match = re.search(r"uint64 (\d+)", run(GNOME_IDLE))
    return int(match[1]) / 1000 if match else None


def terminals_unused_s(root: Path = Path("/dev")) -> float:
    """Return the seconds since the last key press in a terminal, or since the machine started.

    A time in the future says nothing: the clock was set back since.
    """
    now = time.time()
    touched = [psutil.boot_time()]
    for path in (*root.glob("pts/[0-9]*"), *root.glob("tty[1-9]*")):
        with contextlib.suppress(OSError):
            touched.append(path.stat().st_atime)
    past = [at for at in touched if at <= now + CLOCK_S]
    return float(max(0.0, now - max(past, default=now)))


def x11_unused_s() -> float | None:
    """Return the idle seconds of X's screen saver extension; None if it is missing."""
    import ctypes
    import ctypes.util

    class Info(ctypes.Structure):
        _fields_ = [
            ("window", ctypes.c_ulong),
            ("state", ctypes.c_int),
            ("kind", ctypes.c_int),
            ("til_or_since", ctypes.c_ulong),
            ("idle", ctypes.c_ulong),
            ("event_mask", ctypes.c_ulong),
        ]

    names = [ctypes.util.find_library(name) for name in ("X11", "Xss")]
    if None in names:
        return None
    try:
        x11, xss = (ctypes.CDLL(name) for name in names)
    except OSError:
        return None
    x11.XOpenDisplay.restype = ctypes.c_void_p
    x11.XDefaultRootWindow.restype = ctypes.c_ulong
    display = ctypes.c_void_p(x11.XOpenDisplay(None))
    if display.value is None:
        return None
    try:
        info = Info()
        root = ctypes.c_ulong(x11.XDefaultRootWindow(display))
        status = xss.XScreenSaverQueryInfo(display, root, ctypes.byref(info))
        return info.idle / 1000 if status else None
    finally:
        x11.XCloseDisplay(display)


def _windows_unused_s() -> float | None:
    if sys.platform == "win32":
        import ctypes

        class Info(ctypes.Structure):
            _fields_ = [("size", ctypes.c_uint), ("tick", ctypes.c_uint)]

        info = Info(size=ctypes.sizeof(Info))
        if ctypes.windll.user32.GetLastInputInfo(ctypes.byref(info)):
            ticks: int = ctypes.windll.kernel32.GetTickCount()
            return ((ticks - int(info.tick)) & 0xFFFFFFFF) / 1000
    return None


def newest_login() -> float:
    """Return the time of the newest login to this machine; 0 if unknown."""
    try:
        return max((user.started for user in psutil.users()), default=0.0)
    except (OSError, RuntimeError):
        return 0.0
