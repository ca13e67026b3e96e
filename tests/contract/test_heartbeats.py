"""Heartbeats and the end of a lease, the same on SQLite and PostgreSQL, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from sqlalchemy import Connection, select, text, update
from sqlalchemy.ext.asyncio import create_async_engine

from coordinator.database import heartbeats, tasks
from coordinator.database.engine.open_database import Database
from coordinator.database.tables.accounts import workers as workers_table
from coordinator.database.tables.tasks import tasks as tasks_table
from coordinator.scheduling.renewals import LATE
from shared.errors import Gone, NotFound, Unavailable
from shared.protocol.heartbeat import HeartbeatRequest, TaskBeat
from shared.protocol.leases import ReleaseRequest
from shared.protocol.limits import HEARTBEAT_S, RENEW_S
from tests.support.failpoints import fail, faults
from tests.support.run_rows import add_contribution, queue_of
from tests.support.virtual_queue import VirtualQueue, virtual_queue


@pytest.fixture
async def house(database: Database) -> VirtualQueue:
    return await virtual_queue(database)


async def test_beats_keep_a_lease_and_silence_loses_it(house: VirtualQueue) -> None:
    kept, lost = await house.lease(house.a), await house.lease(house.b)
    await house.queue.begin(house.b, lost.task, 1)
    await house.keep_alive(house.a, kept, 90)
    await house.keep_alive(house.a, kept, 30)
    assert (await house.row(kept.task)).state == "doing"
    row = await house.row(lost.task)
    assert (row.state, row.returned, row.timeouts, row.failures) == ("todo", True, 1, 0)


async def test_who_was_late_may_hand_in_until_somebody_else_claims(house: VirtualQueue) -> None:
    lease = await house.lease(house.a)
    await house.queue.begin(house.a, lease.task, 1)
    await house.clock.advance(RENEW_S + 1)
    assert await house.queue.expire() == 1
    tasks.may_submit(await house.row(lease.task), house.a.worker_id, 1)
    late = await house.beat(house.a, lease)
    assert (late.order, late.message) == ("continue", LATE)
    assert late.renew_by <= house.clock.now()
    taken = await house.lease(house.b)
    assert (taken.task, taken.attempt) == (lease.task, 2)
    with pytest.raises(Gone):
        tasks.may_submit(await house.row(lease.task), house.a.worker_id, 1)
    assert (await house.beat(house.a, lease)).order == "gone"
    assert (await house.beat(house.b, taken)).order == "continue"


async def test_what_was_handed_in_late_is_not_given_to_others(house: VirtualQueue) -> None:
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


async def test_what_waits_for_its_verdict_does_not_expire(house: VirtualQueue) -> None:
    lease = await house.lease(house.a)
    await house.queue.begin(house.a, lease.task, 1)
    row = await house.row(lease.task)
    await house.write(lambda conn: add_contribution(conn, row))
    await house.beat(house.a, lease)
    await house.queue.renewals.flush()
    await house.clock.advance(10 * RENEW_S)
    assert await house.queue.expire() == 0
    await house.queue.release(house.a, lease.task, ReleaseRequest(attempt=1))  # too late: no effect
    assert (await house.row(lease.task)).state == "doing"


async def test_beats_do_not_move_the_end(house: VirtualQueue) -> None:
    lease = await house.lease(house.a)
    begun = await house.queue.begin(house.a, lease.task, 1)
    await house.keep_alive(house.a, lease, begun.finish_by - house.clock.now() - 60)
    assert (await house.row(lease.task)).state == "doing"
    await house.keep_alive(house.a, lease, 90)
    assert (await house.row(lease.task)).state == "todo"


async def test_pausing_moves_the_end_to_twice_the_time_at_most(house: VirtualQueue) -> None:
    lease = await house.lease(house.a)
    allowance = lease.finish_by - house.clock.now()
    row = await house.row(lease.task)
    assert (row.finish_by, row.finish_limit) == (lease.finish_by, lease.finish_by + allowance)
    begun = await house.queue.begin(house.a, lease.task, 1)
    assert begun.finish_by == lease.finish_by
    limit = begun.finish_by + allowance
    await house.keep_alive(house.a, lease, allowance, phase="paused")
    order = await house.beat(house.a, lease, phase="paused")
    assert (order.order, order.finish_by) == ("continue", limit)
    await house.keep_alive(house.a, lease, allowance, phase="paused")
    await house.keep_alive(house.a, lease, 30)
    assert (await house.row(lease.task)).state == "todo"


async def test_a_task_that_came_back_may_be_paused_no_longer_than_a_new_one(
    house: VirtualQueue,
) -> None:
    lost = await house.lease(house.a)
    await house.queue.release(house.a, lost.task, ReleaseRequest(attempt=1))
    lease = await house.lease(house.b)
    assert (lease.task, lease.attempt) == (lost.task, 2)
    allowance = lease.finish_by - house.clock.now()
    row = await house.row(lease.task)
    assert (row.finish_by, row.finish_limit) == (lease.finish_by, lease.finish_by + allowance)
    begun = await house.queue.begin(house.b, lease.task, 2)
    assert begun.finish_by == house.clock.now() + allowance == lost.finish_by
    row = await house.row(lease.task)
    assert row.finish_limit == begun.finish_by + allowance


async def test_one_paused_beat_adds_two_beats_of_time_at_most(house: VirtualQueue) -> None:
    lease = await house.lease(house.a)
    begun = await house.queue.begin(house.a, lease.task, 1)
    await house.beat(house.a, lease, phase="paused")
    await house.clock.advance(10 * HEARTBEAT_S)  # nothing was heard meanwhile
    order = await house.beat(house.a, lease, phase="paused")
    assert order.finish_by == begun.finish_by + 2 * HEARTBEAT_S
    await house.clock.advance(HEARTBEAT_S)
    order = await house.beat(house.a, lease, phase="paused")
    assert order.finish_by == begun.finish_by + 3 * HEARTBEAT_S


async def test_paused_time_that_could_not_be_written_is_written_by_the_next_flush(
    house: VirtualQueue,
) -> None:
    lease = await house.lease(house.a)
    begun = await house.queue.begin(house.a, lease.task, 1)
    await house.beat(house.a, lease, phase="paused")
    await house.clock.advance(HEARTBEAT_S)
    await house.beat(house.a, lease, phase="paused")
    full = faults(fail(Unavailable("the disk is full")).before("write _store"))
    with full.installed(), pytest.raises(Unavailable):
        await house.queue.renewals.flush()
    for _ in range(2):  # once, not twice
        await house.queue.renewals.flush()
        row = await house.row(lease.task)
        assert row.finish_by == begun.finish_by + HEARTBEAT_S
        assert row.renew_by == house.clock.now() + RENEW_S


async def test_what_a_machine_does_now_outlasts_a_flush_that_failed(
    house: VirtualQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(transaction: object) -> None:
        await house.queue.renewals.beat(house.a, HeartbeatRequest(paused=True))
        raise Unavailable("the disk is full")

    lease = await house.lease(house.a)
    await house.beat(house.a, lease)
    with monkeypatch.context() as patch:
        patch.setattr(house.db, "write", full)
        with pytest.raises(Unavailable):
            await house.queue.renewals.flush()
    await house.queue.renewals.flush()
    query = select(workers_table.c.state).where(workers_table.c.id == house.a.worker_id)
    assert await house.db.read(lambda conn: conn.execute(query).scalar_one()) == "paused"


async def test_an_older_attempt_of_the_same_worker_may_not_submit(house: VirtualQueue) -> None:
    """A process that was thought dead wakes up after its successor claimed the task again."""
    first = await house.lease(house.a)
    await house.queue.begin(house.a, first.task, 1)
    await house.queue.release(house.a, first.task, ReleaseRequest(attempt=1))
    again = await house.lease(house.a)
    assert (again.task, again.attempt) == (first.task, 2)
    row = await house.row(first.task)
    tasks.may_submit(row, house.a.worker_id, 2)
    with pytest.raises(Gone, match="no longer yours"):
        tasks.may_submit(row, house.a.worker_id, 1)
    for attempt in (-1, 0, 3):
        with pytest.raises(NotFound, match=f"attempt {attempt}"):
            tasks.may_submit(row, house.a.worker_id, attempt)
    with pytest.raises(Gone):
        await house.queue.begin(house.a, first.task, 1)
    assert (await house.beat(house.a, first)).order == "gone"


async def test_nothing_expires_right_after_a_restart(house: VirtualQueue) -> None:
    lease = await house.lease(house.a)
    await house.clock.advance(10_000)  # the coordinator was away
    restarted = queue_of(house.db, house.clock)
    assert await restarted.expire() == 0
    [order] = await restarted.renewals.beat(
        house.a, HeartbeatRequest(tasks=(TaskBeat(task=lease.task, attempt=1),))
    )
    assert order.order == "continue"
    await house.clock.advance(RENEW_S - 1)
    assert await restarted.expire() == 0
    assert (await house.row(lease.task)).state == "doing"


async def test_a_beat_for_the_task_of_somebody_else_is_gone(house: VirtualQueue) -> None:
    lease = await house.lease(house.a)
    for _ in range(2):
        assert (await house.beat(house.b, lease)).order == "gone"
        await house.clock.advance(30)
    attendance = house.queue.renewals._attendance.drain()  # of a machine that works for no run
    assert attendance == {}
    unknown = TaskBeat(task=10**9, attempt=1)
    [order] = await house.queue.renewals.beat(house.a, HeartbeatRequest(tasks=(unknown,)))
    assert order.order == "gone"


async def test_beats_tell_what_a_machine_does(house: VirtualQueue) -> None:
    async def seen() -> tuple[float, str]:
        query = select(workers_table.c.last_seen_at, workers_table.c.state)
        query = query.where(workers_table.c.id == house.a.worker_id)
        await house.queue.renewals.flush()
        return await house.db.read(lambda conn: tuple(conn.execute(query).one()))

    lease = await house.lease(house.a)
    assert await seen() == (house.clock.now(), "online")
    await house.clock.advance(7)
    await house.beat(house.a, lease)
    assert await seen() == (house.clock.now(), "training")
    await house.queue.renewals.beat(house.a, HeartbeatRequest(paused=True))
    assert (await seen())[1] == "paused"
    left = update(workers_table).values(state="left")
    await house.write(lambda conn: conn.execute(left))
    await house.queue.renewals.beat(house.a, HeartbeatRequest())
    assert (await seen())[1] == "left"


async def test_a_machine_keeps_the_readings_of_its_last_beat_alone(house: VirtualQueue) -> None:
    async def readings() -> tuple[float | None, float | None]:
        query = select(workers_table.c.rate, workers_table.c.celsius)
        query = query.where(workers_table.c.id == house.a.worker_id)
        await house.queue.renewals.flush()
        return await house.db.read(lambda conn: tuple(conn.execute(query).one()))

    lease = await house.lease(house.a)
    assert await readings() == (None, None)
    one, other = (
        TaskBeat(task=lease.task, attempt=1, rate=rate, phase="train") for rate in (2.5, None)
    )
    beat = HeartbeatRequest(tasks=(one, other), celsius=71.5)
    await house.queue.renewals.beat(house.a, beat)
    house.queue.renewals.note_alive(house.a.worker_id)  # a claim beside it
    assert await readings() == (2.5, 71.5)
    house.queue.renewals.note_alive(house.a.worker_id)
    assert await readings() == (2.5, 71.5)
    await house.queue.renewals.beat(house.a, HeartbeatRequest())
    assert await readings() == (None, None)


@pytest.mark.parametrize("change", ["renew", "overtake", "cancel", "reopen"])
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_tasks_are_locked_by_number_whatever_changes_them(
    house: VirtualQueue, database_url: str, change: str
) -> None:
    low, high = [await house.lease(who) for who in (house.a, house.b)]
    for who, lease in ((house.a, low), (house.b, high)):
        await house.queue.begin(who, lease.task, 1)
    if change == "reopen":
        await house.write(lambda conn: tasks.cancel_run(conn, house.run, 1.0))
    t = tasks_table.c
    for task in (high.task, low.task):  # rows lie in the order in which they were last written
        await house.write(
            lambda conn, n=task: conn.execute(  # type: ignore[misc]
                update(tasks_table).where(t.id == n).values(returned=False)
            )
        )
    renewals = [
        heartbeats.Renewal(task=lease.task, attempt=1, renew_by=1e12, extra_s=0.0)
        for lease in (high, low)
    ]
    changes: dict[str, Callable[[Connection], object]] = {
        "renew": lambda conn: heartbeats.renew(conn, renewals),
        "overtake": lambda conn: tasks.overtake(conn, house.run, head=9),
        "cancel": lambda conn: tasks.cancel_run(conn, house.run, 1.0),
        "reopen": lambda conn: tasks.reopen_run(conn, house.run),
    }
    server = create_async_engine(database_url)
    waits = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    locked = select(t.id).where(t.id == low.task).with_for_update()
    free = select(t.id).where(t.id == high.task).with_for_update(skip_locked=True)
    async with server.connect() as other, server.connect() as watch:
        await other.execute(locked)
        changing = asyncio.create_task(house.write(changes[change]))
        while not (await watch.execute(waits)).scalar_one():
            await asyncio.sleep(0.01)
        assert (await watch.execute(free)).scalar() == high.task
        await watch.rollback()
        await other.execute(update(tasks_table).where(t.id == low.task).values(renew_by=5e11))
        await other.commit()
        await changing
    await server.dispose()
    rows = [await house.row(lease.task) for lease in (low, high)]
    expected = {"renew": "doing", "overtake": "todo", "cancel": "cancelled", "reopen": "todo"}
    assert [row.state for row in rows] == [expected[change]] * 2
    if change != "reopen":
        until = 1e12 if change == "renew" else None
        assert [row.renew_by for row in rows] == [until] * 2
