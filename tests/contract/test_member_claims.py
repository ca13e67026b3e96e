"""Claims over data that members keep, by many coordinators at once, on both databases."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from sqlalchemy import select

from coordinator.accounts.accounts import Principal
from coordinator.database import invariants, tasks
from coordinator.database.engine.open_database import Database
from coordinator.database.tables.tasks import tasks as tasks_table
from coordinator.scheduling.member_data import MemberDeclarations
from coordinator.signals import Signals
from shared.protocol.leases import ReleaseRequest
from shared.protocol.limits import RENEW_S
from shared.protocol.members import MemberData
from tests.support.run_rows import add_run, add_worker, claim, queue_of
from tests.support.virtual_clock import VirtualClock

MODEL = {"vocab_size": 300, "block_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 8}
TASK = {"local_steps": 2, "batch_size": 4, "in_flight": 16, "lease_floor_seconds": 600.0}
TURNS, SAMPLES = 10, 50


async def test_many_coordinators_cut_each_machines_pass_once(
    database: Database, database_url: str
) -> None:
    """Six coordinators claim for three machines, which declare other data meanwhile."""
    clock = VirtualClock()
    await clock.advance(RENEW_S)
    run = await database.write(
        lambda conn: add_run(conn, "kept", task=TASK, model=MODEL, data={"at": "members"})
    )
    machines = await database.write(lambda conn: [add_worker(conn) for _ in range(3)])
    databases = [await Database.open(database_url) for _ in range(6)]

    async def declare(db: Database, who: Principal, samples: int) -> None:
        numbers = MemberData(samples=samples, items=samples)
        await MemberDeclarations(db, clock, Signals()).declare(who, "kept", numbers)

    async def hammer(number: int, db: Database) -> None:
        queue, who = queue_of(db, clock), machines[number % len(machines)]
        for turn in range(TURNS):
            lease = (await claim(queue, who, runs=("kept",), device=f"cuda:{number}")).lease
            assert lease is not None
            if turn % 3 == 2:
                await queue.release(who, lease.task, ReleaseRequest(attempt=lease.attempt))
            if turn == TURNS // 2:
                await declare(db, who, SAMPLES + number)

    try:
        for who in machines:
            await declare(database, who, SAMPLES)
        await asyncio.gather(*(hammer(number, db) for number, db in enumerate(databases)))
    finally:
        for db in databases:
            await db.close()
    query = select(tasks_table).where(tasks_table.c.run_id == run)
    rows = await database.read(lambda conn: tasks.rows_of(conn.execute(query)))
    taken: dict[tuple[str, int], list[range]] = defaultdict(list)
    for row in rows:
        assert row.worker_id == row.home
        taken[row.home, row.pass_no].append(range(row.start, row.stop))
    assert {home for home, _ in taken} == {who.worker_id for who in machines}
    for ranges in taken.values():
        positions = [position for part in ranges for position in part]
        assert sorted(positions) == list(range(len(positions)))
    assert await database.read(invariants.breaches) == []
