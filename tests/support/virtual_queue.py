"""Queue on a database of its own, in virtual time, for tests of claims and leases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, select

from coordinator.accounts.accounts import Principal
from coordinator.database import runs, tasks
from coordinator.database.engine.open_database import Database
from coordinator.database.tables.tasks import tasks as tasks_table
from coordinator.database.tasks import TaskRow
from coordinator.scheduling.task_leases import TaskLeases
from coordinator.scheduling.task_list import TaskList
from coordinator.signals import Signals
from shared.protocol.base import Reason
from shared.protocol.heartbeat import HeartbeatRequest, TaskBeat, TaskOrder
from shared.protocol.leases import Lease
from shared.protocol.limits import RENEW_S
from tests.support.run_rows import add_run, add_worker, claim, queue_of
from tests.support.virtual_clock import VirtualClock

T = TypeVar("T")

TASK = {"local_steps": 2, "batch_size": 4, "lease_floor_seconds": 600.0}


@dataclass
class VirtualQueue:
    """A database with one run of one pass over 64 samples, cut into tasks of 8, and a queue."""

    db: Database
    clock: VirtualClock
    queue: TaskLeases
    signals: Signals
    run: int  # 0 = none
    a: Principal
    b: Principal

    @property
    def task_list(self) -> TaskList:
        return TaskList(self.db, self.clock, self.signals)

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
        """Finish a task as if its update were merged; False if it had ended before."""
        now = self.clock.now()
        return await self.db.write(lambda conn: tasks.finish_all(conn, [task], now) == 1)

    async def put_back(self, lease: Lease, who: Principal, kind: tasks.FailureKind | None) -> str:
        spec = await self.db.read(lambda conn: self.queue.claims.spec(conn, self.run))
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
        [order] = await self.queue.renewals.beat(who, HeartbeatRequest(tasks=(beat,)))
        return order

    async def keep_alive(self, who: Principal, lease: Lease, seconds: float, **values: Any) -> None:
        """Beat every 30 seconds for that long, as a worker does."""
        for _ in range(round(seconds / 30)):
            await self.clock.advance(30)
            await self.beat(who, lease, **values)
            await self.queue.renewals.flush()
            await self.queue.expire()


async def virtual_queue(database: Database, *, run: bool = True) -> VirtualQueue:
    """Yield a queue whose grace after the start is over."""
    clock = VirtualClock()
    made = (
        await database.write(lambda conn: add_run(conn, task=TASK, stop={"passes": 1}))
        if run
        else 0
    )
    a, b = await database.write(lambda conn: (add_worker(conn), add_worker(conn)))
    signals = Signals(clock)
    queue = queue_of(database, clock, signals=signals)
    house = VirtualQueue(database, clock, queue, signals, made, a, b)
    await clock.advance(RENEW_S)
    return house


def check_cover(conn: Connection, run: int) -> None:
    """Every cut sample of the current pass is in exactly one task."""
    t = tasks_table.c
    row = runs.by_id(conn, run)
    query = select(t.start, t.stop).where(t.run_id == run, t.pass_no == row.pass_no)
    at = 0
    for start, stop in conn.execute(query.order_by(t.start)):
        assert start == at
        at = stop
    assert at == row.cursor
