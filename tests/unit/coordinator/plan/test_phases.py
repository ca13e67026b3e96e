"""The phases of a plan: when each ends, and that none comes back."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.plan.plan import improvement, in_phase, phase_index, plan
from coordinator.plan.plan_tables import Phase


def test_diloco_begins_with_plain_averaging_at_few_local_steps() -> None:
    whole = plan({"preset": "diloco"})
    warm, early, later = (in_phase(whole, phase_index(whole, v, 0)) for v in (29, 69, 70))
    assert (warm.optimizer, warm.lr, warm.momentum, warm.local_steps) == ("sgd", 1.0, 0.0, 10)
    assert (early.optimizer, early.lr, early.momentum, early.local_steps) == (
        "nesterov",
        0.4,
        0.9,
        10,
    )
    assert later == msgspec.structs.replace(early, local_steps=0)


PHASES = plan(
    {
        "phases": [
            {"until_versions": 10, "overrides": {"quorum": 5}},
            {
                "until_tokens": 1000,
                "until_slope": 0.01,
                "slope_window": 3,
                "overrides": {"quorum": 6},
            },
        ]
    }
)

FLAT, FALLING = (
    (9.0, 2.0, 1.99, 1.981),
    (9.0, 2.0, 1.99, 1.98),
)  # by 0.95 % and by 1 % over the last three


@pytest.mark.parametrize(
    ("version", "tokens", "losses", "quorum"),
    [
        (0, 0, (), 5),
        (9, 10**9, FLAT, 5),  # conditions of a later phase do not end an earlier one
        (10, 999, (), 6),
        (10, 999, FLAT, 6),  # measured before it began
        (10, 1000, (), 3),
    ],
)
def test_a_phase_ends_at_the_first_of_its_conditions(
    version: int, tokens: int, losses: tuple[float, ...], quorum: int
) -> None:
    index = phase_index(PHASES, version, tokens, losses)
    assert in_phase(PHASES, index).quorum == quorum


@pytest.mark.parametrize(
    ("losses", "window", "fell"),
    [
        ((), 2, None),
        ((9.0,), 2, None),
        ((9.0, 0.5, 0.25), 2, 0.5),
        ((1.0, 0.5, 0.25), 3, 0.75),
        ((0.5, 0.75), 2, -0.5),
        ((-0.5, -0.75), 2, 0.5),
        ((0.0, 0.0), 2, 0.0),
    ],
)
def test_by_how_much_a_loss_fell(
    losses: tuple[float, ...], window: int, fell: float | None
) -> None:
    assert improvement(losses, window) == fell


def test_a_loss_that_falls_by_the_share_that_was_asked_for_keeps_the_phase() -> None:
    whole = plan({"phases": [{"until_slope": 0.5, "slope_window": 2}]})
    assert phase_index(whole, 0, 0, (1.0, 0.5)) == 0
    assert phase_index(whole, 0, 0, (1.0, 0.51)) == 1


@pytest.mark.parametrize(
    ("losses", "index"),
    [((), 1), (FLAT[:2], 1), (FLAT, 2), (FALLING, 1), ((1.0, 1.0, 1.5), 2), ((0.0, 0.0, 0.0), 2)],
)
def test_a_phase_ends_when_the_loss_hardly_falls_over_its_last_evaluations(
    losses: tuple[float, ...], index: int
) -> None:
    assert phase_index(PHASES, 12, 0, losses, reached=1) == index


def test_a_phase_that_is_over_does_not_come_back() -> None:
    assert phase_index(PHASES, 21, 0, FALLING) == 1
    assert phase_index(PHASES, 21, 0, FALLING, reached=2) == 2
    assert phase_index(PHASES, 5, 0, FALLING, reached=2) == 2
    assert in_phase(PHASES, 2).quorum == 3


def test_a_phase_may_end_by_its_loss_alone() -> None:
    found = plan({"phases": [{"until_slope": 0.01, "overrides": {"quorum": 5}}]})
    assert [phase_index(found, 99, 10**9, [2.0] * count) for count in (4, 5)] == [0, 1]


@given(
    st.integers(0, 30),
    st.integers(0, 2000),
    st.lists(st.floats(-9, 9), max_size=6),
    st.integers(0, 2),
)
def test_phases_only_go_on(version: int, tokens: int, losses: list[float], reached: int) -> None:
    assert phase_index(PHASES, version, tokens, losses, reached) >= reached


def test_a_phase_may_change_the_kind_of_update() -> None:
    gradients = {"update": "gradient", "optimizer": "adam", "lr": 0.001}
    whole = plan(
        {
            "preset": "diloco",
            "phases": [{"until_tokens": 10**6, "overrides": gradients | {"momentum": 0}}],
        }
    )
    assert in_phase(whole, phase_index(whole, 0, 0)).update == "gradient"
    assert in_phase(whole, phase_index(whole, 0, 10**6)).update == "delta"


def test_a_phase_is_a_plain_value() -> None:
    assert Phase(until_versions=3) == Phase(until_versions=3)
