"""Rollbacks of a run whose updates wait: no update of a reverted version is ever merged."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from coordinator.database import runs
from coordinator.database.tables.contributions import contributions as table
from shared.protocol.heartbeat import HeartbeatReply
from shared.protocol.leases import Lease
from tests.support.local_coordinator import (
    RUN,
    LocalCoordinator,
    Worker,
    decode,
    local_coordinator,
)
from tests.support.members import contribute

STALE = RUN + "max_staleness = 5\n"


async def states(home: LocalCoordinator) -> dict[int, list[str]]:
    """Return the states of the contributions by their base version."""
    columns = sa.select(table.c.base_version, table.c.state).order_by(table.c.id)
    rows = await home.coordinator.db.read(lambda conn: conn.execute(columns).all())
    return {base: [state for other, state in rows if other == base] for base, _ in rows}


async def merge(home: LocalCoordinator) -> bool:
    row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
    return await home.coordinator.merger.merge_if_due(row.id)


async def version_one(home: LocalCoordinator) -> tuple[Worker, Worker]:
    await home.start_run(STALE)
    ann, ben = [await home.join(name) for name in ("Ann", "Ben")]
    for seed, worker in enumerate((ann, ben)):
        await contribute(worker, seed)
    assert await merge(home)
    return ann, ben


async def test_an_update_of_a_reverted_version_is_paid_and_never_merged(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        ann, ben = await version_one(home)
        await contribute(ann, 7)  # from version 1, and waits for another
        await home.coordinator.runs.rollback("tiny", 0)
        assert await states(home) == {0: ["merged", "merged"], 1: ["superseded"]}
        for seed, worker in enumerate((ann, ben), 20):
            await contribute(worker, seed)
        assert await merge(home)
        assert await states(home) == {0: ["merged"] * 2, 1: ["superseded"], 2: ["merged"] * 2}
        assert await home.coordinator.ledger.check() == ()


async def test_one_that_is_accepted_while_its_version_is_reverted_is_paid_instead_of_merged(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        ann, ben = await version_one(home)
        await contribute(ann, 7)
        await home.coordinator.db.write(
            lambda conn: conn.execute(
                sa.update(table).where(table.c.base_version == 1).values(state="checking")
            )
        )
        await home.coordinator.runs.rollback("tiny", 0)
        await home.coordinator.db.write(
            lambda conn: conn.execute(
                sa.update(table).where(table.c.base_version == 1).values(state="accepted")
            )
        )
        assert not await merge(home)
        assert await states(home) == {0: ["merged"] * 2, 1: ["superseded"]}
        for seed, worker in enumerate((ann, ben), 20):
            await contribute(worker, seed)
        assert await merge(home)
        assert await states(home) == {0: ["merged"] * 2, 1: ["superseded"], 2: ["merged"] * 2}
        assert await home.coordinator.ledger.check() == ()


async def test_a_rollback_takes_back_the_leases_on_reverted_versions_alone(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        await home.start_run(STALE)
        ann, ben, cid = [await home.join(name) for name in ("Ann", "Ben", "Cid")]
        early = await cid.claim()
        await cid.begin(early)  # from version 0
        for seed, worker in enumerate((ann, ben)):
            await contribute(worker, seed)
        assert await merge(home)
        late = await ann.claim()
        assert (await ann.begin(late)).version == 1
        await home.coordinator.runs.rollback("tiny", 0)

        async def order(worker: Worker, lease: Lease) -> str:
            beat = {"tasks": [{"task": lease.task, "attempt": lease.attempt}]}
            reply = decode(await worker.post("/workers/heartbeat", beat), HeartbeatReply)
            return reply.orders[0].order

        for worker, lease in ((ann, late), (cid, early)):
            await order(worker, lease)
        await home.coordinator.renewals.flush()
        assert (await order(ann, late), await order(cid, early)) == ("gone", "continue")
        again = await ben.claim()
        assert (again.task, again.attempt) == (late.task, late.attempt + 2)
        assert (await ben.begin(again)).version == 2
