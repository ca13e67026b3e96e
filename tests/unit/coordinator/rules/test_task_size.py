"""How large a task is and what it pays."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.plan.plan import plan
from coordinator.rules import run_file
from coordinator.rules.dispatch import Load
from coordinator.rules.lease_times import LEASE_MAX_S, finish_in_s
from coordinator.rules.task_size import (
    CLAMP,
    GAME_BYTES_MAX,
    UPLOAD_SLACK_BYTES,
    RoundInWork,
    Run,
    RunPace,
    StepsAndTokens,
    TaskInWork,
    clamped,
    cooling,
    episodes_bytes_max,
    estimate_s,
    memory_bytes,
    pass_seed,
    price_micro,
    round_in_work,
    share_done,
    split_at,
    steps_for,
    steps_of_task,
    task_seed,
    total_steps,
    upload_bytes_max,
)
from shared.protocol.base import Reason
from shared.protocol.limits import DEVICE_BYTES
from tests.support.waiting_workers import ask, run_of, todo_of, waiter

HEAD = 'name = "r"\nworkload = "gpt"\ndataset = "d"\n'
SIZED = run_file.parse(HEAD)
SHARED = run_file.parse(HEAD + "[model]\nshared_momentum = true\n")


def test_ranges_follow_each_other_and_the_last_one_is_short() -> None:
    outcome = ask([waiter(i) for i in range(4)], [run_of(samples_total=100)])
    assert [(a.start, a.stop, a.steps) for a in outcome.assignments] == [
        (0, 40, 10),
        (40, 80, 10),
        (80, 100, 5),
    ]
    assert outcome.moved == {(1, ""): (1, 100)}
    assert [r.reason for r in outcome.refusals.values()] == [Reason.ALL_TAKEN]


def test_pay_is_for_samples_so_a_short_task_earns_less() -> None:
    outcome = ask([waiter(1), waiter(2)], [run_of(samples_total=42)])
    assert [a.price_micro for a in outcome.assignments] == [1000, 50]


@pytest.mark.parametrize("passes", [0, 2])
@pytest.mark.parametrize("tasks", [0, 1])
def test_the_next_pass_begins_while_the_last_tasks_of_one_are_open(passes: int, tasks: int) -> None:
    load = Load(run_id=1, open=tasks, price_micro=1000)
    outcome = ask([waiter()], [run_of(cursor=1000, passes=passes)], loads=[load])
    assert outcome.assignments[0].pass_no == 2
    assert outcome.moved == {(1, ""): (2, 40)}


def test_the_last_pass_ends_only_when_nothing_is_open() -> None:
    last = run_of(cursor=1000, pass_no=2, passes=2)
    outcome = ask([waiter()], [last], loads=[Load(run_id=1, open=1, price_micro=1000)])
    assert outcome.refusals[0].reason == Reason.ALL_TAKEN
    assert outcome.moved == {}
    assert ask([waiter()], [last]).moved == {(1, ""): (3, 0)}


def test_after_the_last_pass_nothing_is_cut() -> None:
    last = run_of(cursor=1000, passes=1)
    outcome = ask([waiter()], [last])
    assert outcome.moved == {(1, ""): (2, 0)}  # how the end of the run is noticed
    assert outcome.refusals[0].reason == Reason.MERGING
    assert ask([waiter()], [run_of(pass_no=2, passes=1)]).moved == {}


def test_the_tail_of_a_pass_waits_for_what_came_back() -> None:
    outcome = ask([waiter(1), waiter(2)], [run_of(cursor=1000)], todo=[todo_of(5, 0, 40)])
    assert [a.task_id for a in outcome.assignments] == [5]
    assert outcome.refusals[1].reason == Reason.ALL_TAKEN


def test_tasks_are_sized_to_the_worker() -> None:
    run = run_of(task={"target_seconds": 60, "min_steps": 5, "max_steps": 500, "local_steps": 50})
    assert steps_for(run, 0) == 50  # nobody knows how fast it is
    assert steps_for(run, 1e9) == 30  # a benchmark is believed by half
    assert steps_for(run, 1e8) == 5
    assert steps_for(run, 1e12) == 500
    seen = run_of(task={"target_seconds": 60}, pace=RunPace(step_s=2.0, flops=1e9))
    assert steps_for(seen, 1e9) == 30
    assert steps_for(seen, 2e9) == 60
    assert steps_for(seen, 0) == 30


def test_without_a_target_only_the_slow_get_less() -> None:
    task = {"local_steps": 50, "batch_size": 4}
    run = run_of(task=task, pace=RunPace(step_s=1.0, flops=1e9))
    found = {flops: steps_for(run, flops) for flops in (0, 1e7, 2e8, 8e8, 1e9, 1e15)}
    assert found == {0: 50, 1e7: 5, 2e8: 10, 8e8: 50, 1e9: 50, 1e15: 50}
    short = run_of(task={"local_steps": 3}, pace=run.pace)
    assert steps_for(short, 1e7) == 3  # min_steps asks nobody for more than a task has
    back = ask(
        [waiter(1, flops=2e8)],
        [msgspec.structs.replace(run, cursor=1000)],
        todo=[todo_of(9, 100, 300)],
    )
    assert (back.assignments[0].stop, back.assignments[0].rest_stop) == (140, 300)


def test_without_a_measured_pace_or_by_wish_everybody_gets_the_same() -> None:
    fixed = {"local_steps": 10, "by_speed": False}
    for run in (
        run_of(),
        run_of(pace=RunPace(step_s=1.0, flops=0.0)),
        run_of(task=fixed, pace=RunPace(step_s=1.0, flops=1e9)),
    ):
        assert {steps_for(run, flops) for flops in (0, 1e6, 1e15)} == {10}


def test_work_that_took_no_time_never_counts_below_a_quarter_of_the_own_benchmark() -> None:
    """Threat T9: nine lazy tasks made leases of 5,000 steps in 120 s out of 535 in 899 s."""
    lazy = run_of(task={"target_seconds": 60}, pace=RunPace(step_s=1e-6, flops=1e9))
    assert lazy.step_flops == 1e9
    assert steps_for(lazy, 1e9) == 240  # a benchmark alone gives 60
    assert finish_in_s(lazy, 5000, 1e9) == 3 * 5000 * 0.25


def test_what_came_back_is_split_for_a_slow_worker() -> None:
    task = {"target_seconds": 60, "local_steps": 50, "batch_size": 4, "min_steps": 5}
    run = run_of(task=task, pace=RunPace(step_s=1.0, flops=1e9), cursor=1000)
    outcome = ask([waiter(1, flops=1e8), waiter(2)], [run], todo=[todo_of(9, 100, 300)])
    one = outcome.assignments[0]
    assert (one.task_id, one.start, one.stop, one.rest_stop, one.steps) == (9, 100, 124, 300, 6)
    assert outcome.more  # the rest is there for the second one, once it has a number
    whole = ask([waiter(1, flops=1e9)], [run], todo=[todo_of(9, 100, 300)])
    assert (whole.assignments[0].stop, whole.more) == (300, False)


@given(
    size=st.integers(1, 10_000),
    batch=st.integers(1, 64),
    target=st.sampled_from([0.0, 1.0, 300.0]),
    flops=st.sampled_from([0.0, 1e-3, 1e6, 1e9, 1e15, 1e24]),
    step_s=st.floats(1e-6, 1e4),
)
def test_numbers_stay_within_their_limits(
    size: int, batch: int, target: float, flops: float, step_s: float
) -> None:
    task = {"target_seconds": target, "batch_size": batch}
    for pace in (None, RunPace(step_s=step_s, flops=1e9)):
        run = run_of(task=task, pace=pace)
        steps = steps_for(run, flops)
        assert 5 <= steps <= 5000
        assert 120 <= finish_in_s(run, steps, flops) <= LEASE_MAX_S
        stop = split_at(run, 50, 50 + size, flops)
        assert 50 < stop <= 50 + size
        assert stop == 50 + size or (stop - 50) % batch == 0
        assert price_micro(run, size) >= 1
        assert (estimate_s(run, 10, flops) or 0) >= 0


def test_a_returned_range_longer_than_can_be_proved_is_split() -> None:
    run = msgspec.structs.replace(run_of(task={"batch_size": 4}), steps_provable=7)
    assert split_at(run, 50, 50 + 4 * 20, 1e9) == 50 + 4 * 7
    assert split_at(run, 50, 50 + 4 * 7, 1e9) == 50 + 4 * 7


def _pace(transfer_s: float) -> RunPace:
    return RunPace(step_s=3.0, flops=1e9, train_step_s=2.0, transfer_s=transfer_s)


@pytest.mark.parametrize(
    ("table", "parameters", "transfer_s", "steps"),
    [
        ({"transfer_share": 0.1}, 124_000_000, 90.0, 405),  # 810 s of training beside 90 s
        ({"transfer_share": 0.2}, 124_000_000, 90.0, 180),
        ({}, 124_000_000, 900.0, 668),  # the most that learns
        ({}, 10**10, 900.0, 1000),
        ({}, 10_000_000, 900.0, 190),
        ({}, 800_000, 900.0, 60),
        ({}, 124_000_000, 1.0, 30),
        ({"transfer_share": 0.0}, 124_000_000, 90.0, 30),
        ({"preset": "sync-sgd"}, 124_000_000, 90.0, 30),  # a version of every mini-batch
    ],
)
def test_tasks_are_sized_so_that_transfers_take_their_share(
    table: dict[str, Any], parameters: int, transfer_s: float, steps: int
) -> None:
    assert steps_of_task(SIZED, plan(table), parameters, _pace(transfer_s)) == steps


def test_tasks_have_the_least_steps_until_the_times_of_some_are_known() -> None:
    whole, unknown = plan({}), RunPace(step_s=3.0, flops=1e9)
    assert steps_of_task(SIZED, whole, 124_000_000, None) == 30
    assert steps_of_task(SIZED, whole, 124_000_000, unknown) == 30
    assert steps_of_task(SHARED, whole, 124_000_000, None) == 15
    assert steps_of_task(SHARED, whole, 800_000, _pace(2.0)) == 19
    assert steps_of_task(SHARED, whole, 800_000, _pace(90.0)) == 60


def test_a_number_in_the_file_is_never_overridden() -> None:
    file = run_file.parse(HEAD + "[task]\nlocal_steps = 7\n")
    assert steps_of_task(file, plan({}), 124_000_000, _pace(900.0)) == 7


def rounds_of(left_s: float | None, devices: dict[str, float] | None = None) -> Run:
    """Return a run whose whole tasks have 300 steps of a second, and 20 s of transfers."""
    left = {(worker, "cpu"): seconds for worker, seconds in (devices or {}).items()}
    in_work = None if left_s is None else RoundInWork(merge_at=0.0, left_s=left)
    pace = RunPace(step_s=320 / 300, flops=1e9, train_step_s=1.0, transfer_s=20.0, round=in_work)
    return run_of(
        task={"batch_size": 4},
        local_steps=300,
        pace=pace,
        left_s=left_s,
        samples_total=10**6,
    )


@pytest.mark.parametrize(
    ("left_s", "steps"),
    [
        (None, 300),
        (-50.0, 300),
        (60.0, 300),  # its task waits for the merge
        (75.0, 300),  # a short rest is not worth its transfers
        (170.0, 150),
        (320.0, 300),
        (900.0, 300),
    ],
)
def test_a_task_that_begins_in_the_middle_of_a_round_ends_with_it(
    left_s: float | None, steps: int
) -> None:
    run = rounds_of(left_s)
    assert steps_for(run, 1e9) == steps
    slow = steps_for(run, 2e8)
    assert slow == (30 if steps == 150 else 60)


def test_a_device_in_work_begins_its_next_task_after_its_present_one() -> None:
    run = rounds_of(400.0, {"worker-1": 2.0, "worker-2": 170.0})
    outcome = ask([waiter(n, flops=1e9) for n in (1, 2, 3)], [run])
    assert [a.steps for a in outcome.assignments] == [300, 150, 300]


def test_a_returned_task_brings_nobody_out_of_step() -> None:
    """A quick machine got a slow one's short task, and then ended before all others."""
    short = [todo_of(5, 0, 4 * 60)]
    in_step = rounds_of(1.0)
    quick, slow = waiter(1, flops=1e9), waiter(2, flops=2e8)
    outcome = ask([quick], [in_step], todo=short)
    assert [(a.task_id, a.steps) for a in outcome.assignments] == [(None, 300)]
    assert [a.task_id for a in ask([slow], [in_step], todo=short).assignments] == [5]
    late = ask([quick], [rounds_of(85.0)], todo=short)
    assert [a.task_id for a in late.assignments] == [5]
    tail = msgspec.structs.replace(in_step, cursor=10**6)
    assert [a.task_id for a in ask([quick], [tail], todo=short).assignments] == [5]


def test_a_long_returned_task_is_split_where_the_round_ends() -> None:
    outcome = ask([waiter(1, flops=1e9)], [rounds_of(170.0)], todo=[todo_of(5, 0, 1200)])
    one = outcome.assignments[0]
    assert (one.task_id, one.steps, one.stop, one.rest_stop) == (5, 150, 600, 1200)


def test_a_round_ends_when_its_quorum_has_ended() -> None:
    shared, pace = plan({"preset": "diloco", "lr": 0.7}), _pace(transfer_s=20.0)
    speeds = (1e9, 1e9, 1e9, 1e9, 5e8)
    works = [TaskInWork(f"w{n}", "cpu", 10.0 * n, 100, flops) for n, flops in enumerate(speeds)]
    whole = round_in_work(shared, pace, works, 0)
    assert whole is not None
    assert whole.merge_at == 20 + 20 + 100 * 2.0  # three of five
    assert whole.left_s["w0", "cpu"] == 20
    assert whole.left_s["w4", "cpu"] < -200
    waiting = round_in_work(shared, pace, works[1:], 1)
    assert waiting is not None
    assert waiting.merge_at == whole.merge_at  # one of the three waits already
    due = round_in_work(shared, pace, works[4:], 4)
    assert due is not None
    assert due.merge_at == 0


@pytest.mark.parametrize(
    "table", [{}, {"preset": "diloco", "overlap": True}, {"preset": "sync-sgd"}]
)
def test_plans_whose_merges_are_not_shared_have_no_rounds(table: dict[str, Any]) -> None:
    works = [TaskInWork("w", "cpu", 0.0, 100, 1e9)]
    assert round_in_work(plan(table), _pace(20.0), works, 0) is None
    assert round_in_work(plan({"preset": "diloco"}), _pace(20.0), [], 0) is None


def test_seeds_differ_and_never_change() -> None:
    seeds = {pass_seed(1, n) for n in range(100)} | {task_seed(1, 1, n) for n in range(100)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert (pass_seed(7, 1), task_seed(7, 1, 40)) == (8355680479484019594, 300894094698836377)


def test_an_upload_of_any_codec_fits_its_grant() -> None:
    for parameters in (0, 1, 1000, 124_000_000):
        assert upload_bytes_max(parameters) > 4 * parameters + 65_536


def test_bytes_are_bounded_by_the_size_of_the_model_and_the_number_of_games() -> None:
    slack = UPLOAD_SLACK_BYTES
    assert [upload_bytes_max(n) for n in (0, 15, 16, 1600)] == [
        slack, 60 + slack, 65 + slack, 6500 + slack,
    ]  # fmt: skip
    assert all(isinstance(upload_bytes_max(n), int) for n in (1, 17))
    assert [episodes_bytes_max(n) for n in (0, 3)] == [slack, 3 * GAME_BYTES_MAX + slack]
    assert memory_bytes(100) == 100 * DEVICE_BYTES
    assert memory_bytes(100, 7) == 100 * DEVICE_BYTES + 7


def test_a_run_of_unknown_units_counts_samples() -> None:
    file = run_file.from_table({"name": "r", "workload": "gpt", "stop": {"passes": 2}})
    whole = plan({"quorum": 2})
    assert total_steps(file, whole, 1000) == total_steps(file, whole, 1000, 1) == 63
    for reached in (StepsAndTokens(0, 100), StepsAndTokens(100, 0)):  # nothing is told yet
        assert total_steps(file, whole, 1000, 8, reached) == 63


@pytest.mark.parametrize(
    ("tables", "samples", "steps"),
    [
        ({}, 1000, 0),
        ({"stop": {"versions": 7}}, 1000, 210),
        (
            {"stop": {"passes": 2}},
            1000,
            63,
        ),  # 2,000 samples in batches of 16, two updates a version
        ({"stop": {"passes": 2}}, 0, 0),  # it makes its own data, without an end
        ({"stop": {"passes": 2, "versions": 1}}, 1000, 30),
        ({"stop": {"versions": 7}, "train": {"decay_steps": 90}}, 1000, 90),
        ({"stop": {"tokens": 24_000}}, 1000, 94),  # 3,000 samples of 8
        ({"stop": {"tokens": 24_000}}, 0, 0),
        ({"stop": {"versions": 7}, "task": {"local_steps": 20}}, 1000, 140),
        ({"stop": {"versions": 7}, "plan": {"preset": "gradient-average"}}, 1000, 210),
        ({"stop": {"versions": 7}, "plan": {"preset": "async-sgd", "gradient_every": 5}}, 1000, 35),
    ],
)
def test_how_long_a_run_will_be(tables: dict[str, Any], samples: int, steps: int) -> None:
    file = run_file.from_table({"name": "r", "workload": "gpt", **tables})
    whole = plan({"quorum": 2} | file.plan)
    assert total_steps(file, whole, samples, sample_size=8) == steps


@pytest.mark.parametrize(
    ("side_by_side", "stop", "steps"),
    [
        (2, {}, 9375),  # as the quorum of two lets expect
        (1, {}, 18_750),  # a lone worker does all of it
        (3, {}, 6850),  # more are faster, and the rate falls a little less: by 600 steps at most
        (16, {}, 1758),  # and the schedule is at most half as long again as the run
        (16, {"versions": 7}, 210),
        (1, {"versions": 7}, 210),
    ],
)
def test_a_run_is_as_long_as_the_workers_side_by_side_make_it(
    side_by_side: int, stop: dict[str, int], steps: int
) -> None:
    file = run_file.from_table(
        {"name": "r", "workload": "gpt", "stop": {"tokens": 2_400_000, **stop}}
    )
    reached = StepsAndTokens(global_step=50, tokens=50 * 16 * 8 * side_by_side)
    assert total_steps(file, plan({"quorum": 2}), 1000, 8, reached) == steps


@pytest.mark.parametrize(
    ("stop", "done"),
    [
        ({"versions": 40}, 0.5),
        ({"tokens": 8000}, 0.1),
        ({"passes": 2}, 0.05),
        ({"versions": 200, "passes": 2}, 0.1),  # whichever comes first
        ({"loss": 1.0}, 0.0),  # nobody knows
    ],
)
def test_a_run_is_done_by_the_end_that_is_nearest(stop: dict[str, float], done: float) -> None:
    file = run_file.from_table({"name": "r", "workload": "gpt", "stop": stop})
    assert share_done(file, 1000, 8, version=20, tokens=800) == pytest.approx(done)


def test_tokens_end_a_run_that_makes_its_own_samples_and_passes_do_not() -> None:
    file = run_file.from_table(
        {"name": "r", "workload": "gomoku", "stop": {"tokens": 8000, "passes": 2}}
    )
    assert share_done(file, 0, 1, version=20, tokens=800) == pytest.approx(0.1)


def test_the_length_of_a_run_is_no_larger_than_a_message_can_tell() -> None:
    file = run_file.from_table({"name": "r", "workload": "gpt", "stop": {"tokens": 2**53}})
    assert total_steps(file, plan({}), 1000, 8, StepsAndTokens(1000, 1)) == 2**31 - 1


@pytest.mark.parametrize(
    ("told", "step_s", "speed"),
    [
        (1e-3, 0.0, 1e9 / CLAMP),
        (1e18, 0.0, 1e9 * CLAMP),
        (2e9, 0.0, 2e9),  # a benchmark near the median is believed
        (1e18, 1.0, 5e8),  # but what it took lately goes before
        (1e9, 1e-9, 1e9 * CLAMP),
        (0.0, 0.0, 0.0),
    ],
)
def test_a_newcomer_is_sized_near_the_median(told: float, step_s: float, speed: float) -> None:
    known = run_of(pace=RunPace(step_s=0.5, flops=1e9))
    assert clamped(known, told, step_s) == pytest.approx(speed)
    assert clamped(run_of(pace=None), told, step_s) == 0.0  # nothing to compare with
    assert clamped(run_of(pace=RunPace(step_s=0.5, flops=0.0)), told, step_s) == 0.0


def test_the_last_quarter_of_a_long_run_steps_by_less_and_less() -> None:
    assert [cooling(done, round(200 * done)) for done in (0.0, 0.5, 0.75)] == [1.0] * 3
    assert cooling(0.875, 175) == pytest.approx(0.55)
    assert cooling(1.0, 200) == cooling(1.5, 300) == pytest.approx(0.1)
    assert cooling(1.0, 159) == cooling(0.875, 100) == 1.0
    assert cooling(0.0, 5000) == 1.0  # nobody knows its end
