"""Publications: which version is due, who takes it, and what is said of it, on both databases."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from sqlalchemy import Connection, insert

from coordinator.database import runs
from coordinator.database.engine.open import Database
from coordinator.database.hub import publications
from coordinator.database.hub.publications import PublicationRow
from coordinator.database.tables.versions import evaluations
from tests.support.run_rows import add_run, add_version


def order(run: int, **changes: Any) -> PublicationRow:
    values: dict[str, Any] = {
        "run_id": run, "mode": "every", "every": 3, "repository": "ann/tiny",
        "format": "safetensors", "version": None, "published_at": None, "url": "",
        "failures": 0, "error": "", "next_at": 0.0,
    }  # fmt: skip
    return PublicationRow(**(values | changes))


def evaluated(conn: Connection, run: int, version: int, state: str, **more: Any) -> None:
    if version:
        add_version(conn, run, version)
    values = {"loss": None, "metrics": "{}", "sample": "", "message": "", "pruned": False} | more
    conn.execute(insert(evaluations).values(run_id=run, version=version, state=state, **values))


async def due(database: Database, row: PublicationRow) -> int | None:
    return await database.read(
        lambda conn: publications.due(conn, row, runs.by_id(conn, row.run_id))
    )


async def test_every_so_many_versions_the_newest_that_was_measured_is_due(
    database: Database,
) -> None:
    run = await database.write(add_run)

    def some(conn: Connection) -> None:
        for version, state in enumerate(("done", "done", "skipped"), start=1):
            evaluated(conn, run, version, state)

    await database.write(some)
    assert await due(database, order(run)) is None  # of version 3 nothing is known
    await database.write(lambda conn: evaluated(conn, run, 4, "failed"))
    await database.write(lambda conn: evaluated(conn, run, 5, "waiting"))
    assert await due(database, order(run)) == 4
    assert await due(database, order(run, version=1)) == 4
    assert await due(database, order(run, version=2)) is None
    await database.write(lambda conn: runs.set_values(conn, run, state="completed"))
    assert await due(database, order(run, version=2)) == 4  # the last one, whatever its number
    assert await due(database, order(run, version=4)) is None


async def test_the_best_is_due_once_another_is_and_never_version_0(database: Database) -> None:
    run = await database.write(add_run)
    for best, version, expected in ((None, None, None), (0, None, None), (2, None, 2), (2, 2, None),
                                    (1, 2, 1)):  # fmt: skip
        await database.write(partial(runs.set_values, run_id=run, best=best))
        assert await due(database, order(run, mode="best", version=version)) == expected


async def test_one_coordinator_takes_it_and_another_when_the_lease_is_over(
    database: Database,
) -> None:
    run = await database.write(add_run)
    row = order(run)
    await database.write(lambda conn: publications.store(conn, row))
    assert await database.write(lambda conn: publications.take(conn, row, 100.0))
    assert not await database.write(lambda conn: publications.take(conn, row, 101.0))
    assert await database.read(lambda conn: publications.waiting(conn, 99.0)) == []
    (left,) = await database.read(lambda conn: publications.waiting(conn, 100.0))
    assert await database.write(lambda conn: publications.take(conn, left, 200.0))


async def test_what_goes_elsewhere_since_is_not_told_of_the_old_place(database: Database) -> None:
    run = await database.write(add_run)
    old = order(run)
    for changes in ({"repository": "ann/other"}, {"format": "onnx"}, {"mode": "off"}):
        new = order(run, **changes)
        await database.write(partial(publications.store, row=new))
        await database.write(lambda conn: publications.report(conn, old, version=7))
        assert await database.read(lambda conn: publications.of(conn, run)) == new
    assert await database.read(lambda conn: publications.waiting(conn, 1e12)) == []


async def test_two_orders_at_once_both_succeed(database: Database) -> None:
    run = await database.write(add_run)

    def change(every: int, conn: Connection) -> None:
        publications.to_change(conn, run)
        publications.store(conn, order(run, every=every))

    await asyncio.gather(*(database.write(partial(change, n)) for n in range(1, 9)))
    row = await database.read(lambda conn: publications.of(conn, run))
    assert row is not None
    assert row.every in range(1, 9)
