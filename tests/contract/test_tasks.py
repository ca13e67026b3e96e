"""What becomes of a task that was claimed, the same on SQLite and PostgreSQL, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest
from sqlalchemy import Connection, func, select

from coordinator.accounts.accounts import Principal
from coordinator.attendance import Attendance
from coordinator.database import passes, runs, tasks
from coordinator.database import volunteers as store
from coordinator.database.engine.open_database import Database
from coordinator.database.tables.contributions import contributions as contributions_table
from coordinator.database.tables.tasks import failures as failures_table
from coordinator.scheduling.claims import SUSPENDED_S
from coordinator.scheduling.renewals import Renewals
from shared.errors import (
    Cancelled,
    Gone,
    NotFound,
)
from shared.protocol.base import Reason, RunState
from shared.protocol.heartbeat import HeartbeatRequest, TaskBeat
from shared.protocol.leases import Lease, ReleaseRequest
from shared.protocol.limits import LONG_POLL_S_MAX, RENEW_S
from tests.support.run_rows import add_contribution, add_run, add_version, add_worker, claim
from tests.support.virtual_queue import TASK, VirtualQueue, check_cover, virtual_queue

T = TypeVar("T")


@pytest.fixture
async def house(database: Database) -> VirtualQueue:
    return await virtual_queue(database)


async def test_the_base_is_bound_when_work_begins(house: VirtualQueue) -> None:
    lease = await house.lease(house.a)
    other = await house.write(lambda conn: add_run(conn, "another", task=TASK))
    await house.write(lambda conn: add_version(conn, other, 1, global_step=7))
    await house.write(lambda conn: add_version(conn, house.run, 1, global_step=50))
    begun = await house.queue.begin(house.a, lease.task, 1)
    assert (begun.run, begun.version) == ("run", 1)
    await house.write(lambda conn: add_version(conn, house.run, 2, global_step=100))
    await house.clock.advance(10)
    assert await house.queue.begin(house.a, lease.task, 1) == begun
    assert await house.db.read(lambda conn: tasks.bases_in_use(conn, house.run)) == [1]


async def test_a_prefetched_task_has_its_whole_time_once_it_begins(house: VirtualQueue) -> None:
    lease = await house.lease(house.a)
    await house.keep_alive(house.a, lease, 3000, phase="queued")
    begun = await house.queue.begin(house.a, lease.task, 1)
    assert begun.finish_by == house.clock.now() + 6000


async def handed_in(house: VirtualQueue, **table: Any) -> tuple[int, int, Lease]:
    """A run in which `a` has handed something in and holds its next task: run, contribution,
    lease.
    """
    run = await house.write(lambda conn: add_run(conn, "merging", task=TASK, plan=table))
    first = await house.lease(house.a, runs=("merging",))
    await house.queue.begin(house.a, first.task, 1)
    row = await house.row(first.task)
    waiting = await house.write(lambda conn: add_contribution(conn, row))
    return run, waiting, await house.lease(house.a, runs=("merging",))


async def test_a_plan_in_step_makes_a_worker_wait_for_its_merge(house: VirtualQueue) -> None:
    run, waiting, lease = await handed_in(house, preset="fedbuff")
    assert lease.in_step
    beginning = asyncio.ensure_future(house.queue.begin(house.a, lease.task, 1))
    for _ in range(10):  # time enough to begin too early
        await house.write(lambda conn: None)

    def merge(conn: Connection) -> None:
        add_version(conn, run, 1)
        table = contributions_table
        conn.execute(table.update().where(table.c.id == waiting).values(state="merged"))

    await house.write(merge)
    while not beginning.done():  # it may come to its next wait only now
        await house.clock.advance(301)
        await house.write(lambda conn: None)
    assert (await beginning).version == 1


async def test_news_of_a_run_makes_nobody_wait_longer_for_its_merge(house: VirtualQueue) -> None:
    """A run has news with each contribution of others: its waiting workers would never begin."""
    run, _, lease = await handed_in(house, preset="fedbuff")
    beginning = asyncio.ensure_future(house.queue.begin(house.a, lease.task, 1))
    while house.clock.next_at is None:  # it does not wait yet
        await asyncio.sleep(0)
    for _ in range(12):
        await house.clock.advance(LONG_POLL_S_MAX / 4)
        house.signals.notify(f"run:{run}")
        await house.write(lambda conn: None)  # it looks at the merge meanwhile
    async with asyncio.timeout(10):
        assert (await beginning).version == 0


async def test_a_plan_that_overlaps_lets_work_begin_at_once(house: VirtualQueue) -> None:
    _, _, lease = await handed_in(house, preset="fedavg", overlap=True)
    assert not lease.in_step
    assert (await house.queue.begin(house.a, lease.task, 1)).version == 0


async def train_task(house: VirtualQueue, who: Principal, state: str) -> None:
    """Train a task of 30 steps for 270 seconds, 30 more go by besides, and submit its update."""
    lease = await house.lease(who, runs=("merging",))
    await house.queue.begin(who, lease.task, 1)
    await house.keep_alive(who, lease, 300)
    row = await house.row(lease.task)
    number = await house.write(lambda conn: add_contribution(conn, row))
    table = contributions_table
    values = {"train_s": 270.0, "state": state}
    await house.write(lambda conn: conn.execute(table.update().where(table.c.id == number), values))
    if state == "merged":
        await house.finish(lease.task)


async def test_a_worker_waits_for_no_merge_that_is_far_off(house: VirtualQueue) -> None:
    """Machines out of step with the others once waited a minute of each round for nothing."""
    task = {"batch_size": 4, "lease_floor_seconds": 6000.0}
    plan = {"preset": "fedbuff"}
    await house.write(lambda conn: add_run(conn, "merging", counts=(10_000,), task=task, plan=plan))
    for _ in range(3):
        await train_task(house, house.a, "merged")
    await train_task(house, house.a, "accepted")
    others = [house.b, *await house.write(lambda conn: [add_worker(conn) for _ in range(3)])]
    for who in others:
        lease = await house.lease(who, runs=("merging",))
        await house.queue.begin(who, lease.task, 1)
    await house.clock.advance(31)
    lease = await house.lease(house.a, runs=("merging",))
    assert (await house.queue.begin(house.a, lease.task, 1)).version == 0


async def test_nobody_begins_what_is_not_his(house: VirtualQueue) -> None:
    lease = await house.lease(house.a)
    for who, attempt in ((house.b, 1), (house.a, 2), (house.a, 0)):
        with pytest.raises(NotFound):
            await house.queue.begin(who, lease.task, attempt)
    with pytest.raises(NotFound):
        await house.queue.begin(house.a, 10**9, 1)


async def test_giving_back_costs_nothing_and_twice_is_once(house: VirtualQueue) -> None:
    lease = await house.lease(house.a)
    for _ in range(2):
        await house.queue.release(
            house.a, lease.task, ReleaseRequest(attempt=1, reason="going home")
        )
    row = await house.row(lease.task)
    assert (row.state, row.returned, row.failures, row.timeouts) == ("todo", False, 0, 0)
    with pytest.raises(Gone):
        tasks.may_submit(row, house.a.worker_id, 1)
    with pytest.raises(NotFound):
        await house.queue.release(house.b, lease.task, ReleaseRequest(attempt=1))
    assert (await house.lease(house.b)).task == lease.task
    with pytest.raises(Gone):
        await house.queue.release(house.a, lease.task, ReleaseRequest(attempt=1))


async def test_a_task_that_several_workers_fail_is_set_aside_and_may_come_back(
    house: VirtualQueue,
) -> None:
    workers = await house.write(lambda conn: [add_worker(conn) for _ in range(3)])
    failed: Lease | None = None
    for who in workers:
        failed = await house.lease(who)
        assert failed.task == 1
        request = ReleaseRequest(attempt=failed.attempt, reason="out of memory", failed=True)
        await house.queue.release(who, failed.task, request)
    assert failed is not None
    assert (await house.row(failed.task)).state == "discarded"
    [line] = await house.task_list.lines("run", failed=True)
    assert (line.id, line.failures, line.workers, line.message) == (1, 3, 3, "out of memory")
    assert (await house.lease(workers[0])).task != failed.task
    assert await house.task_list.requeue("run") == [1]
    assert await house.task_list.lines(failed=True) == []
    again = await house.lease(workers[0])  # the slate is clean
    assert (again.task, again.attempt) == (1, 4)


async def test_one_worker_alone_cannot_condemn_quickly(house: VirtualQueue) -> None:
    """While others work, a task that one of them failed waits for another, however often it fails;
    alone it is tried six times.
    """
    lease = await house.lease(house.a)
    busy = await house.lease(house.b)
    assert await house.put_back(lease, house.a, "failure") == "todo"
    assert (await house.lease(house.a)).task not in (lease.task, busy.task)
    state = "todo"
    for _ in range(9):
        state = await house.put_back(lease, house.a, "failure")
        assert state == "todo"
    await house.queue.release(house.b, busy.task, ReleaseRequest(attempt=busy.attempt))
    assert await house.put_back(lease, house.a, "failure") == "discarded"


async def set_standing(house: VirtualQueue, who: Principal, **values: Any) -> None:
    await house.write(lambda conn: store.set_volunteer(conn, who.volunteer_id, **values))


async def give_up(house: VirtualQueue, who: Principal, lease: Lease) -> None:
    request = ReleaseRequest(attempt=lease.attempt, reason="boom", failed=True)
    await house.queue.release(who, lease.task, request)


async def test_machines_of_one_account_are_one_voice(house: VirtualQueue) -> None:
    """Three machines of a stranger fail everything: no task is set aside, a pass cannot end so."""
    machines = await house.write(
        lambda conn: [add_worker(conn, house.a.volunteer_id) for _ in range(3)]
    )
    await set_standing(house, house.a, standing="probation", invited=False)
    await house.lease(house.b)
    for _ in range(40):
        for who in machines:
            lease = (await claim(house.queue, who)).lease
            if lease is not None:
                await give_up(house, who, lease)
        await house.clock.advance(60)
        await house.queue.renewals.flush()
    assert await house.task_list.lines("run", failed=True) == []


async def test_failing_costs_a_stranger_time_and_no_standing(house: VirtualQueue) -> None:
    await set_standing(house, house.a, standing="vetted", invited=False)
    for _ in range(4):  # three are nobody's fault
        await give_up(house, house.a, await house.lease(house.a))
    assert await house.idle(house.a) == Reason.IN_FLIGHT
    lease = await house.lease(house.b)  # others go on
    await house.clock.advance(11)
    again = await house.lease(house.a)
    await give_up(house, house.a, again)
    await give_up(house, house.a, again)  # the same request once more counts once
    await house.clock.advance(19)
    assert await house.idle(house.a) == Reason.IN_FLIGHT
    await house.clock.advance(2)
    assert (await house.lease(house.a)).task != lease.task
    account = await house.db.read(lambda conn: store.existing(conn, house.a.volunteer_id))
    assert (account.standing, account.state) == ("vetted", "active")


async def test_a_newcomer_holds_two_leases_over_all_its_machines(house: VirtualQueue) -> None:
    machines = await house.write(
        lambda conn: [add_worker(conn, house.a.volunteer_id) for _ in range(3)]
    )
    await set_standing(house, house.a, standing="probation", invited=False)
    for who in machines[:2]:
        await house.lease(who)
    assert await house.idle(machines[2]) == Reason.IN_FLIGHT


async def test_a_suspended_account_gets_no_work_and_the_reason(house: VirtualQueue) -> None:
    await set_standing(house, house.a, standing="suspended", suspended_reason="it was noise")
    idle = (await claim(house.queue, house.a)).idle
    assert idle is not None
    assert (idle.reason, idle.message) == (
        Reason.BANNED, "this account is suspended: it was noise; write to the organiser",
    )  # fmt: skip
    assert idle.retry_after_s == SUSPENDED_S


@pytest.mark.parametrize(("left_s", "retry_s"), [(70, 70), (3000, 300)])
async def test_an_account_that_rests_is_told_when_to_ask_again(
    house: VirtualQueue, left_s: float, retry_s: float
) -> None:
    until = house.clock.now() + left_s
    await set_standing(house, house.a, unproven=2, rest_until=until)
    idle = (await claim(house.queue, house.a)).idle
    assert idle is not None
    assert (idle.reason, idle.retry_after_s) == (Reason.IN_FLIGHT, retry_s)
    assert f"it gets work again in {left_s} s" in idle.message


@pytest.mark.parametrize("told", [1e-3, 1e18, 0.0])
async def test_a_made_up_speed_makes_no_long_lease(house: VirtualQueue, told: float) -> None:
    await set_standing(house, house.a, standing="probation", invited=False)
    lease = await house.lease(house.a, step_flops=told)
    honest = await house.lease(house.b)
    assert lease.finish_by - lease.now <= 10 * TASK["lease_floor_seconds"]
    assert lease.job.steps == honest.job.steps


async def test_a_device_that_was_never_registered_gets_no_work(house: VirtualQueue) -> None:
    hardware = '{"devices": [{"id": "cpu", "kind": "cpu", "name": "c", "memory_bytes": 1}]}'
    await house.write(lambda conn: store.set_worker(conn, house.a.worker_id, hardware=hardware))
    assert await house.idle(house.a, device="cuda:7") == Reason.NO_FIT
    assert (await house.lease(house.a, device="cpu")).task


async def test_another_version_of_the_workload_is_refused_and_nothing_is_counted(
    house: VirtualQueue,
) -> None:
    idle = (await claim(house.queue, house.a, workload_versions={"gpt": 0})).idle
    assert idle is not None
    assert (idle.reason, 'version 1 of the workload "gpt"' in idle.message) == (
        Reason.NO_FIT,
        True,
    )
    assert (await house.lease(house.a, workload_versions={"gpt": 1, "other": 9})).attempt == 1


async def test_timeouts_are_counted_apart_and_end_too(house: VirtualQueue) -> None:
    for attempt in range(1, 9):
        lease = await house.lease(house.a if attempt % 2 else house.b)
        assert (lease.task, lease.attempt) == (1, attempt)
        await house.clock.advance(RENEW_S + 1)
        assert await house.queue.expire() == 1
    row = await house.row(1)
    assert (row.state, row.timeouts, row.failures) == ("discarded", 8, 0)
    [line] = await house.task_list.lines(failed=True)
    assert (line.timeouts, line.workers) == (8, 0)


async def test_what_is_stale_goes_back_uncounted(house: VirtualQueue) -> None:
    lease = await house.lease(house.a)
    await house.queue.begin(house.a, lease.task, 1)
    assert await house.put_back(lease, house.a, None) == "todo"
    row = await house.row(lease.task)
    assert (row.failures, row.timeouts, row.base_version) == (0, 0, None)


async def test_a_verdict_on_what_others_hold_changes_nothing_but_the_record(
    house: VirtualQueue,
) -> None:
    lease = await house.lease(house.a)
    await house.queue.release(house.a, lease.task, ReleaseRequest(attempt=1))
    taken = await house.lease(house.b)
    assert await house.put_back(taken, house.a, "failure") == "doing"
    row = await house.row(taken.task)
    assert (row.state, row.worker_id, row.failures) == ("doing", house.b.worker_id, 1)


async def test_a_run_that_ends_cancels_what_is_open(house: VirtualQueue) -> None:
    lease, done = await house.lease(house.a), await house.lease(house.a)
    await house.finish(done.task)
    assert await house.write(lambda conn: tasks.cancel_run(conn, house.run, 1.0)) == 1
    await house.clock.advance(10)
    await house.queue.renewals.flush()
    assert (await house.beat(house.a, lease)).order == "cancel"
    with pytest.raises(Cancelled):
        await house.queue.begin(house.a, lease.task, 1)
    assert (await house.row(done.task)).state == "done"


async def test_a_beat_that_meets_a_flush_hears_of_the_end_of_the_run(house: VirtualQueue) -> None:
    """While the beat reads what the book does not know yet, the flush drops what it knew."""
    flushing: list[asyncio.Future[None]] = []

    class Meeting:
        """The database, on which a flush runs whenever the book is about to read."""

        write = house.db.write

        async def read(self, fn: Callable[[Connection], T]) -> T:
            if not flushing:
                flushing.append(asyncio.ensure_future(book.flush()))
                await flushing[0]
            return await house.db.read(fn)

    known, unknown = await house.lease(house.a), await house.lease(house.a, device="cuda:0")
    book = Renewals(cast(Database, Meeting()), house.clock, Attendance(house.clock))
    book.hold(await house.row(known.task))
    await book.beat(house.a, HeartbeatRequest(tasks=(TaskBeat(task=known.task, attempt=1),)))
    await house.write(lambda conn: tasks.cancel_run(conn, house.run, 1.0))
    beats = tuple(TaskBeat(task=lease.task, attempt=1) for lease in (known, unknown))
    orders = await book.beat(house.a, HeartbeatRequest(tasks=beats))
    assert [order.order for order in orders] == ["cancel", "cancel"]


async def test_a_rollback_takes_back_what_it_reverts(house: VirtualQueue) -> None:
    old = await house.lease(house.a)
    await house.queue.begin(house.a, old.task, 1)
    await house.write(lambda conn: add_version(conn, house.run, 1))
    new, judged, prefetched = [await house.lease(house.b, device=f"cuda:{i}") for i in range(3)]
    for lease in (new, judged):
        await house.queue.begin(house.b, lease.task, 1)
    row = await house.row(judged.task)
    await house.write(lambda conn: add_contribution(conn, row))
    recalled = await house.write(lambda conn: tasks.recall(conn, house.run, above=0))
    assert recalled == 1
    for lease, state in ((old, "doing"), (new, "todo"), (judged, "doing"), (prefetched, "doing")):
        assert (await house.row(lease.task)).state == state
    with pytest.raises(Gone):
        tasks.may_submit(await house.row(new.task), house.b.worker_id, 1)


async def test_the_next_pass_begins_before_the_last_task_of_one_ends(house: VirtualQueue) -> None:
    run_id = await house.write(lambda conn: add_run(conn, "endless", task=TASK))
    leases = [await house.lease(house.a, device=f"cuda:{i}", runs=("endless",)) for i in range(8)]
    assert [lease.job.start for lease in leases] == list(range(0, 64, 8))
    for lease in leases[:-1]:
        await house.finish(lease.task)
    run = await house.db.read(lambda conn: runs.by_id(conn, run_id))
    assert (run.pass_no, run.cursor, run.samples_total) == (1, 64, 64)
    following = await house.lease(house.b, runs=("endless",))
    assert (following.job.start, following.job.stop) == (0, 8)
    assert following.job.order_seed != leases[0].job.order_seed
    run = await house.db.read(lambda conn: runs.by_id(conn, run_id))
    assert (run.pass_no, run.cursor) == (2, 8)


async def test_what_a_merge_sets_aside_is_done_again_in_its_own_order(house: VirtualQueue) -> None:
    """The task is done again even if its pass is over by then."""
    await house.write(lambda conn: add_run(conn, "endless", task=TASK))
    cards = [f"cuda:{number}" for number in range(8)]
    leases = [await house.lease(house.a, device=card, runs=("endless",)) for card in cards]
    now = house.clock.now()
    await house.write(lambda c: tasks.accept_all(c, {o.task: i for i, o in enumerate(leases)}, now))
    await house.lease(house.b, runs=("endless",))  # the next pass has begun
    await house.write(lambda conn: tasks.return_all(conn, [2]))
    assert await house.put_back(leases[2], house.a, "failure") == "todo"
    again = await house.lease(house.b, device="cuda:1", runs=("endless",))
    assert (again.task, again.attempt) == (leases[2].task, 2)
    assert again.job.order_seed == leases[2].job.order_seed


async def test_a_range_that_came_back_is_split_for_a_slow_worker(house: VirtualQueue) -> None:
    task = {"target_seconds": 60.0, "local_steps": 50, "batch_size": 2, "min_steps": 5}
    run = await house.write(
        lambda conn: add_run(conn, "sized", counts=(500,), task=task, step_flops=1e9)
    )
    fast = await house.lease(house.a, runs=("sized",), step_flops=4e9)
    assert (fast.job.start, fast.job.stop, fast.job.steps) == (0, 240, 120)
    request = ReleaseRequest(attempt=1, reason="crashed", failed=True)
    await house.queue.release(house.a, fast.task, request)
    slow = await house.lease(house.b, runs=("sized",), step_flops=1e9)
    assert (slow.task, slow.job.start, slow.job.stop, slow.job.steps) == (fast.task, 0, 60, 30)
    rest = await house.lease(house.b, runs=("sized",), step_flops=4e9)
    assert (rest.job.start, rest.job.stop, rest.job.steps) == (60, 240, 90)
    assert slow.price_micro + rest.price_micro == fast.price_micro
    assert rest.job.seed != slow.job.seed == fast.job.seed
    await house.write(lambda conn: check_cover(conn, run))
    row = await house.row(rest.task)
    assert row.failures == 1  # what is known of the whole is known of its parts
    count = select(func.count()).where(failures_table.c.task_id == rest.task)
    assert await house.db.read(lambda conn: conn.execute(count).scalar_one()) == 1


async def test_the_pace_of_others_bounds_a_lease(house: VirtualQueue) -> None:
    for _ in range(4):
        lease = await house.lease(house.a)
        await house.queue.begin(house.a, lease.task, 1)
        await house.keep_alive(house.a, lease, 300)
        await house.finish(lease.task)
    lease = await house.lease(house.b)
    assert lease.finish_by == house.clock.now() + 900  # three times five minutes


async def test_one_voice_of_the_pace_is_one_volunteer_and_vetted_ones_count(
    house: VirtualQueue,
) -> None:
    """Threat T9: nine tasks done in no time made the next lease impossible to keep."""
    run, steps = await house.write(lambda conn: add_run(conn, "endless", task=TASK)), 0
    for who, seconds, count in ((house.a, 300, 2), (house.b, 1, 9)):
        for _ in range(count):
            lease = await house.lease(who, runs=("endless",))
            await house.queue.begin(who, lease.task, 1)
            await house.keep_alive(who, lease, seconds)
            await house.finish(lease.task)
            steps = lease.job.steps
    pace = await house.db.read(lambda conn: passes.measure(conn, run))
    assert pace is not None
    assert pace.step_s > 100 / steps  # a median over tasks would say a second
    lazy = house.b.volunteer_id
    await house.write(lambda conn: store.set_volunteer(conn, lazy, standing="probation"))
    pace = await house.db.read(lambda conn: passes.measure(conn, run))
    assert pace is not None
    assert pace.step_s == pytest.approx(300 / steps, rel=0.1)


async def test_the_background_job_flushes_and_expires_until_it_is_stopped(
    house: VirtualQueue,
) -> None:
    lease = await house.lease(house.a)
    stop = asyncio.Event()
    job = asyncio.ensure_future(house.queue.run(stop))
    waiting = asyncio.ensure_future(
        house.lease(house.b, runs=("run",), wait_s=60.0, device="cuda:7")
    )
    assert (await waiting).task != lease.task
    while (await house.row(lease.task)).state == "doing":
        await house.clock.advance(30)
    stop.set()
    await job
    assert (await house.row(lease.task)).returned


async def test_pauses_count_as_no_time_of_a_run(house: VirtualQueue) -> None:
    def walk(conn: Connection) -> list[float]:
        runs.set_values(conn, house.run, started_at=100.0, state_since=100.0)
        changes: list[tuple[RunState, float]] = [("paused", 150.0), ("running", 170.0)]
        idle = []
        for state, at in [*changes, ("completed", 200.0)]:
            row = runs.by_id(conn, house.run)
            runs.move(conn, row, state, runs.StateChange(at=at))
            idle.append(runs.by_id(conn, house.run).idle_s)
        return idle

    assert await house.write(walk) == [0.0, 20.0, 20.0]


async def test_machines_that_work_a_fifth_of_the_time_get_whole_tasks(house: VirtualQueue) -> None:
    """A claim states the speed that the owner's share of time leaves of the benchmark's."""
    task = {"local_steps": 20, "batch_size": 4}
    await house.write(
        lambda conn: add_run(conn, "sized", counts=(5000,), task=task, step_flops=1e9)
    )
    worker = await house.write(lambda conn: add_worker(conn, step_flops=1e9))
    for _ in range(passes.PACE_MIN + 1):
        lease = await house.lease(worker, runs=("sized",), step_flops=0.2e9)
        assert lease.job.steps == 20
        await house.queue.begin(worker, lease.task, 1)
        await house.clock.advance(100)
        assert await house.finish(lease.task)
