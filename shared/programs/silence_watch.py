"""Sign of life on the terminal of a command that has shown nothing for some seconds.

The watch sees everything that the command writes, so a command needs no code for it. It is paused
while a command waits for a person, and ends when a command serves until it is stopped.
"""

from __future__ import annotations

import io
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, TextIO

from typing_extensions import override

from shared.sentences import Sentence

AFTER_S = 2.9  # seconds without output before the first sign
LOOK_S = 0.5  # seconds between two checks for output


class SilenceWatch:
    """Watch of one command: the line "still working", written and wiped on standard error."""

    current: ClassVar[SilenceWatch | None] = None

    def __init__(
        self,
        command: str,
        out: TextIO,
        words: Callable[[Sentence], str] = str,
        *,
        after_s: float = AFTER_S,
        look_s: float = LOOK_S,
    ) -> None:
        self._command, self._out, self._words = command, out, words
        self._after_s, self._look_s = after_s, look_s
        self._lock = threading.RLock()  # a signal handler may write while its thread does
        self._over = threading.Event()
        self._rests = 0
        self._since = time.monotonic()  # time of the newest output
        self._line_begun = False  # True: the output so far ends within a line
        self._written = 0  # cells of the sign that is on the screen
        self._thread = threading.Thread(target=self._look, name="silence", daemon=True)

    def begin(self) -> None:
        SilenceWatch.current = self
        self._thread.start()

    def end(self) -> None:
        """Wipe the sign, and write no more signs."""
        self._over.set()
        with self._lock:
            self._wipe()
        if SilenceWatch.current is self:
            SilenceWatch.current = None

    @contextmanager
    def output(self, text: str) -> Iterator[None]:
        """Wipe the sign before the block, which writes `text` of the command to the terminal."""
        with self._lock:
            self._wipe()
            yield
            self._since = time.monotonic()
            if text:
                self._line_begun = text[-1] not in "\r\n"

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Write no sign during the block."""
        with self._lock:
            self._rests += 1
            self._wipe()
        try:
            yield
        finally:
            with self._lock:
                self._rests -= 1
                self._since = time.monotonic()

    def _look(self) -> None:
        while not self._over.wait(self._look_s):
            with self._lock:
                silent_s = time.monotonic() - self._since
                if not (self._rests or self._over.is_set()) and silent_s >= self._after_s:
                    self._show(silent_s)

    def _show(self, silent_s: float) -> None:
        sign = f"  {silent_s:.0f} s"
        if not self._line_begun:
            sentence = Sentence("still working: {command}", command=self._command)
            sign = f"  {self._words(sentence)},{sign[1:]}"
        sign = sign[: shutil.get_terminal_size().columns - 1]
        self._wipe()
        self._write(sign)
        self._written = len(sign)

    def _wipe(self) -> None:
        back = "\b" * self._written
        if back:
            self._write(f"{back}{' ' * self._written}{back}")
        self._written = 0

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):
            self._over.set()  # the terminal is gone


class WatchedStream(io.TextIOWrapper):
    """Standard stream on a terminal, whose output ends the silence of the running command."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(
            stream.buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=True
        )
        self.plain = stream

    @override
    def write(self, text: str, /) -> int:
        watch = SilenceWatch.current
        if watch is None:
            return super().write(text)
        with watch.output(text):
            return super().write(text)


@contextmanager
def watch_silence(command: str, words: Callable[[Sentence], str] = str) -> Iterator[None]:
    """Show signs of life of a command within the block, if its standard error is a terminal.

    `words` translates the sentence.
    """
    if not sys.stderr.isatty():
        yield
        return
    watch = SilenceWatch(command, _watched_error(), words)
    watch.begin()
    try:
        yield
    finally:
        watch.end()


def _watched_error() -> TextIO:
    """Watch the standard streams from now on; return the plain standard error.

    The plain streams are never put back, since loggers keep the streams that they find.
    """
    if isinstance(sys.stderr, WatchedStream):
        return sys.stderr.plain
    plain = sys.stderr
    sys.stderr = WatchedStream(plain)
    if sys.stdout.isatty():
        sys.stdout = WatchedStream(sys.stdout)
    return plain


@contextmanager
def pause_watch() -> Iterator[None]:
    """Show no sign in the block, in which the command waits for a person or draws the screen."""
    watch = SilenceWatch.current
    if watch is None:
        yield
        return
    with watch.rest():
        yield


def end_watch() -> None:
    """End the watch of a command that runs until it is stopped, once it has shown that it runs."""
    if SilenceWatch.current is not None:
        SilenceWatch.current.end()
