"""Sign of life of a silent command: written on a terminal only, and wiped before its next word."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator

import pytest
from typing_extensions import override

from shared.programs.silence_watch import SilenceWatch, pause_watch, watch_silence


class Screen(io.StringIO):
    """Terminal that counts what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.signs = threading.Semaphore(0)

    @override
    def write(self, text: str) -> int:
        written = super().write(text)
        self.signs.release()
        return written

    def shown(self) -> str:
        """Return the text on the screen, after its backspaces."""
        cells: list[str] = []
        at = 0
        for letter in self.getvalue():
            if letter == "\b":
                at -= 1
                continue
            cells[at : at + 1] = [letter]
            at += 1
        return "".join(cells).rstrip(" ")

    def await_sign(self) -> None:
        assert self.signs.acquire(timeout=120)


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture
def watch(screen: Screen) -> Iterator[SilenceWatch]:
    silence = SilenceWatch("coordinator check", screen, after_s=0.0, look_s=0.001)
    silence.begin()
    yield silence
    silence.end()


def test_a_silent_command_shows_its_name_and_leaves_nothing(
    screen: Screen, watch: SilenceWatch
) -> None:
    screen.await_sign()
    assert screen.getvalue().startswith("  still working: coordinator check, 0 s")
    watch.end()
    assert screen.shown() == ""
    length = len(screen.getvalue())
    with watch.output("done\n"):
        pass
    assert len(screen.getvalue()) == length


def test_an_unfinished_line_of_the_command_stays_whole(screen: Screen, watch: SilenceWatch) -> None:
    with watch.output("Once upon"):
        screen.write("Once upon")
        while screen.signs.acquire(blocking=False):
            pass
    screen.await_sign()
    with watch.output(" a time"):
        screen.write(" a time")
    watch.end()
    assert screen.shown() == "Once upon a time"
    assert "Once upon  0 s" in screen.getvalue()


def test_a_command_at_rest_shows_no_sign(screen: Screen, watch: SilenceWatch) -> None:
    screen.await_sign()
    with pause_watch():
        assert screen.shown() == ""
        while screen.signs.acquire(blocking=False):
            pass
        assert not screen.signs.acquire(timeout=0.05)
    screen.await_sign()


def test_streams_that_are_no_terminal_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with watch_silence("coordinator check"), pause_watch():
        assert (sys.stdout, sys.stderr) == before
        assert SilenceWatch.current is None
        print("{}")
    assert tuple(capsys.readouterr()) == ("{}\n", "")
