"""Trust: earned slowly, lost fast, never outside 0..1."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules.standing import GAIN, LOSS, LOSS_FAILED, TRUST_START, moved


def test_one_bad_result_takes_ten_good_ones_to_mend() -> None:
    trust = moved(TRUST_START, LOSS)
    for _ in range(9):
        trust = moved(trust, GAIN)
    assert trust < TRUST_START
    assert moved(trust, GAIN) == TRUST_START


def test_enough_bad_results_silence_a_volunteer_and_good_ones_bring_it_back() -> None:
    trust = TRUST_START
    for _ in range(10):
        trust = moved(trust, LOSS)
    assert trust == 0.0
    for _ in range(100):
        trust = moved(trust, GAIN)
    assert trust == 1.0


@given(st.lists(st.sampled_from([GAIN, LOSS, LOSS_FAILED]), max_size=300), st.floats(0, 1))
def test_trust_never_leaves_its_range(changes: list[float], trust: float) -> None:
    for change in changes:
        trust = moved(trust, change)
        assert 0.0 <= trust <= 1.0
