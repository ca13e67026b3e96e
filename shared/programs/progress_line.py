"""Line on the terminal that shows that a long step of a command still runs."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self, TextIO

EVERY_S = 2.5


class ProgressLine:
    """Context of a step: on a terminal a line counts its seconds, elsewhere a line grows by a dot
    every `every_s` seconds.
    """

    def __init__(self, out: TextIO, *, every_s: float = EVERY_S) -> None:
        self._out, self._terminal, self._every_s = out, out.isatty(), every_s
        self._share = ""
        self._written = 0  # width of the line that is not ended
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._count, name="waiting", daemon=True)

    def say(self, text: str) -> None:
        """Write `text` as a whole line."""
        with self._lock:
            self._clear()
            self._write(f"{text}\n")

    def tell(self, done: int, total: int) -> None:
        """Show the progress of the step as a percentage; a total of 0 is unknown."""
        self._share = f", {100 * done // total} %" if total else ""

    def note(self, words: str) -> None:
        """Show the progress of the step in words."""
        self._share = f", {words}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        if self._written:
            self._write(f"\r{' ' * self._written}\r" if self._terminal else "\n")
        self._written = 0

    def _count(self) -> None:
        began = time.monotonic()
        while not self._over.wait(self._every_s):
            with self._lock:
                line = f"  {time.monotonic() - began:.0f} s{self._share}"
                self._write(f"\r{line:<{self._written}}" if self._terminal else ".")
                self._written = max(self._written, len(line)) if self._terminal else 1

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):
            self._over.set()  # the output is closed
