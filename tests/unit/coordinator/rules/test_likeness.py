"""The two bounds of a recompute."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.rules.checks import Drift, Redone
from coordinator.rules.likeness import DRIFT_TIMES, LOOSE, TIGHT, difference, judge

NUMBERS = st.floats(-2.0, 4.0)


def poisoned(share: float, written: float = 1.0) -> Redone:
    """The honest update with so much of its length added at a right angle."""
    longer = math.hypot(1.0, share)
    return Redone(cosine=1.0 / longer, norm_ratio=longer, written=written, state_cosine=1.0)


def test_a_difference_is_one_length() -> None:
    assert difference(1.0, 1.0) == 0.0
    assert difference(1.0, 1.1) == pytest.approx(0.1)
    assert difference(-1.0, 1.0) == pytest.approx(2.0)
    for share in (0.01, 0.1, 0.2):
        found = poisoned(share)
        assert difference(found.cosine, found.norm_ratio) == pytest.approx(share)
    for ratio in (0.0, 0.5, 1.0, 3.0):
        assert difference(0.0, ratio) >= 1.0  # noise, however it is scaled
    assert difference(math.nan, 1.0) == difference(1.0, math.inf) == math.inf


@pytest.mark.parametrize("share", [0.02, 0.1, 0.2])
def test_poison_fails_on_comparable_arithmetic(share: float) -> None:
    assert judge(poisoned(share), comparable=True) == "failed"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_work_that_agrees_passes_everywhere(precision: str) -> None:
    for comparable in (True, False):
        assert judge(poisoned(0.001), precision, comparable=comparable) == "passed"


def test_what_is_not_comparable_punishes_nobody() -> None:
    near, far = poisoned(LOOSE.difference - 0.01), poisoned(LOOSE.difference + 0.01)
    assert judge(near, comparable=False) == "passed"
    assert judge(far, comparable=False) == "unproven"
    flipped = Redone(cosine=-1.0, norm_ratio=1.0)
    assert judge(flipped, comparable=False) == "unproven"
    assert judge(flipped, comparable=True) == "failed"


def test_what_was_sent_and_the_state_count_too() -> None:
    for comparable, said in ((True, "failed"), (False, "unproven")):
        hidden = poisoned(0.0, written=0.9)
        assert judge(hidden, comparable=comparable) == said
        other = Redone(cosine=1.0, norm_ratio=1.0, state_cosine=0.2)
        assert judge(other, comparable=comparable) == said
    assert judge(Redone(cosine=1.0, norm_ratio=1.0), comparable=True) == "passed"


@given(NUMBERS, NUMBERS, NUMBERS, st.floats(), st.sampled_from(sorted(TIGHT)))
def test_who_passes_the_tight_bound_passes_the_loose_one(
    cosine: float, ratio: float, written: float, state: float, precision: str
) -> None:
    found = Redone(cosine=cosine, norm_ratio=ratio, written=written, state_cosine=state)
    here = judge(found, precision, comparable=True)
    elsewhere = judge(found, precision, comparable=False)
    assert here in ("passed", "failed")
    assert elsewhere in ("passed", "unproven")
    assert here == "failed" or elsewhere == "passed"


@pytest.mark.parametrize("field", ["cosine", "norm_ratio", "written", "state_cosine"])
def test_no_number_is_no_proof(field: str) -> None:
    found = Redone(cosine=1.0, norm_ratio=1.0, state_cosine=1.0)
    assert judge(replace(found, **{field: math.nan}), comparable=True) == "failed"


@pytest.mark.parametrize(
    ("apart", "drift", "here", "elsewhere"),
    [
        (0.1, 0.001, "failed", "passed"),
        (0.1, 0.06, "passed", "passed"),
        (0.4, 0.1, "failed", "unproven"),
        (0.4, 0.3, "passed", "passed"),
        (1.2, 0.7, "unproven", "unproven"),  # nothing is proved where noise would pass as well
        (1.2, 0.2, "failed", "unproven"),
    ],
)
def test_work_may_be_as_far_off_as_its_task_drifts(
    apart: float, drift: float, here: str, elsewhere: str
) -> None:
    found = replace(poisoned(apart), drift=Drift(difference=drift, state=0.999))
    assert judge(found, comparable=True) == here
    assert judge(found, comparable=False) == elsewhere


def test_a_state_may_be_as_far_off_as_the_task_drifts() -> None:
    found = replace(poisoned(0.1), state_cosine=0.8, drift=Drift(difference=0.1, state=0.9))
    assert judge(found, comparable=True) == "passed"
    made_up = replace(found, state_cosine=1.0 - 1.01 * DRIFT_TIMES**2 * 0.1)
    assert judge(made_up, comparable=True) == "failed"


def test_drift_is_no_excuse_for_what_was_sent() -> None:
    hidden = replace(poisoned(0.0, written=0.9), drift=Drift(difference=9.0, state=0.0))
    assert judge(hidden, comparable=True) == "failed"
