"""Lock that keeps the machine awake while it trains.

Ends with this process, however that ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

from shared.errors import Unreachable
from volunteer.machine import outside

# `cat` ends when our end of its standard input closes, and with it the lock.
LINUX = (
    "systemd-inhibit",
    "--what=idle:sleep",
    "--who=volunteer",
    "--why=training",
    "cat",
)
_holder: subprocess.Popen[bytes] | None = None  # holds the lock while it runs
_CONTINUOUS, _SYSTEM_REQUIRED = 0x80000000, 0x00000001


class Awake:
    """Lock that keeps the system awake. Without one, `works` is False and nothing happens."""

    def __init__(self) -> None:
        self.works = True
        self._on = False

    def set(self, on: bool) -> None:
        """Hold or release the lock; quick."""
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
    """Hold or release the lock of this system. False where it has none."""
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
