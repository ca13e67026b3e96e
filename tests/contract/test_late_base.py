"""Work that began while the coordinator could not be asked, and is told of late: the same on SQLite
and PostgreSQL.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from coordinator.database import runs
from coordinator.database.engine.open_database import Database
from coordinator.database.tasks import Begun
from shared.errors import Gone, Unavailable
from shared.protocol.leases import Lease
from shared.protocol.limits import RENEW_S
from tests.support.run_rows import add_run, add_version
from tests.support.virtual_queue import TASK, VirtualQueue, virtual_queue


@pytest.fixture
async def house(database: Database) -> VirtualQueue:
    return await virtual_queue(database, run=False)


async def ahead(house: VirtualQueue, **table: Any) -> tuple[int, Lease]:
    """A run whose plan lets work overlap, at version 2, and a lease of `a` that has not begun."""
    plan = {"preset": "fedavg", "overlap": True, "max_staleness": 2} | table
    run = await house.db.write(lambda conn: add_run(conn, "early", task=TASK, plan=plan))
    for version in (1, 2):
        await house.db.write(
            partial(add_version, run_id=run, version=version, global_step=50 * version)
        )
    return run, await house.lease(house.a)


async def test_a_base_told_late_is_bound_as_it_was(house: VirtualQueue) -> None:
    run, lease = await ahead(house)
    await house.clock.advance(60)
    begun = await house.queue.begin(house.a, lease.task, 1, base=1)
    assert (begun.version, begun.global_step) == (1, 50)
    assert begun.finish_by == house.clock.now() + 6000
    assert (await house.row(lease.task)).begun_at == lease.now
    await house.db.write(lambda conn: add_version(conn, run, 3))
    assert await house.queue.begin(house.a, lease.task, 1) == begun
    assert await house.queue.begin(house.a, lease.task, 1, base=1) == begun  # told once more


async def test_a_base_told_late_holds_although_the_answer_to_a_begin_was_lost(
    house: VirtualQueue,
) -> None:
    _, lease = await ahead(house)
    assert (await house.queue.begin(house.a, lease.task, 1)).version == 2
    assert (await house.queue.begin(house.a, lease.task, 1, base=1)).version == 1
    assert (await house.row(lease.task)).base_version == 1


async def test_a_base_told_late_counts_also_when_the_lease_ran_out_meanwhile(
    house: VirtualQueue,
) -> None:
    _, lease = await ahead(house)
    await house.clock.advance(RENEW_S + 1)
    assert await house.queue.expire() == 1
    assert (await house.queue.begin(house.a, lease.task, 1, base=1)).version == 1
    row = await house.row(lease.task)
    assert (row.state, row.returned, row.base_version) == ("todo", True, 1)
    assert (await house.lease(house.b)).attempt == 2
    with pytest.raises(Gone):
        await house.queue.begin(house.a, lease.task, 1, base=1)


@pytest.mark.parametrize(
    ("table", "base", "why"),
    [
        ({"max_staleness": 1}, 0, "2 versions"),
        ({"preset": "gradient-average"}, 1, "1 version"),
        ({"in_flight": "cancel"}, 1, "1 version"),
        ({"overlap": False}, 2, "newest version"),
        ({"preset": "sync-sgd"}, 2, "newest version"),
        ({}, 3, "no version 3"),
        ({}, -1, "no version -1"),
    ],
)
async def test_a_base_that_the_plan_does_not_let_be_told_late_gives_the_task_back(
    house: VirtualQueue, table: dict[str, Any], base: int, why: str
) -> None:
    _, lease = await ahead(house, **table)
    with pytest.raises(Gone, match=why):
        await house.queue.begin(house.a, lease.task, 1, base=base)
    row = await house.row(lease.task)
    assert (row.state, row.returned, row.failures, row.timeouts) == ("todo", False, 0, 0)


async def test_a_base_that_was_taken_back_is_not_begun_from(house: VirtualQueue) -> None:
    run, lease = await ahead(house)
    await house.db.write(lambda conn: add_version(conn, run, 3, kind="rollback"))
    with pytest.raises(Gone, match="taken back"):
        await house.queue.begin(house.a, lease.task, 1, base=2)


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


@pytest.mark.parametrize("begins", [False, True])
async def test_a_base_without_a_version_leaves_the_lease_as_it_was(
    house: VirtualQueue, begins: bool
) -> None:
    run, lease = await ahead(house)
    if begins:
        await house.queue.begin(house.a, lease.task, 1)
    await house.db.write(lambda conn: runs.set_values(conn, run, head=5))
    before = await house.row(lease.task)
    with pytest.raises(Unavailable, match="no version 4"):
        await house.queue.begin(house.a, lease.task, 1, base=4)
    assert await house.row(lease.task) == before


async def test_newer_work_without_a_version_leaves_the_lease_as_it_was(house: VirtualQueue) -> None:
    run, lease = await ahead(house)
    begun = await house.queue.begin(house.a, lease.task, 1)
    await house.db.write(lambda conn: runs.set_values(conn, run, head=5))
    with pytest.raises(Unavailable, match="no version"):
        await house.queue.begin(house.a, lease.task, 1, newest=True)
    assert await house.row(lease.task) == begun.task
