"""Who gets which work, as pure rules."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules.audits import AUDIT, AccountMarks, Auditor, WaitingAudit
from coordinator.rules.dispatch import HALF_LIFE_S, Assignment, FairShares, Holding, Load
from coordinator.rules.eligibility import Todo
from coordinator.rules.task_size import Run, RunPace, task_seed
from shared.protocol.base import Reason
from shared.workloads.base import load
from tests.support.waiting_workers import ask, run_of, todo_of, waiter

BY_SPEED = {"local_steps": 10, "batch_size": 4, "min_steps": 1}


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


@pytest.mark.parametrize(
    ("runs", "who", "reason", "message"),
    [
        ([], {}, Reason.NO_RUN, "nothing is running here just now"),
        (
            [run_of(beside=("learn", "evaluate"))],
            {"kinds": frozenset({"learn", "evaluate"})},
            Reason.ALL_TAKEN,
            'no task of the kind "evaluate" or "learn" waits just now',
        ),
        (
            [
                run_of(cursor=1000, endless=True),
                run_of(2, cursor=1000, endless=True, short_of="it waits for games"),
            ],
            {},
            Reason.ALL_TAKEN,
            "it waits for games",
        ),
        (
            [run_of(cursor=1000, passes=1)],
            {},
            Reason.MERGING,
            "every pass is done; the last results are being merged",
        ),
        (
            [run_of(cursor=1000, passes=1), run_of(2, endless=True, cursor=1000)],
            {},
            Reason.ALL_TAKEN,
            "every task of this pass is being done by others",
        ),
    ],
)
def test_who_gets_nothing_reads_why(
    runs: list[Run], who: dict[str, Any], reason: Reason, message: str
) -> None:
    refusal = ask([waiter(**who)], runs).refusals[0]
    assert (refusal.reason, refusal.message) == (reason, message)


def test_a_member_whose_update_waits_for_others_gets_tasks_of_other_runs_alone() -> None:
    own = {"home": "worker-1", "samples_total": 1000}
    waits = run_of(1, lacks=2, waits=True, **own)
    refusal = ask([waiter(1)], [waits], [todo_of(5, 0, 8, home="worker-1")]).refusals[0]
    assert refusal.reason == Reason.IN_FLIGHT
    assert refusal.message == (
        'your update of "run-1" waits to be mixed with those of 2 other members: then this machine '
        "gets its next task"
    )
    (assignment,) = ask([waiter(1)], [waits, run_of(2)]).assignments
    assert assignment.run_id == 2


def test_a_device_gets_one_task_at_a_time_while_a_version_lacks_members() -> None:
    run = run_of(1, home="worker-1", lacks=1)
    twice = [waiter(1), waiter(1, claim_id="another"), waiter(1, claim_id="gpu", device="cuda:0")]
    outcome = ask(twice, [run])
    assert [one.waiter for one in outcome.assignments] == [0, 2]
    assert outcome.refusals[1].reason == Reason.IN_FLIGHT
    here = Holding(
        volunteer_id="volunteer-1", worker_id="worker-1", device="cpu", run_id=1, count=1
    )
    assert ask([waiter(1)], [run], holdings=[here]).refusals[0].message == (
        'the next version of "run-1" lacks updates of 1 member: cpu gets its next task when the '
        "one that it holds is done"
    )
    # a task of another run is none of this one, so that a busy machine gets its turn
    assert ask([waiter(1)], [run], holdings=[msgspec.structs.replace(here, run_id=2)]).assignments
    assert ask([waiter(1)], [run_of(1, home="worker-1")], holdings=[here]).assignments


def test_the_last_task_is_not_said_to_be_with_others_when_it_is_here() -> None:
    runs = [run_of(cursor=1000, endless=True)]
    here = Holding(worker_id=waiter().worker_id, device="cpu", volunteer_id="1", run_id=1, count=1)
    load = [Load(run_id=1, open=1, price_micro=0)]
    refusal = ask([waiter()], runs, loads=load, holdings=[here]).refusals[0]
    assert refusal.message == "every task of this pass is being done, the last by cpu itself"


def test_who_got_less_lately_comes_first_whoever_holds_what() -> None:
    runs = [run_of(1, samples_total=10**6, lately=5e10), run_of(2, samples_total=10**6)]
    held = [Load(run_id=2, open=1, price_micro=1000)]
    outcome = ask([waiter(i) for i in range(6)], runs, loads=held)
    # The second has 10 GFLOP in flight and catches up with what the first was given before.
    assert [a.run_id for a in outcome.assignments] == [2, 2, 2, 2, 1, 2]


def test_shares_fade_and_a_new_run_neither_owes_nor_is_owed() -> None:
    shares = FairShares()
    assert shares.lately({1: 1.0, 2: 2.0}, 100.0) == {1: 0.0, 2: 0.0}
    shares.note({1: 300.0, 2: 400.0})
    assert shares.lately({1: 1.0, 2: 2.0}, 100.0) == {1: 300.0, 2: 400.0}
    found = shares.lately({1: 1.0, 2: 2.0, 3: 4.0}, 100.0 + HALF_LIFE_S)
    assert found == {1: 150.0, 2: 200.0, 3: 400.0}  # the least for its weight is the second's
    assert shares.lately({3: 4.0}, 50.0) == {3: 400.0}  # a clock that goes back changes nothing
    assert shares.lately({3: 4.0}, 100.0 + 3 * HALF_LIFE_S) == {3: 100.0}


def test_what_was_given_adds_up_by_run() -> None:
    shares = FairShares()
    shares.note({1: 300.0})
    shares.note({1: 50.0, 2: 400.0})
    assert shares.lately({1: 1.0, 2: 1.0}, 0.0) == {1: 350.0, 2: 400.0}
    assert shares.lately({1: 1.0, 2: 1.0}, HALF_LIFE_S) == {1: 175.0, 2: 200.0}


def test_work_beside_the_pass_counts_by_what_it_is_and_not_by_its_steps() -> None:
    # A run of games: a step is a game of 100 GFLOP, but a learn task of 100 steps is as much work
    # as one of them.
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


PACE = RunPace(step_s=6.0, flops=1e9)
NEW = {"task_id": None, "rest_stop": 80, "start": 40, "stop": 80, "steps": 10, "price_micro": 1000}
BACK = {"task_id": 5, "rest_stop": 26, "start": 8, "stop": 26, "steps": 5, "price_micro": 450}


@pytest.mark.parametrize(
    ("run", "back", "flops", "lease"),
    [
        ({"cursor": 40}, None, 0.0, NEW | {"finish_in_s": 1200.0}),
        ({"cursor": 40, "pace": PACE}, None, 1e9, NEW | {"finish_in_s": 180.0}),
        ({"cursor": 40, "pace": PACE}, None, 8e8, NEW | {"finish_in_s": 225.0}),
        ({"cursor": 40}, todo_of(5, 8, 26), 0.0, BACK | {"finish_in_s": 1200.0}),
        (
            {"cursor": 40, "pace": PACE, "task": BY_SPEED},
            todo_of(5, 8, 48),
            1e8,  # a tenth of the median: one step takes a minute
            {
                "task_id": 5, "start": 8, "stop": 12, "rest_stop": 48, "steps": 1,
                "price_micro": 100, "finish_in_s": 180.0,
            },
        ),
        (
            {"beside": ("learn",), "cursor": 40},
            todo_of(5, 8, 999, beside="learn", steps=3, price_micro=700),
            1e8,
            {
                "task_id": 5, "start": 8, "stop": 999, "rest_stop": 999, "steps": 3, "seed": 0,
                "price_micro": 700, "beside": "learn", "finish_in_s": 420.0,
            },
        ),
    ],
)  # fmt: skip
def test_a_lease_says_all_of_its_work(
    run: dict[str, Any], back: Todo | None, flops: float, lease: dict[str, Any]
) -> None:
    outcome = ask([waiter(flops=flops)], [run_of(**run)], [back] if back else [])
    seed = task_seed(7, 1, lease["start"])
    expected: dict[str, Any] = {
        "waiter": 0,
        "run_id": 1,
        "pass_no": 1,
        "seed": seed,
        "beside": "",
    } | lease
    assert outcome.assignments == (Assignment(**expected),)
    assert outcome.more == (lease["rest_stop"] > lease["stop"])
    assert outcome.moved == ({(1, ""): (1, 80)} if back is None else {})


def test_a_range_that_was_split_keeps_its_pass_open() -> None:
    run = run_of(cursor=1000, pace=PACE, task=BY_SPEED)
    outcome = ask([waiter(1, flops=1e8), waiter(2)], [run], [todo_of(5, 8, 48)], loads=[])
    assert [a.task_id for a in outcome.assignments] == [5]
    assert outcome.refusals[1].reason == Reason.ALL_TAKEN


def audit_of(**values: Any) -> Todo:
    """An audit of what Mia did, on terms that any stranger meets."""
    worker = AccountMarks(volunteer="mia")
    terms: dict[str, Any] = {"kind": "train", "worker": worker, "price_micro": 1}
    told = WaitingAudit(**(terms | values))
    return todo_of(9, 0, 40, beside=AUDIT, steps=10, price_micro=1000, audit=told)


def auditor_of(**values: Any) -> Auditor:
    bob = AccountMarks(volunteer="bob")
    told: dict[str, Any] = {"person": bob, "kind": "cpu", "accepted_micro": 10, "audited_micro": 0}
    return Auditor(**(told | values))


@pytest.mark.parametrize(
    ("terms", "auditor", "kinds", "given"),
    [
        ({}, auditor_of(), frozenset(), 9),
        ({}, auditor_of(), frozenset({"train"}), 9),
        ({}, auditor_of(), frozenset({"learn"}), None),
        ({}, None, frozenset(), None),
        ({}, auditor_of(accepted_micro=9), frozenset(), None),
        ({}, auditor_of(person=AccountMarks(volunteer="mia")), frozenset(), None),
        ({"declined": frozenset({"bob"})}, auditor_of(), frozenset(), None),
    ],
)
def test_an_audit_goes_to_who_may_have_it_and_else_waits(
    terms: dict[str, Any], auditor: Auditor | None, kinds: frozenset[str], given: int | None
) -> None:
    run = run_of(beside=("learn",), cursor=1000)
    who = waiter(auditor=auditor, kinds=kinds)
    outcome = ask([who], [run], [audit_of(**terms)])
    assert [a.task_id for a in outcome.assignments] == ([given] if given else [])


def test_a_task_that_waits_behind_an_audit_is_given_out() -> None:
    outcome = ask([waiter()], [run_of(cursor=1000)], [audit_of(), todo_of(5, 0, 40)])
    assert [a.task_id for a in outcome.assignments] == [5]


@pytest.mark.parametrize(
    ("who", "held", "says"),
    [
        (
            {"leases_max": 2},
            [("worker-9", "cpu", 2)],
            "your machines hold 2 tasks together, as many as they may until your work passed "
            "checks",
        ),
        (
            {},
            [("worker-8", "cpu", 2), ("worker-9", "cpu", 2)],
            "your machines hold 4 tasks together, as many as they may",
        ),
        (
            {"device": "cuda:1"},
            [("worker-1", "cuda:1", 2)],
            "cuda:1 holds 2 tasks already, as many as it may",
        ),
    ],
)
def test_who_holds_enough_is_told_how_much(
    who: dict[str, Any], held: list[tuple[str, str, int]], says: str
) -> None:
    holdings = [
        Holding(volunteer_id="volunteer-1", worker_id=worker, device=device, run_id=1, count=count)
        for worker, device, count in held
    ]
    refusal = ask([waiter(**who)], [run_of()], holdings=holdings, leases_max=4).refusals[0]
    assert (refusal.reason, refusal.message) == (Reason.IN_FLIGHT, says)


def test_a_device_that_may_hold_one_task_is_told_of_one() -> None:
    here = Holding(
        volunteer_id="volunteer-1", worker_id="worker-1", device="cpu", run_id=1, count=1
    )
    run = run_of(
        1, home="worker-1", lacks=1, task={"local_steps": 10, "batch_size": 4, "in_flight": 1}
    )
    refusal = ask([waiter(1)], [run], holdings=[here]).refusals[0]
    assert refusal.message == "cpu holds 1 task already, as many as it may"


def test_nobody_holds_more_than_he_may() -> None:
    run = run_of(samples_total=10**6)
    full = [
        Holding(volunteer_id="volunteer-1", worker_id="worker-1", device="cpu", run_id=1, count=2)
    ]
    outcome = ask([waiter(1), waiter(1, device="cuda:0")], [run], holdings=full)
    assert outcome.refusals[0].reason == Reason.IN_FLIGHT
    assert [a.waiter for a in outcome.assignments] == [1]  # another device of the same machine
    capped = ask([waiter(i, volunteer=1) for i in range(9)], [run], leases_max=4)
    assert len(capped.assignments) == 4
    assert {r.reason for r in capped.refusals.values()} == {Reason.IN_FLIGHT}


@pytest.mark.parametrize(
    ("run", "values", "says"),
    [
        (
            {},
            {"workloads": frozenset({"dcgan"})},
            'needs the workload "gpt", which is not enabled on this machine',
        ),
        (
            {"workload_version": 3},
            {"versions": {"gpt": 2}},
            'needs version 3 of the workload "gpt", here is 2: upgrade this machine',
        ),
        (
            {"workload_version": 3},
            {"versions": {"gpt": 4}},
            'needs version 3 of the workload "gpt", here is 4: the coordinator is older',
        ),
        (
            {"libraries": ("peft",)},
            {},
            "needs the library peft, which is not installed on this machine",
        ),
        (
            {"beside": ("evaluate",)},
            {"kinds": frozenset({"learn", "actor"})},
            'has tasks of the kind "train" and "evaluate" only, this machine takes "actor" and '
            '"learn" (its setting roles)',
        ),
        (
            {},
            {"codecs": frozenset({"ternary"})},
            'wants updates as "int8", which this version cannot write',
        ),
        (
            {"memory_bytes": 3 << 30},
            {"memory_bytes": 1 << 30, "device": "cuda:0"},
            "needs about 3.0 GiB of memory, cuda:0 has 1.0",
        ),
        (  # the host, too, is too small for its state
            {"memory_bytes": 3 << 30, "streamed_bytes": 1 << 29},
            {"memory_bytes": 1 << 30, "host_bytes": 4 << 30, "device": "cuda:0"},
            "needs about 3.0 GiB of memory, cuda:0 has 1.0",
        ),
        (  # the card is too small for a block
            {"memory_bytes": 3 << 30, "streamed_bytes": 2 << 30},
            {"memory_bytes": 1 << 30, "host_bytes": 64 << 30, "device": "cuda:0"},
            "needs about 3.0 GiB of memory, cuda:0 has 1.0",
        ),
        (  # its workload keeps the state on the device
            {"memory_bytes": 3 << 30},
            {"memory_bytes": 1 << 30, "host_bytes": 64 << 30, "device": "cuda:0"},
            "needs about 3.0 GiB of memory, cuda:0 has 1.0",
        ),
    ],
)
def test_who_does_not_fit_is_told_why(
    run: dict[str, Any], values: dict[str, Any], says: str
) -> None:
    refusal = ask([waiter(**values)], [run_of(**run)]).refusals[0]
    assert refusal.reason == Reason.NO_FIT
    assert refusal.message == f'no run needs this device: "run-1" {says}'


@pytest.mark.parametrize("name", ["gomoku", "rollouts"])
def test_a_program_with_another_word_for_experience_is_told_to_update(name: str) -> None:
    run = run_of(workload=name, workload_version=load(name).version, kind="selfplay")
    refusals = ask([waiter(workloads=frozenset({name}), versions={name: 1})], [run]).refusals
    assert [each.message.rpartition(", ")[2] for each in refusals.values()] == [
        "here is 1: upgrade this machine"
    ]


@pytest.mark.parametrize(
    ("run", "values"),
    [
        ({"workload_version": 3}, {}),  # an earlier program that tells no version
        ({"workload_version": 3}, {"versions": {"gpt": 3, "dcgan": 1}}),
        ({}, {"versions": {"gpt": 9}}),
        ({"libraries": ("peft",)}, {"libraries": frozenset({"peft", "datasets"})}),
        ({"beside": ("evaluate",)}, {"kinds": frozenset({"train", "learn"})}),
        ({"memory_bytes": 1 << 30}, {"memory_bytes": 1 << 30, "device": "cuda:0"}),
        ({"memory_bytes": 1 << 30}, {"memory_bytes": 0, "device": "cuda:0"}),  # unknown
        (
            {"memory_bytes": 3 << 30, "streamed_bytes": 1 << 29},
            {"memory_bytes": 1 << 30, "host_bytes": 5 << 30, "device": "cuda:0"},
        ),
    ],
)
def test_who_just_fits_is_given_work(run: dict[str, Any], values: dict[str, Any]) -> None:
    assert len(ask([waiter(**values)], [run_of(**run)]).assignments) == 1


def test_only_chosen_runs_are_given() -> None:
    outcome = ask([waiter(runs=frozenset({"run-2"}))], [run_of(1), run_of(2)])
    assert outcome.assignments[0].run_id == 2
    none = ask([waiter(runs=frozenset({"other"}))], [run_of(1)])
    assert none.refusals[0].reason == Reason.NO_RUN


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


def test_alone_one_tries_again_before_the_next_pass() -> None:
    failed = todo_of(5, 0, 40, failed_by={"worker-1"})
    machine = [waiter(1), waiter(1, device="cuda:0")]
    outcome = ask(machine, [run_of(cursor=1000, passes=0)], todo=[failed])
    assert [(a.task_id, a.pass_no) for a in outcome.assignments] == [(5, 1), (None, 2)]


def test_alone_one_tries_again_but_last() -> None:
    failed = todo_of(5, 0, 40, failed_by={"worker-1"})
    fresh_first = ask([waiter(1), waiter(1, device="cuda:0")], [run_of(cursor=960)], todo=[failed])
    assert [a.task_id for a in fresh_first.assignments] == [None, 5]


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


def _lengths(run: Run, workers: int = 20) -> list[int]:
    """Return the steps of the first pass's tasks, in order."""
    assignments = ask([waiter(i) for i in range(workers)], [run]).assignments
    return [a.steps for a in assignments if a.pass_no == 1]


@given(st.integers(1, 2000), st.integers(5, 60))
def test_no_task_of_a_pass_that_the_server_sizes_is_much_shorter_than_the_others(
    samples: int, steps: int
) -> None:
    task = {"batch_size": 4, "local_steps": 0}
    lengths = _lengths(run_of(samples_total=samples, local_steps=steps, task=task), 110)
    assert sum(lengths) >= samples / 4
    assert max(lengths) <= steps
    assert max(lengths) - min(lengths) <= 1


def test_a_length_that_a_person_wrote_stays() -> None:
    run = run_of(samples_total=100, task={"batch_size": 4, "local_steps": 10})
    assert _lengths(run) == [10, 10, 5]
