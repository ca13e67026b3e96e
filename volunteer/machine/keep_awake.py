"""Lock that keeps the machine awake during training; it ends with this process in any case."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

from shared.errors import Unreachable
from volunteer.machine import outside

# `cat` ends, and the lock with it, when our end of its standard input closes.
LINUX = (
    "systemd-inhibit",
    "--what=idle:sleep",
    "--who=volunteer",
    "--why=training",
    "cat",
)
_holder: subprocess.Popen[bytes] | None = None  # process that holds the lock
_CONTINUOUS, _SYSTEM_REQUIRED = 0x80000000, 0x00000001


class Awake:
    """Lock that keeps the system awake. Where the system has none, `works` is False and nothing
    happens.
    """

    def __init__(self) -> None:
        self.works = True
        self._on = False

    def set(self, on: bool) -> None:
        """Hold or release the lock, without waiting."""
        if on == self._on:
            return
        self._on = on
        if sys.platform == "win32":
            self._windows(on)
        else:
            self.works = False
            with suppress(Unreachable):
                self.works = outside.do(hold, on)

    def _windows(self, on: bool) -> None:
        if sys.platform == "win32":
            import ctypes

            state = _CONTINUOUS | (_SYSTEM_REQUIRED if on else 0)
            self.works = bool(ctypes.windll.kernel32.SetThreadExecutionState(state))


def hold(on: bool) -> bool:
    """Hold or release the lock. Return False if this system has none."""
    global _holder
    helper, _holder = _holder, None
    if helper is not None:
        if helper.stdin is not None:
            helper.stdin.close()
        helper.terminate()
        try:
            helper.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            helper.kill()
            helper.wait()
    if not on:
        return True
    command = ("caffeinate", "-i", "-w", str(os.getpid())) if sys.platform == "darwin" else LINUX
    try:
        _holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return False
    return True
