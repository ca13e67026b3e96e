"""The watch over the event loop: a block is told, then ended; a machine that slept is not taken for
one.
"""

from __future__ import annotations

import pytest

from volunteer.machine.watchdog import EXIT_S, LOOK_S, REPORT_S, StallDetector


class Watched:
    """A loop that turns or does not, looked at every few seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told: list[float] = []
        self.exit_process: list[float] = []
        self.stall = StallDetector(self.told.append, self.exit_process.append)

    def go(self, seconds: float, *, turning: bool) -> None:
        for _ in range(int(seconds / LOOK_S)):
            self.now += LOOK_S
            if turning:
                self.stall.record_turn(self.now)
            self.stall.look(self.now)


@pytest.fixture
def watched() -> Watched:
    made = Watched()
    made.go(60, turning=True)
    return made


def test_a_loop_that_turns_is_left_alone(watched: Watched) -> None:
    watched.go(10_000, turning=True)
    assert (watched.told, watched.exit_process) == ([], [])


def test_a_loop_that_hangs_is_told_once_and_then_ended(watched: Watched) -> None:
    watched.go(REPORT_S + 30, turning=False)
    assert (watched.told, watched.exit_process) == ([REPORT_S], [])
    watched.go(EXIT_S - REPORT_S - 30, turning=False)
    assert watched.exit_process == [EXIT_S]


def test_one_that_comes_round_again_is_told_anew_the_next_time(watched: Watched) -> None:
    watched.go(REPORT_S, turning=False)
    watched.go(20, turning=True)
    watched.go(REPORT_S, turning=False)
    assert len(watched.told) == 2
    assert watched.exit_process == []


def test_a_machine_that_slept_is_no_loop_that_hangs(watched: Watched) -> None:
    watched.now += 8 * 3600
    watched.go(REPORT_S - LOOK_S, turning=False)
    assert (watched.told, watched.exit_process) == ([], [])
