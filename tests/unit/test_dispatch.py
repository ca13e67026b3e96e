"""Who gets which work, as pure rules."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import runfile
from coordinator.dispatch import Assignment, Holding, Load, Outcome, Todo, Waiter, dispatch
from coordinator.merge.plan import plan
from coordinator.runfile import TaskSettings
from coordinator.shares import HALF_LIFE_S, Shares
from coordinator.sizing import (
    LEASE_MAX_S,
    Pace,
    Run,
    allowance_s,
    estimate_s,
    pass_seed,
    price_micro,
    split_at,
    steps_for,
    task_seed,
    total_steps,
    upload_bytes_max,
)
from shared.protocol import Reason


def run_of(id: int = 1, **values: Any) -> Run:
    task = TaskSettings(**values.pop("task", {"local_steps": 10, "batch_size": 4}))
    return Run(
        **{
            "id": id,
            "name": f"run-{id}",
            "workload": "gpt",
            "kind": "train",
            "codec": "int8",
            "memory_bytes": 1000,
            "weight": 1.0,
            "settings": task,
            "local_steps": task.local_steps,
            "passes": 0,
            "step_flops": 1e9,
            "price_micro": 100,
            "seed": 7,
            "pass_no": 1,
            "cursor": 0,
            "samples_total": 1000,
            **values,
        }
    )


def waiter(number: int = 1, volunteer: int | None = None, **values: Any) -> Waiter:
    return Waiter(
        **{
            "claim_id": f"claim-{number}",
            "worker_id": f"worker-{number}",
            "volunteer_id": f"volunteer-{volunteer or number}",
            "device": "cpu",
            "workloads": frozenset({"gpt"}),
            **values,
        }
    )


def ask(
    waiters: list[Waiter],
    runs: list[Run],
    todo: list[Todo] | None = None,
    loads: list[Load] | None = None,
    holdings: list[Holding] | None = None,
    leases_max: int = 64,
) -> Outcome:
    back = todo or []
    if loads is None:
        loads = [Load(run_id=task.run_id, open=len(back), price_micro=0) for task in back]
    return dispatch(waiters, runs, back, loads, holdings or [], leases_max=leases_max)


def todo_of(
    id: int,
    start: int,
    stop: int,
    run_id: int = 1,
    failed_by: set[str] | None = None,
    **values: Any,
) -> Todo:
    return Todo(
        id=id,
        run_id=run_id,
        pass_no=1,
        start=start,
        stop=stop,
        failed_by=frozenset(failed_by or ()),
        **values,
    )


# --- new ranges ---


def test_ranges_follow_each_other_and_the_last_one_is_short() -> None:
    outcome = ask([waiter(i) for i in range(4)], [run_of(samples_total=100)])
    assert [(a.start, a.stop, a.steps) for a in outcome.assignments] == [
        (0, 40, 10),
        (40, 80, 10),
        (80, 100, 5),
    ]
    assert outcome.moved == {1: (1, 100)}
    assert [r.reason for r in outcome.refusals.values()] == [Reason.ALL_TAKEN]


def test_pay_is_for_samples_so_a_short_task_earns_less() -> None:
    outcome = ask([waiter(1), waiter(2)], [run_of(samples_total=42)])
    assert [a.price_micro for a in outcome.assignments] == [1000, 50]


def test_a_pass_ends_only_when_nothing_is_open() -> None:
    done = run_of(cursor=1000)
    still = ask([waiter()], [done], loads=[Load(run_id=1, open=1, price_micro=1000)])
    assert still.refusals[0].reason == Reason.ALL_TAKEN
    assert still.moved == {}
    over = ask([waiter()], [done])
    assert over.assignments[0].pass_no == 2
    assert over.moved == {1: (2, 40)}


def test_after_the_last_pass_nothing_is_cut() -> None:
    last = run_of(cursor=1000, passes=1)
    outcome = ask([waiter()], [last])
    assert outcome.moved == {1: (2, 0)}  # how the end of the run is noticed
    assert outcome.refusals[0].reason == Reason.MERGING
    assert ask([waiter()], [run_of(pass_no=2, passes=1)]).moved == {}


def test_the_tail_of_a_pass_waits_for_what_came_back() -> None:
    outcome = ask([waiter(1), waiter(2)], [run_of(cursor=1000)], todo=[todo_of(5, 0, 40)])
    assert [a.task_id for a in outcome.assignments] == [5]
    assert outcome.refusals[1].reason == Reason.ALL_TAKEN


# --- size ---


def test_tasks_are_sized_to_the_worker() -> None:
    run = run_of(task={"target_seconds": 60, "min_steps": 5, "max_steps": 500, "local_steps": 50})
    assert steps_for(run, 0) == 50  # nobody knows how fast it is
    assert steps_for(run, 1e9) == 30  # a benchmark is believed by half
    assert steps_for(run, 1e8) == 5
    assert steps_for(run, 1e12) == 500
    seen = run_of(task={"target_seconds": 60}, pace=Pace(step_s=2.0, flops=1e9))
    assert steps_for(seen, 1e9) == 30
    assert steps_for(seen, 2e9) == 60
    assert steps_for(seen, 0) == 30


def test_without_a_target_only_the_slow_get_less() -> None:
    task = {"local_steps": 50, "batch_size": 4}
    run = run_of(task=task, pace=Pace(step_s=1.0, flops=1e9))
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
        run_of(pace=Pace(step_s=1.0, flops=0.0)),
        run_of(task=fixed, pace=Pace(step_s=1.0, flops=1e9)),
    ):
        assert {steps_for(run, flops) for flops in (0, 1e6, 1e15)} == {10}


def test_a_lease_lasts_three_times_what_the_work_takes() -> None:
    task = {"lease_floor_seconds": 120.0}
    unknown = run_of(task=task)
    assert allowance_s(unknown, 10, 0) == 1200
    assert allowance_s(unknown, 100, 1e9) == 600
    known = run_of(task=task, pace=Pace(step_s=1.0, flops=1e9))
    assert allowance_s(known, 10, 1e9) == 120
    assert allowance_s(known, 100, 1e9) == 300
    assert allowance_s(known, 100, 1e8) == 3000
    assert allowance_s(known, 100, 1e-3) == LEASE_MAX_S


def test_what_came_back_is_split_for_a_slow_worker() -> None:
    task = {"target_seconds": 60, "local_steps": 50, "batch_size": 4, "min_steps": 5}
    run = run_of(task=task, pace=Pace(step_s=1.0, flops=1e9), cursor=1000)
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
    for pace in (None, Pace(step_s=step_s, flops=1e9)):
        run = run_of(task=task, pace=pace)
        steps = steps_for(run, flops)
        assert 5 <= steps <= 5000
        assert 120 <= allowance_s(run, steps, flops) <= LEASE_MAX_S
        stop = split_at(run, 50, 50 + size, flops)
        assert 50 < stop <= 50 + size
        assert stop == 50 + size or (stop - 50) % batch == 0
        assert price_micro(run, size) >= 1
        assert (estimate_s(run, 10, flops) or 0) >= 0


def test_seeds_differ_and_never_change() -> None:
    seeds = {pass_seed(1, n) for n in range(100)} | {task_seed(1, 1, n) for n in range(100)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert (pass_seed(7, 1), task_seed(7, 1, 40)) == (8355680479484019594, 300894094698836377)


def test_an_upload_of_any_codec_fits_its_grant() -> None:
    for parameters in (0, 1, 1000, 124_000_000):
        assert upload_bytes_max(parameters) > 4 * parameters + 65_536


# --- fairness ---


def test_the_volunteer_with_least_in_hand_goes_first() -> None:
    hog = [waiter(i, volunteer=1) for i in range(1, 31)]
    small = waiter(99, volunteer=2)
    outcome = ask([*hog, small], [run_of(samples_total=80)])
    assert {a.waiter for a in outcome.assignments} == {0, 30}


def test_runs_share_device_time_by_weight() -> None:
    runs = [run_of(1, samples_total=10**6, weight=3.0), run_of(2, samples_total=10**6)]
    outcome = ask([waiter(i) for i in range(40)], runs)
    counts = [sum(a.run_id == n for a in outcome.assignments) for n in (1, 2)]
    assert counts == [30, 10]
    heavy = [run_of(1, samples_total=10**6, step_flops=3e9), run_of(2, samples_total=10**6)]
    outcome = ask([waiter(i) for i in range(40)], heavy)
    assert [sum(a.run_id == n for a in outcome.assignments) for n in (1, 2)] == [10, 30]


def test_what_is_in_flight_already_counts() -> None:
    runs = [run_of(1, samples_total=10**6), run_of(2, samples_total=10**6)]
    outcome = ask([waiter()], runs, loads=[Load(run_id=1, open=1, price_micro=1000)])
    assert outcome.assignments[0].run_id == 2


def test_who_got_less_lately_comes_first_whoever_holds_what() -> None:
    runs = [run_of(1, samples_total=10**6, lately=5e10), run_of(2, samples_total=10**6)]
    held = [Load(run_id=2, open=1, price_micro=1000)]
    outcome = ask([waiter(i) for i in range(6)], runs, loads=held)
    # The second has 10 GFLOP in flight and catches up with what the first was given before.
    assert [a.run_id for a in outcome.assignments] == [2, 2, 2, 2, 1, 2]


def test_shares_fade_and_a_new_run_neither_owes_nor_is_owed() -> None:
    shares = Shares()
    assert shares.lately({1: 1.0, 2: 2.0}, 100.0) == {1: 0.0, 2: 0.0}
    shares.note({1: 300.0, 2: 400.0})
    assert shares.lately({1: 1.0, 2: 2.0}, 100.0) == {1: 300.0, 2: 400.0}
    found = shares.lately({1: 1.0, 2: 2.0, 3: 4.0}, 100.0 + HALF_LIFE_S)
    assert found == {1: 150.0, 2: 200.0, 3: 400.0}  # the least for its weight is the second's
    assert shares.lately({3: 4.0}, 50.0) == {3: 400.0}  # a clock that goes back changes nothing


def test_work_beside_the_pass_counts_by_what_it_is_and_not_by_its_steps() -> None:
    # A run of games: a step is a game of 100 GFLOP, but a learn task of 100 steps is as much work as one of them.
    games = {"kind": "selfplay", "step_flops": 1e11, "price_micro": 10_000, "endless": True}
    runs = [
        run_of(1, samples_total=10**6, beside=("learn",), **games),
        run_of(2, samples_total=10**6, step_flops=2e10, price_micro=2000),
    ]
    learn = todo_of(9, 0, 25_600, beside="learn", steps=100, price_micro=10_000)
    first, second = ask([waiter(1), waiter(2)], runs, [learn]).assignments
    assert (first.task_id, second.run_id) == (9, 2)
    held = [Load(run_id=1, open=1, price_micro=10_000)]
    assert ask([waiter(1)], runs, loads=held).assignments[0].run_id == 2
    more = [*held, Load(run_id=2, open=1, price_micro=20_000)]
    assert ask([waiter(1)], runs, loads=more).assignments[0].run_id == 1


def test_nobody_holds_more_than_he_may() -> None:
    run = run_of(samples_total=10**6)
    full = [Holding(volunteer_id="volunteer-1", worker_id="worker-1", device="cpu", count=2)]
    outcome = ask([waiter(1), waiter(1, device="cuda:0")], [run], holdings=full)
    assert outcome.refusals[0].reason == Reason.IN_FLIGHT
    assert [a.waiter for a in outcome.assignments] == [1]  # another device of the same machine
    capped = ask([waiter(i, volunteer=1) for i in range(9)], [run], leases_max=4)
    assert len(capped.assignments) == 4
    assert {r.reason for r in capped.refusals.values()} == {Reason.IN_FLIGHT}


# --- who fits ---


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"workloads": frozenset({"dcgan"})}, 'needs the workload "gpt"'),
        ({"kinds": frozenset({"evaluate"})}, "kind"),
        ({"codecs": frozenset({"ternary"})}, '"int8"'),
        ({"memory_bytes": 10}, "memory"),
    ],
)
def test_who_does_not_fit_is_told_why(values: dict[str, Any], says: str) -> None:
    refusal = ask([waiter(**values)], [run_of()]).refusals[0]
    assert refusal.reason == Reason.NO_FIT
    assert says in refusal.message


def test_only_chosen_runs_are_given() -> None:
    outcome = ask([waiter(runs=frozenset({"run-2"}))], [run_of(1), run_of(2)])
    assert outcome.assignments[0].run_id == 2
    none = ask([waiter(runs=frozenset({"other"}))], [run_of(1)])
    assert none.refusals[0].reason == Reason.NO_RUN


# --- what failed ---


SHORT = {"overrides": {"local_steps": 10}}


@pytest.mark.parametrize(
    ("tables", "samples", "steps"),
    [
        ({}, 1000, 0),
        ({"stop": {"versions": 7}}, 1000, 350),
        (
            {"stop": {"passes": 2}},
            1000,
            63,
        ),  # 2,000 samples in batches of 16, two updates a version
        ({"stop": {"passes": 2}}, 0, 0),  # it makes its own data, without an end
        ({"stop": {"passes": 2, "versions": 1}}, 1000, 50),
        ({"stop": {"versions": 7}, "train": {"decay_steps": 90}}, 1000, 90),
        ({"stop": {"tokens": 24_000}}, 1000, 94),  # 3,000 samples of 8
        ({"stop": {"tokens": 24_000}}, 0, 0),
        ({"stop": {"versions": 7}, "plan": {"local_steps": 20}}, 1000, 140),
        # Phases with local steps of their own, by versions, by tokens (400 samples are 2 versions), by a loss nobody knows.
        ({"stop": {"versions": 7}, "plan": {"phases": [SHORT | {"until_versions": 3}]}}, 1000, 230),
        ({"stop": {"versions": 2}, "plan": {"phases": [SHORT | {"until_versions": 3}]}}, 1000, 20),
        ({"stop": {"passes": 1}, "plan": {"phases": [SHORT | {"until_versions": 3}]}}, 1000, 32),
        (
            {"stop": {"versions": 7}, "plan": {"phases": [SHORT | {"until_tokens": 5120}]}},
            10**4,
            270,
        ),
        ({"stop": {"versions": 7}, "plan": {"phases": [SHORT | {"until_slope": 0.01}]}}, 1000, 350),
        ({"stop": {"versions": 7}, "plan": {"preset": "gradient-average"}}, 1000, 350),
        ({"stop": {"versions": 7}, "plan": {"preset": "async-sgd", "gradient_every": 5}}, 1000, 35),
    ],
)
def test_how_long_a_run_will_be(tables: dict[str, Any], samples: int, steps: int) -> None:
    file = runfile.from_table({"name": "r", "workload": "gpt", **tables})
    whole = plan({"quorum": 2} | file.plan)
    assert total_steps(file, whole, samples, sample_size=8) == steps


def test_a_failed_task_goes_to_somebody_else() -> None:
    failed = todo_of(5, 0, 40, failed_by={"worker-1"})
    outcome = ask([waiter(1), waiter(2)], [run_of(cursor=1000)], todo=[failed])
    assert [(a.waiter, a.task_id) for a in outcome.assignments] == [(1, 5)]
    assert outcome.refusals[0].reason == Reason.ALL_TAKEN


def test_it_waits_for_a_worker_that_is_busy() -> None:
    failed = todo_of(5, 0, 40, failed_by={"worker-1"})
    busy = [Load(run_id=1, open=2, price_micro=1000, holders=frozenset({"worker-2"}))]
    outcome = ask([waiter(1)], [run_of(cursor=1000)], todo=[failed], loads=busy)
    assert outcome.refusals[0].reason == Reason.ALL_TAKEN


def test_alone_one_tries_again_but_last() -> None:
    failed = todo_of(5, 0, 40, failed_by={"worker-1"})
    fresh_first = ask([waiter(1), waiter(1, device="cuda:0")], [run_of(cursor=960)], todo=[failed])
    assert [a.task_id for a in fresh_first.assignments] == [None, 5]


# --- whatever happens ---


@given(data=st.data())
def test_every_waiter_gets_one_answer_and_no_sample_twice(data: st.DataObject) -> None:
    cursor = data.draw(st.integers(0, 300))
    runs = [
        run_of(1, samples_total=300, cursor=cursor, task={"local_steps": 3, "batch_size": 5}),
        run_of(2, samples_total=data.draw(st.integers(0, 90)), weight=2.0),
    ]
    back = data.draw(st.integers(0, cursor // 10))
    failed_by = st.sets(st.sampled_from([f"worker-{n}" for n in range(6)]))
    todo = [
        todo_of(i + 1, 10 * i, 10 * i + 10, failed_by=data.draw(failed_by)) for i in range(back)
    ]
    waiters = [
        waiter(
            n,
            volunteer=n % 3,
            device=f"cuda:{data.draw(st.integers(0, 1))}",
            flops=data.draw(st.sampled_from([0.0, 1e7, 1e9])),
        )
        for n in data.draw(st.lists(st.integers(0, 5), max_size=20))
    ]
    held = data.draw(st.integers(0, 3))
    loads = [Load(run_id=1, open=back + held, price_micro=held)]
    outcome = ask(waiters, runs, todo, loads, leases_max=data.draw(st.integers(1, 8)))
    answered = [a.waiter for a in outcome.assignments] + list(outcome.refusals)
    assert sorted(answered) == list(range(len(waiters)))
    _check_ranges(outcome.assignments, cursor, {task.id: task for task in todo})


def _check_ranges(made: tuple[Assignment, ...], cursor: int, todo: dict[int, Todo]) -> None:
    again = [a for a in made if a.task_id is not None]
    assert len({a.task_id for a in again}) == len(again)
    for a in again:
        assert a.task_id is not None
        task = todo[a.task_id]
        assert task.start == a.start < a.stop <= a.rest_stop == task.stop
    for run_id, at in ((1, cursor), (2, 0)):
        for pass_no in {a.pass_no for a in made}:
            new = [a for a in made if (a.run_id, a.pass_no, a.task_id) == (run_id, pass_no, None)]
            place = at if pass_no == 1 else 0
            for a in new:
                assert a.start == place
                place = a.stop
