"""Lowering of the outer rate, by headings that were measured."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.rules.steadiness import (
    LEAST,
    REST,
    SCALE_MIN,
    WINDOW_MAX,
    Heading,
    cooling,
    outer_scale,
    rest,
    window,
)

# Cosines of the first versions with momentum of a run on manual pages (docs/experiments.md).
AT_0_7 = [0.3, -0.03, 0.09, 0.31, 0.24, 0.31, 0.14, 0.23]
AT_1_4 = [0.15, -0.19, -0.16, -0.08, 0.0, -0.05, -0.01, 0.06]
AT_2_5 = [0.07, -0.08, -0.02, 0.03, 0.12, 0.0, 0.26, 0.1]


def falls_to(scales: list[float], scale: float) -> int:
    return sum(b == scale < a for a, b in pairwise(scales))


def run(headings: Iterable[float | None], most: int = window(1.0)) -> list[float]:
    """Return the scale of each step of a run, by default of four equal machines merged together."""
    past: list[Heading] = []
    scales: list[float] = []
    for heading in headings:
        falls = falls_to(scales, scales[-1]) if scales else 0
        scales.append(outer_scale(past, most, falls))
        past.insert(0, Heading(scales[-1], heading))
    return scales


def test_a_run_that_learns_keeps_its_rate() -> None:
    assert run([None, *AT_0_7]) == [1.0] * 9


def test_one_whose_updates_turn_back_halves_its_rate_after_four_rounds() -> None:
    assert run([None, *AT_1_4]) == [1.0] * 5 + [0.5] * 4
    assert run([None, *AT_2_5])[5] == 0.5


def test_a_lower_rate_is_judged_by_its_own_versions_only_and_has_a_floor() -> None:
    assert run([None] + [-0.5] * 40)[-1] == SCALE_MIN
    assert run([None] + [-0.5] * 4 + [0.3] * 8)[-1] == 0.5


def test_single_arrivals_are_looked_at_as_many_together_as_make_four_rounds() -> None:
    assert (window(1.0), window(0.75), window(0.25), window(2.0)) == (4, 6, 16, 4)
    assert window(0.0) == window(1e-9) == WINDOW_MAX


def test_without_momentum_and_at_the_beginning_the_rate_is_the_plans() -> None:
    assert outer_scale([], 4) == 1.0
    assert outer_scale([Heading(1.0, None)] * 9, 4) == 1.0


def test_a_lower_rate_is_left_again_after_a_rest_that_doubles_with_each_fall() -> None:
    """A run that is unstable at its full rate only: each trial costs it four rounds."""
    scales: list[float] = []
    past: list[Heading] = []
    for _ in range(1000):
        falls = falls_to(scales, scales[-1]) if scales else 0
        scales.append(outer_scale(past, 4, falls))
        past.insert(0, Heading(scales[-1], -0.1 if scales[-1] == 1.0 else 0.3))
    lengths = [len(list(same)) for _, same in groupby(scales)]
    assert lengths[:8] == [4, rest(4, 1), 4, rest(4, 2), 4, rest(4, 3), 4, rest(4, 4)]
    assert (rest(4, 1), rest(4, 4)) == (4 * REST, 32 * REST)


def test_whoever_lowered_a_rate_and_is_gone_leaves_nothing_behind() -> None:
    scales = run([-1.0] * 12 + [0.2] * 200)
    assert min(scales) == SCALE_MIN
    assert scales[-1] == 1.0


@given(st.lists(st.one_of(st.none(), st.floats(-1, 1)), max_size=60), st.integers(1, 8))
@example([-1.0] * 60, 1)
@example([-1.0] * 30 + [1.0] * 30, 3)
@example([None] * 9 + [-1.0] * 9, 8)
def test_a_rate_moves_by_halves_between_the_floor_and_the_plans(
    headings: list[float | None], most: int
) -> None:
    scales = run(headings, most)
    assert all(SCALE_MIN <= scale <= 1.0 for scale in scales)
    assert all(b in (a, a / 2, 2 * a) for a, b in pairwise(scales))


@given(st.data(), st.integers(3, 9))
def test_fewer_than_half_of_the_merges_of_a_window_never_lower_a_rate(
    data: st.DataObject, most: int
) -> None:
    """Merges of single arrivals, of whom a third is hostile: each heading is one volunteer's."""
    honest, hostile = st.floats(LEAST, 1), st.floats(-1, 1)
    period = [hostile if at < most // 3 else honest for at in range(most)]
    drawn = [data.draw(each) for _ in range(3) for each in period]
    assert set(run(drawn, most)) == {1.0}


def test_the_last_quarter_of_a_long_run_steps_by_less_and_less() -> None:
    assert [cooling(done, round(200 * done)) for done in (0.0, 0.5, 0.75)] == [1.0] * 3
    assert cooling(0.875, 175) == pytest.approx(0.55)
    assert cooling(1.0, 200) == cooling(1.5, 300) == pytest.approx(0.1)
    assert cooling(1.0, 159) == cooling(0.875, 100) == 1.0
    assert cooling(0.0, 5000) == 1.0  # nobody knows its end
