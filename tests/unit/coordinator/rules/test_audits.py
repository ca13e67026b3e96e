"""Rules of who may compare whose work."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.rules.draws import (
    CHECKER_AWAY_S,
    CHECKER_HERE_S,
    RECOMPUTE_FLOPS_MAX,
    ComputeDevice,
    Redone,
    comparable,
    device_kind,
    is_served,
    precision_of,
    unprovable,
)
from coordinator.rules.recompute_result import judge
from tests.support.examples import examples

KINDS = st.sampled_from(["cpu", "cuda", "mps", "xpu"])
MACHINES = st.builds(
    ComputeDevice, kind=KINDS, model=st.sampled_from(["", "A Card", " a card", "B"])
)
FIGURES = st.floats(-1.0, 1.0) | st.just(math.nan)


@settings(max_examples=examples(200))
@given(MACHINES, MACHINES, FIGURES, st.sampled_from(["float32", "bfloat16"]))
def test_no_figure_from_another_class_or_model_punishes(
    worker: ComputeDevice, auditor: ComputeDevice, cosine: float, precision: str
) -> None:
    found = Redone(cosine=cosine, norm_ratio=1.0)
    said = judge(
        found,
        precision_of(precision, auditor.kind),
        comparable=comparable(worker, auditor),
    )
    if said == "failed":
        assert worker.kind == auditor.kind
        assert worker.kind == "cpu" or worker.model.strip().lower() == auditor.model.strip().lower()
    if cosine > 0.9999:
        assert said == "passed"


@settings(max_examples=examples(100))
@given(MACHINES, MACHINES)
def test_comparing_goes_both_ways(one: ComputeDevice, other: ComputeDevice) -> None:
    assert comparable(one, other) == comparable(other, one)
    if one.kind != "cpu" and not one.model.strip():
        assert not comparable(one, other)  # a card that tells no model proves nothing


@given(KINDS, st.sets(KINDS))
def test_what_is_too_large_for_the_server_waits_with_a_reason_until_a_checker_serves_it(
    kind: str, served: set[str]
) -> None:
    assert unprovable(kind, RECOMPUTE_FLOPS_MAX, served) == ""
    why = unprovable(kind, 2 * RECOMPUTE_FLOPS_MAX, served)
    assert ("a checker can" in why) == (kind not in served)


@given(KINDS, st.floats(0, 2 * CHECKER_AWAY_S))
def test_what_the_server_can_do_itself_waits_less(kind: str, since: float) -> None:
    assert is_served(kind, 0.0, since) == (
        since < (CHECKER_HERE_S if kind == "cpu" else CHECKER_AWAY_S)
    )
    assert device_kind(f"{kind}:1") == kind
