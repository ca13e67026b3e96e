"""Signs of life of a long step: a dot where nobody watches, seconds and a share on a terminal."""

from __future__ import annotations

import io
import threading

from typing_extensions import override

from shared.programs.progress_line import ProgressLine


class Terminal(io.StringIO):
    """Output that says when something was written."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal, self.signs = terminal, threading.Semaphore(0)

    @override
    def isatty(self) -> bool:
        return self.terminal

    @override
    def write(self, text: str) -> int:
        written = super().write(text)
        self.signs.release()
        return written


def test_what_is_no_terminal_gets_dots_and_an_end_of_line() -> None:
    out = Terminal(terminal=False)
    with ProgressLine(out, every_s=0.001):
        for _ in range(3):
            assert out.signs.acquire(timeout=120)
    assert out.getvalue().startswith("...")
    assert out.getvalue().endswith(".\n")


def test_a_terminal_counts_seconds_shows_the_share_and_is_left_clean() -> None:
    out = Terminal(terminal=True)
    with ProgressLine(out, every_s=0.001) as waiting:
        waiting.tell(2, 5)
        while "0 s, 40 %" not in out.getvalue():
            assert out.signs.acquire(timeout=120)
        waiting.say("Storing.")
    assert "Storing.\n" in out.getvalue()
    assert "s, 40" not in out.getvalue().rpartition("\r")[2]
