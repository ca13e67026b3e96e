"""Work that cannot begin is refused, and nothing is written of it: the same on SQLite and
PostgreSQL.
"""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from coordinator.database import runs
from coordinator.database.engine.open_database import Database
from coordinator.database.tasks import Begun
from shared.errors import Unavailable
from shared.protocol.leases import Lease
from tests.support.run_rows import add_run, add_version
from tests.support.virtual_queue import TASK, VirtualQueue, virtual_queue


@pytest.fixture
async def house(database: Database) -> VirtualQueue:
    return await virtual_queue(database, run=False)


async def ahead(house: VirtualQueue) -> tuple[int, Lease]:
    """A run at version 2, and a lease of `a` that has not begun."""
    plan = {"preset": "fedavg", "overlap": True, "max_staleness": 2}
    run = await house.db.write(lambda conn: add_run(conn, "tiny", task=TASK, plan=plan))
    for version in (1, 2):
        await house.db.write(
            partial(add_version, run_id=run, version=version, global_step=50 * version)
        )
    return run, await house.lease(house.a)


async def test_a_task_that_cannot_begin_is_refused_alone_and_unchanged(house: VirtualQueue) -> None:
    _, lease = await ahead(house)
    bare = await house.db.write(lambda conn: add_run(conn, "bare", task=TASK))
    other = await house.lease(house.b, runs=("bare",))
    await house.db.write(lambda conn: runs.set_values(conn, bare, head=5))  # that is not there
    before = await house.row(other.task)
    begun, refused = await asyncio.gather(
        house.queue.begin(house.a, lease.task, 1),
        house.queue.begin(house.b, other.task, 1),
        return_exceptions=True,
    )
    assert isinstance(begun, Begun)
    assert begun.version == 2
    assert isinstance(refused, Unavailable)
    assert await house.row(other.task) == before


async def test_newer_work_without_a_version_leaves_the_lease_as_it_was(house: VirtualQueue) -> None:
    run, lease = await ahead(house)
    begun = await house.queue.begin(house.a, lease.task, 1)
    await house.db.write(lambda conn: runs.set_values(conn, run, head=5))
    with pytest.raises(Unavailable, match="no version"):
        await house.queue.begin(house.a, lease.task, 1, newest=True)
    assert await house.row(lease.task) == begun.task
