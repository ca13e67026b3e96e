"""Every kind of bad contribution gets its reason; honest ones pass."""

from __future__ import annotations

import math
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
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
    measure,
    reach,
    voices,
)
from shared.protocol.contributions import SubmitRequest
from shared.tensors.codec import codec
from shared.tensors.spec import TensorSpec
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
        (
            {"measurement": Measurement(norm=0.02, momentum=4.0)},
            "norm",
            "the momentum changes by 4",
        ),
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
    assert measured == {"effort": 1.0}
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


def test_far_below_the_others_is_refused_like_far_above() -> None:
    low = verdict(cohort=[0.5] * 10, measurement=Measurement(norm=0.4))
    high = verdict(cohort=[0.02] * 10, measurement=Measurement(norm=10.0))
    assert [found.reason for found in (low, high)] == ["norm"] * 2
    assert verdict(measurement=Measurement(norm=1e9)).reason == "norm"  # no optimiser reaches that


def test_a_volunteer_has_one_voice_however_many_tasks_it_did() -> None:
    captured = [("eve", 1e-9)] * 60 + [("ann", 1.0), ("bob", 1.2), ("ann", 0.8), ("cyd", 1.1)]
    assert sorted(voices(captured, 32, itemgetter(1))) == [1e-9, 0.9, 1.1, 1.2]
    assert len(voices([(f"v{n}", 1.0) for n in range(50)], 32, itemgetter(1))) == 32


PLAIN = {"effort": 4.0, "task_steps": 4, "steps": 4, "cohort": [0.25] * 8}  # limit 0.75 a step


@pytest.mark.parametrize(
    ("changes", "message", "clip"),
    [
        ({"measurement": Measurement(norm=3.0)}, "accepted", 1.0),  # the limit itself
        (
            {"measurement": Measurement(norm=4.0), "cohort": [0.25] * 7},
            "accepted, scaled by 0.75 to the size of its cohort",
            0.75,
        ),
        ({"measurement": Measurement(norm=4 * 0.02 * 0.25)}, "accepted", 1.0),  # the least itself
        ({"measurement": Measurement(norm=16.0), "cohort": []}, "accepted", 1.0),  # the reach
        ({"loss_last": 9.0, "loss": 3.0}, "accepted", 1.0),
        ({"loss_last": 1.0, "loss": 0.0}, "accepted", 1.0),  # nothing to compare with
        ({"loss_last": 99.0, "loss": None}, "accepted", 1.0),
        ({"loss_last": 0.0}, "accepted", 1.0),
        ({"loss_last": None}, "accepted", 1.0),  # a batch without a token to learn
        ({"loss_last": 0.9, "loss": 0.3001}, "accepted", 1.0),
    ],
)
def test_what_lies_on_a_bound_is_accepted(
    changes: dict[str, Any], message: str, clip: float
) -> None:
    found = verdict(**PLAIN | changes)
    assert (found.state, found.message, found.clip) == ("accepted", message, clip)


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        (
            {"steps": 3},
            "steps",
            "the task is 4 steps over 800 samples, the submission claims 3 over 800",
        ),
        (
            {"samples": 801},
            "steps",
            "the task is 4 steps over 800 samples, the submission claims 4 over 801",
        ),
        (
            {"base_version": 4},
            "stale",
            "trained from version 5, the lease was bound to 4",
        ),
        ({"measurement": Measurement(norm=1.0, problem="torn")}, "frame", "torn"),
        (
            {"measurement": Measurement(norm=1.0, finite=False)},
            "not_finite",
            "the update holds NaN or infinity: the training diverged, or memory is bad",
        ),
        (
            {"measurement": Measurement(norm=0.0)},
            "empty",
            "the update changes nothing: the weights came back as they were sent",
        ),
        ({"replayed": True}, "replay", "the same bytes were submitted for another task"),
        ({"loss_last": math.inf}, "loss", "a loss of inf is impossible"),
        ({"loss_last": -0.5}, "loss", "a loss of -0.5 is impossible"),
        (
            {"loss_last": 9.5},
            "loss",
            "the loss 9.500 is more than 3 times the global one (3.000)",
        ),
        (
            {"measurement": Measurement(norm=16.5), "cohort": []},
            "norm",
            "the update has norm 16.5; 4 steps at lr 0.001 cannot exceed 16",
        ),
        (
            {"measurement": Measurement(norm=0.015), "cohort": []},
            "empty",
            "the update has norm 0.015: 4 steps at lr 0.001 change a model more than that",
        ),
        (
            {"measurement": Measurement(norm=4.0)},
            "norm",
            "the norm a step, 1, is far above that of other volunteers (limit 0.75)",
        ),
        (
            {"measurement": Measurement(norm=0.02), "cohort": [0.5] * 8},
            "norm",
            "the norm a step, 0.005, is far below that of other volunteers (0.5)",
        ),
        (
            {"head": 16},
            "stale",
            "11 versions were merged since it began, at most 10 are allowed: nothing is counted "
            "against you",
        ),
    ],
)
def test_what_is_refused_reads_why(changes: dict[str, Any], reason: str, message: str) -> None:
    bound = changes.pop("base_version", None)
    found = evidence(**PLAIN | changes)
    if bound is not None:
        found = msgspec.structs.replace(found, base_version=bound, head=bound)
    said = judge(found, SETTINGS, TRAIN, FEDAVG)
    assert (said.state, said.reason, said.message) == (
        "rejected",
        reason,
        message,
    )


def test_superseded_work_reads_what_overtook_it() -> None:
    late = gradient(head=7, cohort=[1.0] * 10)
    assert late.message == "version 7 was merged meanwhile; the work is paid"


def test_a_voice_is_the_median_of_the_newest_eight() -> None:
    many = [("ann", float(n)) for n in range(20)]
    assert voices(many, 1, itemgetter(1)) == [3.5]
    assert voices([*many, ("bob", 9.0)], 1, itemgetter(1)) == [3.5]
    assert voices([*many, ("bob", 9.0)], 2, itemgetter(1)) == [3.5, 9.0]


def test_a_spread_cohort_leaves_more_room() -> None:
    cohort = [1.0, 2.0, 3.0, 4.0, 9.0]  # median 3, median deviation 1
    assert cohort_limit(cohort, SETTINGS) == pytest.approx(3 + 6 * 1.4826)
    wide = msgspec.structs.replace(SETTINGS, norm_room=4.0)
    assert cohort_limit(cohort, wide) == 15.0


@pytest.mark.parametrize(("optimizer", "expected"), [("sgd", 0.0), ("adamw", 0.05), ("muon", 0.05)])
def test_the_least_of_an_update_is_a_hundredth_of_a_random_walk(
    optimizer: Any, expected: float
) -> None:
    train = TrainSettings(optimizer=optimizer, lr=1e-3)
    assert least(train, 10.0, 4, 1_000_000) == pytest.approx(expected)
    assert least(train, 10.0, 0, 1_000_000) == pytest.approx(2 * expected)


@pytest.mark.parametrize(
    ("its", "ours", "expected"), [(4.0, 4.0, 2.0), (4.0, 16.0, 2.0), (16.0, 4.0, 1.0)]
)
def test_a_norm_is_compared_by_steps_or_by_their_root(
    its: float, ours: float, expected: float
) -> None:
    assert by_effort(8.0, its, ours) == expected


SCHEMA = (TensorSpec("w", (2, 2)), TensorSpec("bn.running_var", (2,), role="buffer"))
STEPS = [[3.0, 0.0], [0.0, 4.0]]


@pytest.mark.parametrize(
    ("weights", "variance", "found"),
    [
        (STEPS, [1.0, 0.0], Measurement(norm=5.0)),
        (
            STEPS,
            [1.0, -0.5],
            Measurement(norm=5.0, problem="bn.running_var holds a variance below zero"),
        ),
    ],
)
def test_a_file_is_measured_by_its_parameters(
    tmp_path: Path, weights: list[list[float]], variance: list[float], found: Measurement
) -> None:
    tensors = {"w": np.array(weights, "f4"), "bn.running_var": np.array(variance, "f4")}
    codec("float32").encode(tensors, SCHEMA, tmp_path / "update")
    assert measure(tmp_path / "update", SCHEMA, "float32") == found


def test_infinity_in_a_file_is_found(tmp_path: Path) -> None:
    tensors = {"w": np.array(STEPS, "f4"), "bn.running_var": np.ones(2, "f4")}
    codec("float32").encode(tensors, SCHEMA, path := tmp_path / "update")
    three, infinity = np.float32(3).tobytes(), np.float32(np.inf).tobytes()
    path.write_bytes(path.read_bytes().replace(three, infinity))
    assert measure(path, SCHEMA, "float32") == Measurement(norm=math.inf, finite=False)


def test_a_torn_file_is_measured_as_a_problem(tmp_path: Path) -> None:
    (tmp_path / "update").write_bytes(b"torn")
    found = measure(tmp_path / "update", SCHEMA, "float32")
    assert (found.norm, found.finite) == (0.0, True)
    assert "bytes" in found.problem


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, 4 + 6 * 1.4826),
        ({"norm_limit": 7.0}, 4 + 7 * 1.4826),
        ({"norm_limit": 1.0}, 4 + 2 * 4),
        ({"norm_room": 3.0}, 4 + 3 * 4),
    ],
)
def test_the_organiser_sets_the_room_of_a_cohort(settings: dict[str, float], limit: float) -> None:
    cohort = [2.0, 3.0, 4.0, 5.0, 4.0]
    assert cohort_limit(cohort, ValidationSettings(**settings)) == pytest.approx(limit)


def test_the_organiser_sets_the_loss_that_is_too_high() -> None:
    said = evidence(loss_last=6.0)
    for most, state in ((1.9, "rejected"), (2.1, "accepted")):
        settings = ValidationSettings(loss_limit=most)
        assert judge(said, settings, TRAIN, FEDAVG).state == state
