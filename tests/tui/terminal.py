"""A program in a terminal of its own: keys go in, what was written comes out, and how the terminal
was left can be asked.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from typing import IO

WAIT_S = 60.0
_CODES = re.compile(
    r"\x1b\[[0-9;?<>=]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b[=>78]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
)
# What a full-screen program switches on, and must switch off: other screen, hidden cursor, mouse,
# focus, pasting.
MODES = ("1049", "25", "1000", "1003", "1006", "1004", "2004")


class Terminal:
    """A child on a pseudo-terminal of 80 x 24, or with another standard input or error."""

    def __init__(
        self,
        command: Sequence[str],
        keys: int | None = None,
        errors: IO[bytes] | None = None,
        /,
        **environment: str,
    ) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        self.child = subprocess.Popen(
            command,
            stdin=slave if keys is None else keys,
            stdout=slave,
            stderr=slave if errors is None else errors,
            env=os.environ | {"TERM": "xterm-256color"} | environment,
            start_new_session=True,
        )
        self._raw = b""
        self._read_until = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        self.vanish()

    def vanish(self) -> None:
        """The window is closed, the connection gone: what is written from now on fails."""
        for end in (self.master, self._slave):
            if end >= 0:
                os.close(end)
        self.master = self._slave = -1

    def press(self, keys: str) -> None:
        """Type keys; `see` then ignores what was written before."""
        self._read(0)
        self._read_until = len(self._raw)
        os.write(self.master, keys.encode())

    def see(self, *words: str) -> None:
        """Wait until all of these have been written since the last key."""
        until = time.monotonic() + WAIT_S
        while not all(word in self.text for word in words):
            assert time.monotonic() < until, f"{words} not in: {self.text[-3000:]}"
            assert self.child.poll() is None or self._read(0), f"it ended: {self.text[-3000:]}"
            self._read(0.1)

    def written(self, *codes: bytes) -> None:
        """Wait until all of these have been written since the start."""
        until = time.monotonic() + WAIT_S
        while not all(code in self._raw for code in codes):
            assert time.monotonic() < until, f"{codes} not in: {self._raw[-3000:]!r}"
            self._read(0.1)

    def stopped(self) -> None:
        """Wait until the child is suspended, as a shell does."""
        until = time.monotonic() + WAIT_S
        while not os.WIFSTOPPED(os.waitpid(self.child.pid, os.WNOHANG | os.WUNTRACED)[1]):
            assert time.monotonic() < until, f"it goes on: {self.text[-3000:]}"
            self._read(0.1)

    @property
    def text(self) -> str:
        """Return the text since the last key, without escape codes."""
        return _CODES.sub("", self._raw[self._read_until :].decode(errors="replace"))

    def ended(self) -> int:
        """The exit code."""
        if self.master < 0:
            return self.child.wait(WAIT_S)
        until = time.monotonic() + WAIT_S
        while self.child.poll() is None:
            assert time.monotonic() < until, f"it goes on: {self.text[-3000:]}"
            self._read(0.1)
        while self._read(0):
            pass
        return self.child.returncode

    def left_as_found(self) -> bool:
        """Return True if line editing, echo and every mode are as they were."""
        raw = self._raw.decode(errors="replace")
        for mode in MODES:
            last = re.findall(rf"\x1b\[\?(?:\d+;)*{mode}(?:;\d+)*([hl])", raw)[-1:]
            if last and last[0] != ("h" if mode == "25" else "l"):
                return False
        return termios.tcgetattr(self._slave) == self.before

    def _read(self, timeout_s: float) -> bool:
        poll = select.poll()  # takes any number of a file, which select() does not
        poll.register(self.master, select.POLLIN)
        ready = poll.poll(1000 * timeout_s)
        if not ready:
            return False
        try:
            new = os.read(self.master, 1 << 16)
        except OSError:
            return False
        self._raw += new
        return bool(new)
