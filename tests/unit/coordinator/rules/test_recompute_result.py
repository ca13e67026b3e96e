"""The two bounds of a recompute."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.rules.draws import Redone
from coordinator.rules.recompute_result import (
    DRIFT_MAX,
    LOOSE,
    TIGHT,
    difference,
    judge,
    raw_difference,
)

NUMBERS = st.floats(-2.0, 4.0)


def poisoned(share: float) -> Redone:
    """The honest update with so much of its length added at a right angle."""
    longer = math.hypot(1.0, share)
    return Redone(cosine=1.0 / longer, norm_ratio=longer)


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
    near, far = poisoned(LOOSE - 0.01), poisoned(LOOSE + 0.01)
    assert judge(near, comparable=False) == "passed"
    assert judge(far, comparable=False) == "unproven"
    flipped = Redone(cosine=-1.0, norm_ratio=1.0)
    assert judge(flipped, comparable=False) == "unproven"
    assert judge(flipped, comparable=True) == "failed"


def test_buffers_count_like_parameters() -> None:
    for comparable, result in ((True, "failed"), (False, "unproven")):
        other = replace(poisoned(0.0), buffers=0.3)
        assert judge(other, comparable=comparable) == result
    assert judge(replace(poisoned(0.0), buffers=0.001), comparable=True) == "passed"


@given(st.floats(0.0, 0.3), st.floats(1e-9, 1.0))
def test_the_raw_difference_is_told_from_the_encoded_one(raw: float, rounding: float) -> None:
    encoded = math.sqrt(raw**2 + math.sqrt(6) * rounding * raw)
    redone = replace(poisoned(encoded), rounding=rounding)
    assert raw_difference(redone) == pytest.approx(raw, abs=1e-6)


@given(NUMBERS, NUMBERS, st.floats(0.0, 1.0), st.floats(0.0), st.sampled_from(sorted(TIGHT)))
def test_who_passes_the_tight_bound_passes_the_loose_one(
    cosine: float, ratio: float, rounding: float, buffers: float, precision: str
) -> None:
    found = Redone(cosine=cosine, norm_ratio=ratio, rounding=rounding, buffers=buffers)
    here = judge(found, precision, comparable=True)
    elsewhere = judge(found, precision, comparable=False)
    assert here in ("passed", "failed")
    assert elsewhere in ("passed", "unproven")
    assert here == "failed" or elsewhere == "passed"


@pytest.mark.parametrize("field", ["cosine", "norm_ratio", "rounding"])
def test_no_number_is_no_proof(field: str) -> None:
    found = Redone(cosine=1.0, norm_ratio=1.0)
    assert judge(replace(found, **{field: math.nan}), comparable=True) == "failed"


@pytest.mark.parametrize(
    ("apart", "drift", "here", "elsewhere"),
    [
        (0.1, 0.001, "failed", "passed"),
        (0.1, 0.06, "passed", "passed"),
        (0.4, 0.1, "failed", "unproven"),
        (0.39, DRIFT_MAX, "passed", "passed"),
        (1.2, DRIFT_MAX, "failed", "unproven"),
        (0.4, 0.3, "unproven", "unproven"),  # nobody passes nor fails on what drifts so far
        (1.2, 0.7, "unproven", "unproven"),
    ],
)
def test_work_may_be_as_far_off_as_its_task_drifts(
    apart: float, drift: float, here: str, elsewhere: str
) -> None:
    found = replace(poisoned(apart), drift=drift)
    assert judge(found, comparable=True) == here
    assert judge(found, comparable=False) == elsewhere
