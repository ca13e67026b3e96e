"""Databases of revision 0001 open after a migration, with their rows, guards and every index."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import Connection, Executable, delete, insert, inspect, select, text, update
from sqlalchemy.exc import DBAPIError

from coordinator.database import invariants, runs
from coordinator.database.engine import postgres as postgres_engine
from coordinator.database.engine import sqlite
from coordinator.database.engine.open import Database, migrate, parse
from coordinator.database.ledger.check import check_ledger
from coordinator.database.migrations.upgrade import settings
from coordinator.database.migrations.versions import r0001_tables as first
from coordinator.database.tables.schema import metadata
from coordinator.database.tables.versions import versions
from shared.errors import Configuration
from tests.support.databases import Postgres


def _execute(conn: Connection, change: Executable) -> None:
    conn.execute(change)


def _change(url: str, fn: Callable[[Connection], None]) -> None:
    """Run `fn` on a database that this version does not open yet."""
    target = parse(url)
    if target.get_backend_name() == "sqlite":
        path = Path(str(target.database))
        sqlite.prepare_file(path)
        engine = sqlite.engine(path, begin="BEGIN IMMEDIATE")
        with engine.connect() as connection, connection.begin():
            fn(connection)
        engine.dispose()
        return

    async def change() -> None:
        made = postgres_engine.engine(url, pool_size=1)
        async with made.begin() as connection:
            await connection.run_sync(fn)
        await made.dispose()

    asyncio.run(change())


@pytest.fixture(params=["sqlite", "postgresql"])
def old_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a database of revision 0001 with a run, a version and the lack of an index."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/old.db"
    else:
        server: Postgres = request.getfixturevalue("postgres")
        asyncio.run(server.admin("DROP DATABASE IF EXISTS old", "CREATE DATABASE old"))
        url = server.url("old")

    def fill(conn: Connection) -> None:
        command.upgrade(settings(conn), "0001")
        numbers = "head global_step tokens parameters samples_total sample_size pass_no cursor"
        run = dict.fromkeys(numbers.split(), 0) | {
            "name": "old",
            "state": "running",
            "file": "{}",
            "workload": "gpt",
            "workload_version": 1,
            "seed": 7,
            "samples_per_chunk": "[]",
            "pass_seed": 2**62,
            "step_flops": 1.0,
            "price_micro": 1,
            "weight": 1.0,
            "median_task_s": 3.5,
            "last_merge_at": 5.0,
            "created_at": 1.0,
        }
        conn.execute(insert(first.runs).values(**run))
        texts = "master_sha256 published_sha256 manifest signature"
        version = dict.fromkeys(texts.split(), "x") | {
            "run_id": conn.execute(select(first.runs.c.id)).scalar_one(),
            "version": 0,
            "kind": "initial",
            "size": 1,
            "contributions": "[]",
            "global_step": 0,
            "tokens": 0,
            "merge_s": 0.25,
            "created_at": 1.0,
        }
        conn.execute(insert(first.versions).values(**version))
        conn.execute(text("DROP INDEX ix_tasks_beside"))

    _change(url, fill)
    return url


def test_the_rows_stay_and_history_stays_guarded(old_url: str) -> None:
    async def look() -> None:
        with pytest.raises(Configuration, match="coordinator migrate"):
            await Database.open(old_url)
        await migrate(old_url)
        db = await Database.open(old_url)
        try:
            run = await db.read(lambda conn: runs.by_name(conn, "old"))
            assert (run.state, run.seed, run.created_at) == ("running", 7, 1.0)
            assert await db.read(invariants.breaches) == []
            assert await db.read(check_ledger) == []
            for change in (update(versions).values(size=2), delete(versions)):
                with pytest.raises(DBAPIError, match="never change"):
                    await db.write(partial(_execute, change=change))
        finally:
            await db.close()

    asyncio.run(look())


def test_an_old_database_becomes_as_a_new_one(old_url: str) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext

    async def look() -> None:
        await migrate(old_url)
        db = await Database.open(old_url)

        def differences(conn: Connection) -> list[object]:
            context = MigrationContext.configure(conn, opts={"compare_type": True})
            return list(compare_metadata(context, metadata))

        def columns(conn: Connection) -> set[str]:
            found = inspect(conn)
            return {c["name"] for name in ("runs", "versions") for c in found.get_columns(name)}

        try:
            assert await db.read(differences) == []
            dead = {"pass_seed", "median_task_s", "last_merge_at", "merge_s"}
            assert not dead & await db.read(columns)
        finally:
            await db.close()

    asyncio.run(look())
