"""Confine the whole program to its own folders, by the kernel: Landlock, Linux 5.19 and later.

A coordinator sends data, never code. If a parser of ours, of PyTorch or of Pillow had a hole that
made code of it, that code could write nothing but the program's own folders and read nothing of its
owner's: neither documents nor keys. What is confined stays so until it ends, and so do its
children.

    read and execute    the system, Python and its packages
    write               profile, settings, downloads, exports, temporary files, devices, caches of
                        GPU drivers

See landlock(7). Not confined: the network, which the program lives by.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, the same on every architecture
_VERSION = 1 << 0
_PATH_BENEATH = 1
_NO_NEW_PRIVS = 38  # prctl

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_MOVES = 2  # first version that lets files move between folders
_OF_VERSION = (0, 13, 14, 15, 15, 16)  # number of rights that each version of the interface knows
_FILE_ONLY = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | 1 << 15  # truncate, ioctl

SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/proc", "/sys", "/run",
    "/nix", "/gnu", "/snap", "/var/lib/dbus",
)  # fmt: skip
DRIVERS = ("~/.nv", "~/.triton", "~/.cache/miopen", "~/.config/miopen", "~/.cache/AMD")


def offered() -> str:
    """Say in a sentence what this system offers."""
    version = _version()
    if version:
        return f"Landlock {version} confines the program to its own folders"
    if platform.system() == "Linux":
        return "this kernel confines nothing (Landlock, Linux 5.19 and later)"
    return "nothing on this system confines the program to its own folders"


def confine(own: Iterable[Path]) -> bool:
    """Confine this process, whose other threads must not have begun, and all that it starts.

    `own` are the folders that it may write. False, and nothing is confined, where the system
    cannot.
    """
    version = _version()
    if not version:
        return False
    rights = (1 << _OF_VERSION[min(version, len(_OF_VERSION) - 1)]) - 1
    places = [(path, _READ) for path in _readable()]
    places += [(path, rights) for path in _writable(own)]
    ruleset = _call(
        _CREATE, ctypes.byref(ctypes.create_string_buffer(struct.pack("Q", rights))), 8, 0
    )
    if ruleset < 0:
        return False
    try:
        for path, access in places:
            _allow(ruleset, path, access & rights)
        libc = ctypes.CDLL(None, use_errno=True)
        return libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and _call(_RESTRICT, ruleset, 0) == 0
    finally:
        os.close(ruleset)


def _readable() -> Sequence[Path]:
    python = [sys.prefix, sys.base_prefix, sys.exec_prefix, *(entry for entry in sys.path if entry)]
    libraries = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    package = Path(__file__).resolve().parents[2]
    return [Path(place) for place in (*SYSTEM, *python, *libraries, str(package))]


def _writable(own: Iterable[Path]) -> Sequence[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    drivers = [Path(place).expanduser() for place in DRIVERS]
    temporary = [Path(tempfile.gettempdir()), Path("/dev")]
    return [*own, *drivers, *temporary, *([Path(runtime)] if runtime else [])]


def _allow(ruleset: int, path: Path, access: int) -> None:
    """Allow access beneath a path; one that is not there needs nothing."""
    with contextlib.suppress(OSError):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)  # type: ignore[attr-defined,unused-ignore]
        try:
            if not path.is_dir():
                access &= _FILE_ONLY
            rule = ctypes.create_string_buffer(struct.pack("=Qi", access, place))
            _call(_ADD, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
        finally:
            os.close(place)


def _version() -> int:
    """Return the version of the interface; 0 without one, or one that forbids moving files."""
    if platform.system() != "Linux":
        return 0
    found = _call(_CREATE, None, 0, _VERSION)
    return found if found >= _MOVES else 0


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return int(libc.syscall(ctypes.c_long(number), *arguments))
