"""Every kind of bad contribution gets its reason; honest ones pass."""

from __future__ import annotations

import math
from operator import itemgetter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.plan.plan import plan
from coordinator.rules.run_file import ValidationSettings
from coordinator.rules.validation import (
    Evidence,
    Judgement,
    Measurement,
    by_effort,
    cohort_limit,
    effort,
    judge,
    least,
    reach,
    voices,
)
from shared.protocol.contributions import SubmitRequest
from shared.workloads.base import TrainSettings

SETTINGS = ValidationSettings()
TRAIN = TrainSettings(lr=1e-3)
FEDAVG = plan({"preset": "fedavg", "max_staleness": 10})
REPORT = SubmitRequest(
    attempt=1,
    base_version=5,
    codec="float32",
    sha256="0" * 64,
    size=1,
    steps=50,
    samples=800,
    loss_first=3.0,
    loss_last=2.5,
)


def evidence(**changes: Any) -> Evidence:
    report = {
        key: changes.pop(key) for key in list(changes) if key in SubmitRequest.__struct_fields__
    }
    base: dict[str, Any] = {
        "submit": msgspec.structs.replace(REPORT, **report),
        "measurement": Measurement(norm=1.0),
        "task_steps": 50,
        "task_samples": 800,
        "head": 5,
        "base_version": 5,
        "trust": 1.0,
        "effort": 50.0,
        "cohort": [0.02] * 10,
        "loss": 3.0,
        "parameters": 1_000_000,
        "replayed": False,
    }
    return Evidence(**(base | changes))


def verdict(**changes: Any) -> Judgement:
    return judge(evidence(**changes), SETTINGS, TRAIN, FEDAVG)


def test_honest_work_is_accepted_with_full_weight() -> None:
    found = verdict()
    assert (found.state, found.weight, found.clip) == ("accepted", 1.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "reason", "says"),
    [
        ({"steps": 10**9}, "steps", "the task is 50 steps"),
        ({"samples": 1}, "steps", "800 samples"),
        ({"measurement": Measurement(problem="'head' is missing")}, "frame", "head"),
        ({"measurement": Measurement(norm=math.nan, finite=False)}, "not_finite", "NaN"),
        ({"measurement": Measurement(norm=0.0)}, "empty", "changes nothing"),
        ({"measurement": Measurement(norm=1000.0)}, "norm", "cannot exceed"),
        ({"measurement": Measurement(norm=10.0)}, "norm", "far above"),
        ({"replayed": True}, "replay", "another task"),
        ({"loss_last": 30.0}, "loss", "3 times"),
        ({"loss_last": -1.0}, "loss", "is impossible"),
        ({"base_version": 4, "head": 4}, "stale", "bound to 4"),
        ({"head": 16}, "stale", "11 versions"),
    ],
)
def test_bad_work_is_refused_with_a_reason(changes: dict[str, Any], reason: str, says: str) -> None:
    if reason == "stale" and "base_version" in changes:
        found = judge(
            msgspec.structs.replace(evidence(), base_version=4, head=4), SETTINGS, TRAIN, FEDAVG
        )
    else:
        found = verdict(**changes)
    assert (found.state, found.reason) == ("rejected", reason)
    assert says in found.message


def test_until_a_cohort_exists_a_large_update_is_scaled_to_it_not_refused() -> None:
    found = verdict(cohort=[0.02] * 3, measurement=Measurement(norm=10.0))
    assert found.state == "accepted"
    assert found.clip == pytest.approx(cohort_limit([0.02] * 3, SETTINGS) * 50 / 10.0)
    assert "scaled" in found.message


def test_where_norms_leap_a_large_update_is_scaled_and_only_a_huge_one_refused() -> None:
    lenient = msgspec.structs.replace(SETTINGS, clip_until=5.0)
    limit = cohort_limit([0.02] * 10, SETTINGS)

    def judged(per_step: float) -> Judgement:
        found = evidence(measurement=Measurement(norm=50 * per_step))
        return judge(found, lenient, TRAIN, FEDAVG)

    assert judged(4.9 * limit).clip == pytest.approx(1 / 4.9)
    assert judged(5.1 * limit).reason == "norm"


def test_the_first_contribution_of_all_is_bounded_by_what_its_optimiser_can_reach() -> None:
    found = verdict(cohort=[], loss=None, measurement=Measurement(norm=1e6))
    assert (found.state, found.reason) == ("rejected", "norm")


def test_staleness_lowers_the_weight_version_by_version() -> None:
    weights = [verdict(head=5 + gap).weight for gap in range(11)]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] == 1.0
    assert 0 < weights[10] < 0.1


def test_trust_multiplies_the_weight() -> None:
    assert verdict(trust=0.5).weight == 0.5


@given(st.lists(st.floats(0.9, 1.1), min_size=8, max_size=32), st.floats(0.8, 1.35))
def test_honest_spread_is_never_refused(cohort: list[float], norm: float) -> None:
    """Honest norms differ by at most 1.35 x the median (measured); such work must always pass."""
    found = verdict(cohort=cohort, measurement=Measurement(norm=norm * 50), parameters=10**9)
    assert found.state == "accepted"


def test_nobody_moves_the_model_further_than_the_inner_optimiser_can() -> None:
    assert reach(TRAIN, 50, 1_000_000) == pytest.approx(4 * 1e-3 * 50 * 1000)
    assert reach(TrainSettings(optimizer="sgd", lr=0.1, clip_norm=1.0), 50, 10) == pytest.approx(20)
    assert reach(TrainSettings(optimizer="sgd", clip_norm=0.0), 50, 10) == math.inf


GRADIENTS = plan({"preset": "gradient-average"})


def gradient(**changes: Any) -> Judgement:
    measured = {"effort": effort("gradient", TRAIN, 0, 50, 0)}
    return judge(evidence(**measured | changes), SETTINGS, TRAIN, GRADIENTS)


def test_work_from_the_warm_up_of_the_rate_is_no_measure_of_what_comes_later_unless_the_rate_counts() -> (
    None
):
    """Ten steps from step 0 of 40 steps of warm-up move a model by an eighth of what ten later
    steps do.
    """
    train = TrainSettings(lr=1e-3, warmup_steps=40)
    early, later = (effort("delta", train, first, 10, 0) for first in (0, 40))
    assert early == pytest.approx(10 * 5.5 / 40)
    assert later == 10
    first = [early * 0.02 / early] * 8
    honest = {"measurement": Measurement(norm=later * 0.02), "task_steps": 10, "steps": 10}
    assert verdict(**honest, effort=later, cohort=first).state == "accepted"
    by_steps = [early * 0.02 / 10] * 8
    assert verdict(**honest, effort=10.0, cohort=by_steps).reason == "norm"


@given(st.integers(1, 50), st.floats(0.5, 1.0), st.floats(0.9, 1.1))
def test_a_short_task_is_no_hostile_one(steps: int, power: float, luck: float) -> None:
    """What moves a model by steps^power in 50 steps does so in fewer, whoever's machine is slow."""
    middle = 0.02 * 50**power
    cohort = [by_effort(middle, 50.0, float(steps))] * 10
    short = {"measurement": Measurement(norm=luck * 0.02 * steps**power), "task_steps": steps}
    assert verdict(**short, steps=steps, effort=float(steps), cohort=cohort).clip == 1.0
    huge = {"measurement": Measurement(norm=20 * middle), "task_steps": steps}
    assert verdict(**huge, steps=steps, effort=float(steps), cohort=cohort).reason == "norm"


def test_a_mean_gradient_is_measured_whole_however_many_steps_it_is_the_mean_of() -> None:
    """The last range of a pass may be short; its gradient is as large as any other."""
    short = {"task_steps": 1, "steps": 1, "cohort": [1.0] * 10}
    assert gradient(cohort=[1.0] * 10).state == gradient(**short).state == "accepted"
    assert gradient(**short, measurement=Measurement(norm=9.0)).reason == "norm"


def test_a_gradient_has_no_bound_from_the_inner_optimiser() -> None:
    assert gradient(cohort=[], measurement=Measurement(norm=1e9)).state == "accepted"


def test_a_gradient_that_a_merge_overtook_is_superseded_and_a_bad_one_is_not() -> None:
    late = gradient(head=6, cohort=[1.0] * 10)
    assert (late.state, late.reason) == ("superseded", "stale")
    assert "paid" in late.message
    assert gradient(head=6, measurement=Measurement(norm=0.0)).state == "rejected"


def test_next_to_nothing_is_refused_before_anybody_else_has_worked() -> None:
    """Threat T1: twelve tasks of noise at 1e-12 made eleven versions, and the cohort."""
    tiny = verdict(cohort=[], measurement=Measurement(norm=1e-9))
    assert (tiny.state, tiny.reason) == ("rejected", "empty")
    floor = least(TRAIN, 50.0, 50, 1_000_000)
    assert verdict(cohort=[], measurement=Measurement(norm=1.01 * floor)).state == "accepted"
    assert gradient(cohort=[], measurement=Measurement(norm=1e-9)).state == "accepted"


def test_far_below_the_others_is_refused_like_far_above_and_proves_nothing() -> None:
    low = verdict(cohort=[0.5] * 10, measurement=Measurement(norm=0.4))
    high = verdict(cohort=[0.02] * 10, measurement=Measurement(norm=10.0))
    assert [found.reason for found in (low, high)] == ["norm"] * 2
    assert not low.certain
    assert not high.certain
    assert verdict(measurement=Measurement(norm=1e9)).certain  # no optimiser reaches that


def test_a_volunteer_has_one_voice_however_many_tasks_it_did() -> None:
    captured = [("eve", 1e-9)] * 60 + [("ann", 1.0), ("bob", 1.2), ("ann", 0.8), ("cyd", 1.1)]
    assert sorted(voices(captured, 32, itemgetter(1))) == [1e-9, 0.9, 1.1, 1.2]
    assert len(voices([(f"v{n}", 1.0) for n in range(50)], 32, itemgetter(1))) == 32
