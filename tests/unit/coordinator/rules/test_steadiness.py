"""Lowering of the outer rate, by headings that were measured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules.steadiness import SCALE_MIN, WINDOW_MAX, Heading, outer_scale, window

# Cosines of the first versions with momentum of a run on manual pages (docs/experiments.md).
AT_0_7 = [0.3, -0.03, 0.09, 0.31, 0.24, 0.31, 0.14, 0.23]
AT_1_4 = [0.15, -0.19, -0.16, -0.08, 0.0, -0.05, -0.01, 0.06]


def run(headings: list[float | None]) -> list[float]:
    """Return the scale of each step of a run of four equal machines, merged together."""
    past: list[Heading] = []
    for heading in headings:
        past.insert(0, Heading(outer_scale(past, window(1.0)), heading))
    return [each.outer_scale for each in reversed(past)]


def test_a_run_that_learns_keeps_its_rate() -> None:
    assert run([None, *AT_0_7]) == [1.0] * 9


def test_one_whose_updates_turn_back_halves_its_rate_after_four_rounds() -> None:
    assert run([None, *AT_1_4]) == [1.0] * 5 + [0.5] * 4


def test_a_lower_rate_is_judged_by_its_own_versions_only_and_has_a_floor() -> None:
    assert run([None] + [-0.5] * 40)[-1] == SCALE_MIN
    assert run([None] + [-0.5] * 4 + [0.3] * 8)[-1] == 0.5


def test_single_arrivals_are_looked_at_as_many_together_as_make_four_rounds() -> None:
    assert (window(1.0), window(0.75), window(0.25), window(2.0)) == (4, 6, 16, 4)
    assert window(0.0) == window(1e-9) == WINDOW_MAX


def test_without_momentum_and_at_the_beginning_the_rate_is_the_plans() -> None:
    assert outer_scale([], 4) == 1.0
    assert outer_scale([Heading(1.0, None)] * 9, 4) == 1.0


@given(st.lists(st.one_of(st.none(), st.floats(-1, 1)), max_size=60))
def test_a_rate_only_falls_and_never_below_the_floor(headings: list[float | None]) -> None:
    scales = run(headings)
    assert scales == sorted(scales, reverse=True)
    assert all(SCALE_MIN <= scale <= 1.0 for scale in scales)
