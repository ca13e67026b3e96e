"""Trust: earned slowly, lost fast, never outside 0..1."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules.trust import GAIN, LOSS, STREAK_MAX, TRUST_START, accepted, rejected

Move = Callable[[float, int], tuple[float, int]]


def test_one_bad_result_takes_ten_good_ones_to_mend() -> None:
    trust, streak = rejected(TRUST_START, 40)
    assert (trust, streak) == (TRUST_START - LOSS, 0)
    for _ in range(round(LOSS / GAIN) - 1):
        trust, streak = accepted(trust, streak)
    assert trust < TRUST_START
    assert accepted(trust, streak) == (TRUST_START, 10)


def test_enough_bad_results_silence_a_volunteer_and_good_ones_bring_it_back() -> None:
    trust, streak = TRUST_START, 0
    for _ in range(10):
        trust, streak = rejected(trust, streak)
    assert trust == 0.0
    for _ in range(100):
        trust, streak = accepted(trust, streak)
    assert (trust, streak) == (1.0, 100)


@given(
    st.lists(st.sampled_from([accepted, rejected]), max_size=300),
    st.floats(0, 1),
    st.integers(0, STREAK_MAX),
)
def test_trust_never_leaves_its_range(moves: list[Move], trust: float, streak: int) -> None:
    for move in moves:
        trust, streak = move(trust, streak)
        assert 0.0 <= trust <= 1.0
        assert 0 <= streak <= STREAK_MAX
