"""Steps of a task that a recompute can prove, from measured drift."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules.provable_length import (
    DRIFT_SOUGHT,
    EXTRAPOLATED,
    DriftPoint,
    ProvableLength,
    described,
    is_due,
    provable_steps,
)

DRIFTS = st.floats(0.0, 2.0) | st.just(math.nan) | st.just(math.inf)


def points(*drifts: float) -> list[DriftPoint]:
    """Return the drifts after 1, 2, 4, ... steps."""
    return [DriftPoint(steps=2**n, drift=drift) for n, drift in enumerate(drifts)]


def test_a_task_that_drifts_little_keeps_its_length() -> None:
    assert provable_steps(points(1e-4, 2e-4, 3e-4, 4e-4, 5e-4), 16) == 16


def test_a_bound_lies_between_the_last_small_drift_and_the_first_large_one() -> None:
    # from 8 to 16 steps the drift grows a hundredfold: half of that at 12
    assert provable_steps(points(0.001, 0.002, 0.003, 0.005, 0.5), 64) == 12
    assert provable_steps(points(0.06), 64) == 1
    assert provable_steps(points(0.001, math.nan), 64) in (1, 2)


def test_nothing_is_extrapolated_past_eight_times_what_was_measured() -> None:
    flat = points(1e-6, 1e-6, 1e-6)
    assert provable_steps(flat, 10_000) == EXTRAPOLATED * 4
    growing = points(0.01, 0.02)  # doubles with each step
    assert provable_steps(growing, 10_000) == 3


@given(st.lists(DRIFTS, min_size=1, max_size=12), st.integers(1, 1 << 20))
def test_a_bound_is_never_above_a_measured_large_drift(drifts: list[float], planned: int) -> None:
    measured = points(*drifts)
    most = provable_steps(measured, planned)
    assert 1 <= most <= planned
    large = [one.steps for one in measured if not one.drift <= DRIFT_SOUGHT]
    assert most <= max(1, *large[:1] or [EXTRAPOLATED * measured[-1].steps])


def test_a_length_is_no_bound_where_the_run_hands_out_no_longer_tasks() -> None:
    flat = points(1e-6, 2e-6, 3e-6)
    assert ProvableLength.of(flat, 20).columns == {"steps_provable": 0, "drift": 3e-6}
    assert ProvableLength.of(flat, 90).columns == {"steps_provable": 32, "drift": 3e-6}
    steep = ProvableLength.of(points(0.01, math.nan), 90)
    assert (steep.steps, steep.drift) == (1, 0.01)
    assert ProvableLength.of(points(0.3), 90).columns == {"steps_provable": 1, "drift": 0.3}


def test_a_run_says_its_drift_and_the_bound_of_its_tasks() -> None:
    assert described(None, None, 0) == ""
    assert described(3e-6, 0, 32) == (
        "3e-06 of an update at version 0 (sought: 0.05); tasks of at most 32 steps"
    )
    assert described(3e-6, 8, 0).endswith("; no bound on tasks")


@pytest.mark.parametrize(
    ("head", "measured", "due"),
    [(0, None, True), (0, 0, False), (7, 0, False), (8, 0, True), (15, 8, False), (16, 8, True)],
)
def test_a_run_is_measured_at_its_start_and_each_time_it_has_doubled(
    head: int, measured: int | None, due: bool
) -> None:
    assert is_due(head, measured) is due
