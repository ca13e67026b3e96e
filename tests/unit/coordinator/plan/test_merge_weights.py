"""How much each contribution to a merge counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.plan.merge_weights import Term, staleness_weight, weigh
from coordinator.plan.plan import plan
from coordinator.plan.plan_tables import Plan


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"max_staleness": 3}, {0: 1, 1: 0.75, 3: 0.25, 4: 0}),
        ({"table": "s4"}, {0: 1, 50: 1, 51: 149 / 150, 125: 0.5, 200: 0, 201: 0}),
        ({"table": "polynomial"}, {0: 1, 3: 0.5, 8: 1 / 3, 11: 0}),
        ({"table": "constant"}, {0: 1, 10: 1, 11: 0}),
        ({"table": "inverse"}, {0: 1, 1: 1, 2: 0.5, 10: 0.1, 11: 0}),
    ],
)
def test_weight_tables(raw: dict[str, Any], expected: dict[int, float]) -> None:
    wants = plan(raw)
    assert {gap: staleness_weight(wants, gap) for gap in expected} == pytest.approx(expected)


@given(st.sampled_from(["linear", "s4", "polynomial", "constant", "inverse"]))
def test_a_later_contribution_never_counts_more(table: str) -> None:
    wants = plan({"table": table})
    weights = [staleness_weight(wants, gap) for gap in range(230)]
    assert weights[0] == 1
    assert weights == sorted(weights, reverse=True)
    assert weights[-1] == 0


def test_a_base_that_does_not_exist_yet_is_refused() -> None:
    with pytest.raises(ValueError, match="lies 2 versions in the future"):
        staleness_weight(Plan(), -2)


def test_work_of_nothing_counts_nothing_and_half_a_step_half() -> None:
    found = weigh(plan({}), [Term(work=0.0), Term(work=0.5)])
    assert (list(found.weights), found.work) == ([0.0, 0.5], 0.5)


def test_weight_is_work_times_staleness() -> None:
    found = weigh(
        plan({"max_staleness": 3}),
        [Term(work=50), Term(work=10, gap=1), Term(work=25), Term(work=50, gap=9)],
    )
    assert list(found.weights) == [50, 7.5, 25, 0]
    assert (found.scale, found.work) == (1, 85)


def test_with_damping_a_single_late_arrival_moves_less() -> None:
    late = [Term(work=50, gap=3)]
    assert weigh(plan({"preset": "fedasync"}), late).scale == pytest.approx(0.5)
    assert weigh(plan({"preset": "fedavg"}), late).scale == 1
    assert weigh(plan({"preset": "async-sgd"}), late).scale == pytest.approx(1 / 3)


def test_fedbuff_divides_by_the_work_and_not_by_the_damped_weights() -> None:
    """theta <- theta - lr / B x sum w(s) delta (Nguyen et al. 2022), with equal work."""
    found = weigh(plan({"preset": "fedbuff"}), [Term(work=9, gap=0), Term(work=9, gap=3)])
    share = [weight / sum(found.weights) * found.scale for weight in found.weights]
    assert share == pytest.approx([0.5 * 1, 0.5 * 0.5])


def test_arrivals_may_move_by_their_share_of_the_workers() -> None:
    warm = plan({"preset": "fedasync", "arrival_scale": "sqrt"})
    assert weigh(warm, [Term(work=9)], live_workers=4).scale == pytest.approx(0.5)
    assert weigh(warm, [Term(work=9)] * 4, live_workers=4).scale == 1
    assert weigh(warm, [Term(work=9)] * 9, live_workers=4).scale == 1
    assert weigh(plan({}), [Term(work=9)] * 3, live_workers=8).scale == pytest.approx(3 / 8)
    assert weigh(plan({}), [Term(work=9)] * 3, live_workers=2).scale == 1


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_impossible_work_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="negative or not finite"):
        weigh(Plan(), [Term(work=value)])


def test_when_all_are_too_late_nothing_counts() -> None:
    found = weigh(plan({"preset": "fedasync"}), [Term(work=5, gap=99)])
    assert (list(found.weights), found.scale, found.work) == ([0.0], 1.0, 0.0)
