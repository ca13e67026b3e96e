"""The queue as workers meet it, the same on SQLite and PostgreSQL, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar, cast

import pytest
from sqlalchemy import Connection, Table, func, select, update

from coordinator.queue import Queue
from coordinator.renewals import Renewals
from coordinator.store import passes, tables, tasks
from coordinator.store.database import Database
from coordinator.store.tasks import TaskRow
from coordinator.volunteers import Principal
from shared.clock import VirtualClock
from shared.errors import (
    BadRequest,
    Banned,
    Cancelled,
    Gone,
    NotFound,
    Unauthorized,
    VolunteerError,
)
from shared.protocol import (
    RENEW_S,
    ClaimRequest,
    HeartbeatRequest,
    Lease,
    Reason,
    ReleaseRequest,
    TaskBeat,
    TaskOrder,
)
from tests.runs import add_contribution, add_run, add_version, add_worker, claim, queue_of

T = TypeVar("T")
TASK = {"local_steps": 2, "batch_size": 4, "lease_floor_seconds": 600.0}


@dataclass
class House:
    """A database with one run of 64 samples, cut into tasks of 8, and a queue."""

    db: Database
    clock: VirtualClock
    queue: Queue
    run: int
    a: Principal
    b: Principal

    async def lease(self, who: Principal, claim_id: str = "", **request: Any) -> Lease:
        lease = (await claim(self.queue, who, claim_id, **request)).lease
        assert lease is not None
        return lease

    async def idle(self, who: Principal, **request: Any) -> Reason:
        idle = (await claim(self.queue, who, **request)).idle
        assert idle is not None
        assert idle.message
        return idle.reason

    async def write(self, fn: Callable[[Connection], T]) -> T:
        return await self.db.write(fn)

    async def row(self, task: int) -> TaskRow:
        return await self.db.read(lambda conn: tasks.holder(conn, task, for_update=False))

    async def finish(self, task: int) -> bool:
        now = self.clock.now()
        return await self.db.write(lambda conn: tasks.finish(conn, task, now))

    async def put_back(self, lease: Lease, who: Principal, kind: tasks.FailureKind | None) -> str:
        spec = await self.db.read(lambda conn: self.queue._claims.spec(conn, self.run))
        return await self.db.write(
            lambda conn: tasks.put_back(
                conn,
                lease.task,
                worker_id=who.worker_id,
                kind=kind,
                message="the loss was not finite",
                now=self.clock.now(),
                settings=spec.file.task,
            )
        )

    async def beat(self, who: Principal, lease: Lease, **values: Any) -> TaskOrder:
        beat = TaskBeat(task=lease.task, attempt=lease.attempt, **values)
        [order] = await self.queue.beat(who, HeartbeatRequest(tasks=(beat,)))
        return order

    async def keep_alive(self, who: Principal, lease: Lease, seconds: float, **values: Any) -> None:
        """Beat every 30 seconds for that long, as a worker does."""
        for _ in range(round(seconds / 30)):
            await self.clock.advance(30)
            await self.beat(who, lease, **values)
            await self.queue.flush()
            await self.queue.expire()


@pytest.fixture
async def house(database: Database) -> House:
    clock = VirtualClock()
    run = await database.write(lambda conn: add_run(conn, task=TASK))
    a, b = await database.write(lambda conn: (add_worker(conn), add_worker(conn)))
    house = House(database, clock, queue_of(database, clock), run, a, b)
    await clock.advance(RENEW_S)  # past the grace after a start
    return house


# --- claims ---


async def test_a_lease_says_all_that_a_worker_needs(house: House) -> None:
    lease = await house.lease(house.a, device="cuda:0")
    now = house.clock.now()
    assert (lease.attempt, lease.run, lease.dataset, lease.chunks) == (1, "run", "", (0,))
    assert (lease.job.start, lease.job.stop, lease.job.steps, lease.job.batch_size) == (0, 8, 2, 4)
    assert (lease.job.workload, lease.job.kind, lease.job.update) == ("gpt", "train", "delta")
    assert lease.renew_by == now + RENEW_S
    assert lease.finish_by == now + 6000  # ten floors, while nobody knows how long it takes
    assert lease.price_micro == 2000
    assert lease.grant.bytes_max > 4000
    assert (lease.grant.codec, lease.now) == ("int8", now)
    plain = await house.lease(house.b, codecs=("float32", "bf16"))
    assert plain.grant.codec == "bf16"  # the next best that it speaks


async def test_the_same_claim_gets_the_same_lease_while_it_lives(house: House) -> None:
    first = await house.lease(house.a, "mine")
    assert (await house.lease(house.a, "mine")).task == first.task
    one, two = await asyncio.gather(house.lease(house.a, "both"), house.lease(house.a, "both"))
    assert one.task == two.task != first.task
    await house.queue.release(house.a, first.task, ReleaseRequest(attempt=1))
    again = await house.lease(house.a, "mine")
    assert (again.task, again.attempt) == (first.task, 2)


async def test_a_claim_id_of_somebody_else_is_of_no_use(house: House) -> None:
    first = await house.lease(house.a, "id")
    assert (await house.lease(house.b, "id")).task != first.task


@pytest.mark.parametrize(
    "request_",
    [{"claim_id": ""}, {"claim_id": "x" * 65}, {"device": "../x"}, {"runs": ("r",) * 99}],
)
async def test_a_senseless_claim_is_refused(house: House, request_: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        await house.queue.claim(house.a, ClaimRequest(**{"claim_id": "c", **request_}))


async def test_many_coordinators_never_hand_out_a_sample_twice(
    house: House, database_url: str
) -> None:
    """Eight of them hammer one database; some tasks are given back on the way."""
    run = await house.write(
        lambda conn: add_run(conn, "wide", counts=(4000,), task={**TASK, "in_flight": 16})
    )
    workers = await house.write(lambda conn: [add_worker(conn) for _ in range(8)])
    databases = [await Database.open(database_url) for _ in range(8)]
    taken: list[Lease] = []

    async def hammer(db: Database, who: Principal) -> None:
        queue = queue_of(db, house.clock)
        for turn in range(12):
            lease = (await claim(queue, who, runs=("wide",))).lease
            assert lease is not None
            if turn % 4 == 3:
                await queue.release(who, lease.task, ReleaseRequest(attempt=lease.attempt))
            else:
                taken.append(lease)

    await asyncio.gather(*(hammer(db, who) for db, who in zip(databases, workers, strict=True)))
    for db in databases:
        await db.close()
    assert len({(lease.task, lease.attempt) for lease in taken}) == len(taken) == 72
    assert len({lease.task for lease in taken}) == 72
    starts = sorted((lease.job.start, lease.job.stop) for lease in taken)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(starts))
    await house.write(lambda conn: check_cover(conn, run))


def check_cover(conn: Connection, run: int) -> None:
    """Every cut sample of the current pass is in exactly one task."""
    t = tables.tasks.c
    state = passes.pass_state(conn, run)
    query = select(t.start, t.stop).where(t.run_id == run, t.pass_no == state.pass_no)
    at = 0
    for start, stop in conn.execute(query.order_by(t.start)):
        assert start == at
        at = stop
    assert at == state.cut


async def test_an_empty_queue_says_why(house: House) -> None:
    assert await house.idle(house.a, runs=("nothing",)) == Reason.NO_RUN
    assert await house.idle(house.a, memory_bytes=1) == Reason.NO_FIT
    assert await house.idle(house.a, codecs=("ternary",)) == Reason.NO_FIT
    await house.lease(house.a)
    await house.lease(house.a)
    assert await house.idle(house.a) == Reason.IN_FLIGHT
    for state, reason in (("paused", Reason.RUN_PAUSED), ("completed", Reason.RUN_ENDED)):
        changed = update(tables.runs).values(state=state)
        await house.write(lambda conn, changed=changed: conn.execute(changed))  # type: ignore[misc]
        assert await house.idle(house.b, runs=("run",)) == reason
        assert await house.idle(house.b) == Reason.NO_RUN


# --- waiting ---


async def test_a_waiting_claim_gets_what_comes_back(house: House) -> None:
    leases = [await house.lease(house.a, device=f"cuda:{i}") for i in range(8)]
    waiting = asyncio.ensure_future(house.lease(house.b, wait_s=30.0))
    await _until_it_waits(house)
    assert not waiting.done()
    await house.queue.release(house.a, leases[3].task, ReleaseRequest(attempt=1))
    got = await asyncio.wait_for(waiting, 10)
    assert (got.task, got.attempt) == (leases[3].task, 2)


@pytest.mark.parametrize(
    ("table", "of", "change", "refusal"),
    [
        (tables.volunteers, "volunteer_id", {"state": "banned"}, Banned),
        (tables.workers, "worker_id", {"revoked_at": 1.0}, Unauthorized),
    ],
)
async def test_a_claim_that_waits_gets_no_lease_once_its_worker_is_shut_out(
    house: House, table: Table, of: str, change: dict[str, Any], refusal: type[VolunteerError]
) -> None:
    leases = [await house.lease(house.a, device=f"cuda:{i}", runs=("run",)) for i in range(8)]
    waiting = asyncio.ensure_future(house.lease(house.b, wait_s=30.0))
    await _until_it_waits(house)
    shut_out = update(table).where(table.c.id == getattr(house.b, of)).values(**change)
    await house.write(lambda conn: conn.execute(shut_out))
    await house.queue.release(house.a, leases[0].task, ReleaseRequest(attempt=1))
    with pytest.raises(refusal):
        await waiting
    assert (await house.row(leases[0].task)).state == "todo"
    assert (await house.lease(house.a)).task == leases[0].task  # those asked with it go on


async def test_a_waiting_claim_gives_up_in_time(house: House) -> None:
    for i in range(8):
        await house.lease(house.a, device=f"cuda:{i}")
    waiting = asyncio.ensure_future(house.idle(house.b, wait_s=30.0))
    await _until_it_waits(house)
    await house.clock.advance(31)
    assert await asyncio.wait_for(waiting, 10) == Reason.ALL_TAKEN


async def _until_it_waits(house: House) -> None:
    while house.clock.next_at is None:
        await asyncio.sleep(0)


# --- beginning ---


async def test_the_base_is_bound_when_work_begins(house: House) -> None:
    lease = await house.lease(house.a)
    await house.write(lambda conn: add_version(conn, house.run, 1, global_step=50))
    begun = await house.queue.begin(house.a, lease.task, 1)
    assert (begun.run, begun.version, begun.global_step) == ("run", 1, 50)
    await house.write(lambda conn: add_version(conn, house.run, 2, global_step=100))
    await house.clock.advance(10)
    assert await house.queue.begin(house.a, lease.task, 1) == begun
    assert await house.db.read(lambda conn: tasks.bases_in_use(conn, house.run)) == [1]


async def test_a_prefetched_task_has_its_whole_time_once_it_begins(house: House) -> None:
    lease = await house.lease(house.a)
    await house.keep_alive(house.a, lease, 3000, phase="queued")
    begun = await house.queue.begin(house.a, lease.task, 1)
    assert begun.finish_by == house.clock.now() + 6000


async def handed_in(house: House, **table: Any) -> tuple[int, int, Lease]:
    """A run in which `a` has handed something in and holds its next task: run, contribution, lease."""
    run = await house.write(lambda conn: add_run(conn, "phased", task=TASK, plan=table))
    first = await house.lease(house.a, runs=("phased",))
    await house.queue.begin(house.a, first.task, 1)
    row = await house.row(first.task)
    waiting = await house.write(lambda conn: add_contribution(conn, row))
    return run, waiting, await house.lease(house.a, runs=("phased",))


async def test_a_phase_in_step_makes_a_worker_wait_for_its_merge(house: House) -> None:
    """async-diloco overlaps in the end and begins in step."""
    run, waiting, lease = await handed_in(house, preset="async-diloco")
    assert lease.in_step
    beginning = asyncio.ensure_future(house.queue.begin(house.a, lease.task, 1))
    for _ in range(10):  # time enough to begin too early
        await house.write(lambda conn: None)

    def merge(conn: Connection) -> None:
        add_version(conn, run, 1)
        table = tables.contributions
        conn.execute(table.update().where(table.c.id == waiting).values(state="merged"))

    await house.write(merge)
    await house.clock.advance(301)
    assert (await beginning).version == 1


async def test_a_phase_that_overlaps_lets_work_begin_at_once(house: House) -> None:
    phase = {"until_versions": 5, "overrides": {"overlap": True}}
    _, _, lease = await handed_in(house, preset="fedavg", phases=[phase])
    assert not lease.in_step
    assert (await house.queue.begin(house.a, lease.task, 1)).version == 0


async def test_nobody_begins_what_is_not_his(house: House) -> None:
    lease = await house.lease(house.a)
    for who, attempt in ((house.b, 1), (house.a, 2), (house.a, 0)):
        with pytest.raises(NotFound):
            await house.queue.begin(who, lease.task, attempt)
    with pytest.raises(NotFound):
        await house.queue.begin(house.a, 10**9, 1)


# --- keeping, losing ---


async def test_beats_keep_a_lease_and_silence_loses_it(house: House) -> None:
    kept, lost = await house.lease(house.a), await house.lease(house.b)
    await house.queue.begin(house.b, lost.task, 1)
    await house.keep_alive(house.a, kept, 90)
    await house.keep_alive(house.a, kept, 30)
    assert (await house.row(kept.task)).state == "doing"
    row = await house.row(lost.task)
    assert (row.state, row.returned, row.timeouts, row.failures) == ("todo", True, 1, 0)


async def test_who_was_late_may_hand_in_until_somebody_else_claims(house: House) -> None:
    lease = await house.lease(house.a)
    await house.queue.begin(house.a, lease.task, 1)
    await house.clock.advance(RENEW_S + 1)
    assert await house.queue.expire() == 1
    tasks.may_submit(await house.row(lease.task), house.a.worker_id, 1)
    assert (await house.beat(house.a, lease)).order == "continue"
    taken = await house.lease(house.b)
    assert (taken.task, taken.attempt) == (lease.task, 2)
    with pytest.raises(Gone):
        tasks.may_submit(await house.row(lease.task), house.a.worker_id, 1)
    assert (await house.beat(house.a, lease)).order == "gone"
    assert (await house.beat(house.b, taken)).order == "continue"


async def test_what_was_handed_in_late_is_not_given_to_others(house: House) -> None:
    lease = await house.lease(house.a)
    await house.queue.begin(house.a, lease.task, 1)
    await house.clock.advance(RENEW_S + 1)
    await house.queue.expire()
    row = await house.row(lease.task)
    await house.write(lambda conn: add_contribution(conn, row))
    assert (await house.lease(house.b)).task != lease.task
    assert await house.finish(lease.task)
    assert (await house.row(lease.task)).state == "done"
    assert not await house.finish(lease.task)


async def test_what_waits_for_its_verdict_does_not_expire(house: House) -> None:
    lease = await house.lease(house.a)
    await house.queue.begin(house.a, lease.task, 1)
    row = await house.row(lease.task)
    await house.write(lambda conn: add_contribution(conn, row))
    await house.beat(house.a, lease)
    await house.queue.flush()
    await house.clock.advance(10 * RENEW_S)
    assert await house.queue.expire() == 0
    await house.queue.release(house.a, lease.task, ReleaseRequest(attempt=1))  # too late: no effect
    assert (await house.row(lease.task)).state == "doing"


async def test_beats_do_not_move_the_end(house: House) -> None:
    lease = await house.lease(house.a)
    begun = await house.queue.begin(house.a, lease.task, 1)
    await house.keep_alive(house.a, lease, begun.finish_by - house.clock.now() - 60)
    assert (await house.row(lease.task)).state == "doing"
    await house.keep_alive(house.a, lease, 90)
    assert (await house.row(lease.task)).state == "todo"


async def test_pausing_moves_the_end_to_twice_the_time_at_most(house: House) -> None:
    lease = await house.lease(house.a)
    begun = await house.queue.begin(house.a, lease.task, 1)
    allowance = begun.finish_by - house.clock.now()
    limit = begun.finish_by + allowance
    await house.keep_alive(house.a, lease, allowance, phase="paused")
    order = await house.beat(house.a, lease, phase="paused")
    assert (order.order, order.finish_by) == ("continue", limit)
    await house.keep_alive(house.a, lease, allowance, phase="paused")
    await house.keep_alive(house.a, lease, 30)
    assert (await house.row(lease.task)).state == "todo"


async def test_nothing_expires_right_after_a_restart(house: House) -> None:
    lease = await house.lease(house.a)
    await house.clock.advance(10_000)  # the coordinator was away
    restarted = queue_of(house.db, house.clock)
    assert await restarted.expire() == 0
    [order] = await restarted.beat(
        house.a, HeartbeatRequest(tasks=(TaskBeat(task=lease.task, attempt=1),))
    )
    assert order.order == "continue"
    await house.clock.advance(RENEW_S - 1)
    assert await restarted.expire() == 0
    assert (await house.row(lease.task)).state == "doing"


async def test_a_beat_for_the_task_of_somebody_else_is_gone(house: House) -> None:
    lease = await house.lease(house.a)
    assert (await house.beat(house.b, lease)).order == "gone"
    unknown = TaskBeat(task=10**9, attempt=1)
    [order] = await house.queue.beat(house.a, HeartbeatRequest(tasks=(unknown,)))
    assert order.order == "gone"


async def test_beats_tell_what_a_machine_does(house: House) -> None:
    async def seen() -> tuple[float, str]:
        query = select(tables.workers.c.last_seen_at, tables.workers.c.state)
        query = query.where(tables.workers.c.id == house.a.worker_id)
        await house.queue.flush()
        return await house.db.read(lambda conn: tuple(conn.execute(query).one()))

    lease = await house.lease(house.a)
    assert await seen() == (house.clock.now(), "online")
    await house.clock.advance(7)
    await house.beat(house.a, lease)
    assert await seen() == (house.clock.now(), "training")
    await house.queue.beat(house.a, HeartbeatRequest(paused=True))
    assert (await seen())[1] == "paused"
    left = update(tables.workers).values(state="left")
    await house.write(lambda conn: conn.execute(left))
    await house.queue.beat(house.a, HeartbeatRequest())
    assert (await seen())[1] == "left"


# --- giving back, failing ---


async def test_giving_back_costs_nothing_and_twice_is_once(house: House) -> None:
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
    house: House,
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
    [line] = await house.queue.failed("run")
    assert (line.id, line.failures, line.workers, line.message) == (1, 3, 3, "out of memory")
    assert (await house.lease(workers[0])).task != failed.task
    assert await house.queue.requeue("run") == [1]
    assert await house.queue.failed() == []
    again = await house.lease(workers[0])  # the slate is clean
    assert (again.task, again.attempt) == (1, 4)


async def test_one_worker_alone_cannot_condemn_quickly(house: House) -> None:
    """While others work, a task that one of them failed waits for another; alone it is tried six times."""
    lease = await house.lease(house.a)
    busy = await house.lease(house.b)
    assert await house.put_back(lease, house.a, "failure") == "todo"
    assert (await house.lease(house.a)).task not in (lease.task, busy.task)
    state = "todo"
    for _ in range(5):
        state = await house.put_back(lease, house.a, "failure")
    assert state == "discarded"


async def test_timeouts_are_counted_apart_and_end_too(house: House) -> None:
    for attempt in range(1, 9):
        lease = await house.lease(house.a if attempt % 2 else house.b)
        assert (lease.task, lease.attempt) == (1, attempt)
        await house.clock.advance(RENEW_S + 1)
        assert await house.queue.expire() == 1
    row = await house.row(1)
    assert (row.state, row.timeouts, row.failures) == ("discarded", 8, 0)
    [line] = await house.queue.failed()
    assert (line.timeouts, line.workers) == (8, 0)


async def test_what_is_stale_goes_back_uncounted(house: House) -> None:
    lease = await house.lease(house.a)
    await house.queue.begin(house.a, lease.task, 1)
    assert await house.put_back(lease, house.a, None) == "todo"
    row = await house.row(lease.task)
    assert (row.failures, row.timeouts, row.base_version) == (0, 0, None)


async def test_a_verdict_on_what_others_hold_changes_nothing_but_the_record(house: House) -> None:
    lease = await house.lease(house.a)
    await house.queue.release(house.a, lease.task, ReleaseRequest(attempt=1))
    taken = await house.lease(house.b)
    assert await house.put_back(taken, house.a, "failure") == "doing"
    row = await house.row(taken.task)
    assert (row.state, row.worker_id, row.failures) == ("doing", house.b.worker_id, 1)


# --- ends ---


async def test_a_run_that_ends_cancels_what_is_open(house: House) -> None:
    lease, done = await house.lease(house.a), await house.lease(house.a)
    await house.finish(done.task)
    assert await house.write(lambda conn: tasks.cancel_run(conn, house.run, 1.0)) == 1
    await house.clock.advance(10)
    await house.queue.flush()
    assert (await house.beat(house.a, lease)).order == "cancel"
    with pytest.raises(Cancelled):
        await house.queue.begin(house.a, lease.task, 1)
    assert (await house.row(done.task)).state == "done"


async def test_a_beat_that_meets_a_flush_hears_of_the_end_of_the_run(house: House) -> None:
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
    book = Renewals(cast(Database, Meeting()), house.clock)
    book.hold(await house.row(known.task))
    await book.beat(house.a, HeartbeatRequest(tasks=(TaskBeat(task=known.task, attempt=1),)))
    await house.write(lambda conn: tasks.cancel_run(conn, house.run, 1.0))
    beats = tuple(TaskBeat(task=lease.task, attempt=1) for lease in (known, unknown))
    orders = await book.beat(house.a, HeartbeatRequest(tasks=beats))
    assert [order.order for order in orders] == ["cancel", "cancel"]


async def test_a_rollback_takes_back_what_it_reverts(house: House) -> None:
    old = await house.lease(house.a)
    await house.queue.begin(house.a, old.task, 1)
    await house.write(lambda conn: add_version(conn, house.run, 1))
    new, judged, prefetched = [await house.lease(house.b, device=f"cuda:{i}") for i in range(3)]
    for lease in (new, judged):
        await house.queue.begin(house.b, lease.task, 1)
    row = await house.row(judged.task)
    await house.write(lambda conn: add_contribution(conn, row))
    recalled = await house.write(lambda conn: tasks.recall(conn, house.run, above=0, now=1.0))
    assert recalled == 1
    for lease, state in ((old, "doing"), (new, "todo"), (judged, "doing"), (prefetched, "doing")):
        assert (await house.row(lease.task)).state == state
    with pytest.raises(Gone):
        tasks.may_submit(await house.row(new.task), house.b.worker_id, 1)


# --- passes ---


async def test_a_pass_ends_when_its_last_task_does(house: House) -> None:
    leases = [await house.lease(house.a, device=f"cuda:{i}") for i in range(8)]
    assert [lease.job.start for lease in leases] == list(range(0, 64, 8))
    for lease in leases[:-1]:
        await house.finish(lease.task)
    assert await house.idle(house.b) == Reason.ALL_TAKEN
    state = await house.db.read(lambda conn: passes.pass_state(conn, house.run))
    assert (state.pass_no, state.todo, state.doing, state.cut, state.total) == (1, 0, 1, 64, 64)
    await house.finish(leases[-1].task)
    following = await house.lease(house.b)
    assert (following.job.start, following.job.stop) == (0, 8)
    assert following.job.order_seed != leases[0].job.order_seed
    state = await house.db.read(lambda conn: passes.pass_state(conn, house.run))
    assert (state.pass_no, state.cut) == (2, 8)


async def test_what_a_merge_sets_aside_is_done_again_in_its_own_order(house: House) -> None:
    """Even when its pass is over by then."""
    leases = [await house.lease(house.a, device=f"cuda:{i}") for i in range(8)]
    for lease in leases:
        await house.finish(lease.task)
    await house.lease(house.b)  # the next pass has begun
    assert await house.put_back(leases[2], house.a, "failure") == "todo"
    again = await house.lease(house.b, device="cuda:1")
    assert (again.task, again.attempt) == (leases[2].task, 2)
    assert again.job.order_seed == leases[2].job.order_seed


async def test_a_range_that_came_back_is_split_for_a_slow_worker(house: House) -> None:
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
    count = select(func.count()).where(tables.failures.c.task_id == rest.task)
    assert await house.db.read(lambda conn: conn.execute(count).scalar_one()) == 1


async def test_the_pace_of_others_bounds_a_lease(house: House) -> None:
    for _ in range(4):
        lease = await house.lease(house.a)
        await house.queue.begin(house.a, lease.task, 1)
        await house.keep_alive(house.a, lease, 300)
        await house.finish(lease.task)
    lease = await house.lease(house.b)
    assert lease.finish_by == house.clock.now() + 900  # three times five minutes
    median = select(tables.runs.c.median_task_s).where(tables.runs.c.id == house.run)
    assert await house.db.read(lambda conn: conn.execute(median).scalar_one()) == 300


# --- the service in the background ---


async def test_the_background_job_flushes_and_expires_until_it_is_stopped(house: House) -> None:
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
    await asyncio.wait_for(job, 10)
    assert (await house.row(lease.task)).returned
