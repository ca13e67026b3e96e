"""Databases and backups of the first revision, brought to this one on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import DBAPIError

from coordinator.database import contributions, invariants, runs, versions, volunteers
from coordinator.database.engine import dump, postgres, sqlite
from coordinator.database.engine.open import Database, migrate, parse
from coordinator.database.migrations.upgrade import settings
from coordinator.database.migrations.versions import r0001_tables as first
from coordinator.database.tables.schema import metadata
from shared.errors import Configuration
from tests.support.databases import Postgres

NOW = 1_700_000_000.0


def _to_first(conn: Connection) -> None:
    from alembic import command

    command.upgrade(settings(conn), "0001")


def _rows() -> dict[str, list[dict[str, Any]]]:
    """An account with one merged contribution, as the first revision stored it."""
    sha = "ab" * 32
    run = {
        "id": 1, "name": "old", "state": "running", "file": "{}", "workload": "gpt",
        "workload_version": 1, "seed": 7, "head": 1, "global_step": 10, "tokens": 100,
        "parameters": 3, "samples_total": 8, "samples_per_chunk": "[8]", "sample_size": 1,
        "pass_no": 1, "pass_seed": 99, "cursor": 8, "step_flops": 1.0, "price_micro": 5,
        "weight": 1.0, "median_task_s": 2.5, "last_merge_at": NOW, "created_at": NOW,
    }  # fmt: skip
    version = {
        "run_id": 1, "master_sha256": sha, "published_sha256": sha, "size": 4, "manifest": "{}",
        "signature": "00", "tokens": 100, "merge_s": 1.5, "created_at": NOW,
    }  # fmt: skip
    evaluation = {
        "run_id": 1, "state": "skipped", "metrics": "{}", "sample": "", "message": "",
        "pruned": False,
    }  # fmt: skip
    task = {
        "id": 1, "run_id": 1, "kind": "train", "pass_no": 1, "start": 0, "stop": 8, "seed": 3,
        "steps": 10, "batch_size": 1, "price_micro": 50, "state": "done", "attempt": 1,
        "device": "cpu", "failures": 0, "timeouts": 0, "returned": False, "options": "{}", "created_at": NOW,
    }  # fmt: skip
    contribution = {
        "id": 1, "run_id": 1, "task_id": 1, "attempt": 1, "part": 0, "tries": 0,
        "worker_id": "w", "volunteer_id": "v", "digest": "d", "kind": "delta", "codec": "raw",
        "sha256": sha, "size": 4, "base_version": 0, "steps": 10, "samples": 8, "price_micro": 50,
        "train_s": 1.0, "clip": 1.0, "state": "merged", "reason": "", "message": "", "version": 1,
        "report": "{}", "received_at": NOW,
    }  # fmt: skip
    return {
        "volunteers": [
            {"id": "v", "nickname": "Ann", "nickname_key": "ann", "state": "active",
             "public": True, "trust": 0.5, "created_at": NOW}
        ],
        "runs": [run],
        "tasks": [task],
        "contributions": [contribution],
        "versions": [
            version | {"version": 0, "kind": "initial", "contributions": "[]", "global_step": 0},
            version | {"version": 1, "kind": "merge", "parent": 0, "contributions": "[1]",
                       "global_step": 10},
        ],
        "evaluations": [evaluation | {"version": number} for number in (0, 1)],
    }  # fmt: skip


def _fill(conn: Connection) -> None:
    there = inspect(conn)
    for name, lines in _rows().items():
        table = first.metadata.tables[name]
        known = {column["name"] for column in there.get_columns(name)}
        values = [{key: line[key] for key in line if key in known} for line in lines]
        conn.execute(table.insert(), values)


async def _write(url: str, *steps: Any) -> None:
    """Run functions of a connection on a database of any revision, in one transaction."""

    def run(conn: Connection) -> None:
        for step in steps:
            step(conn)

    target = parse(url)
    if target.get_backend_name() == "sqlite":
        path = Path(str(target.database))
        sqlite.prepare_file(path)
        engine = sqlite.engine(path, begin="BEGIN IMMEDIATE")
        with engine.connect() as connection, connection.begin():
            run(connection)
        engine.dispose()
        return
    remote = postgres.engine(target.render_as_string(hide_password=False), pool_size=1)
    async with remote.begin() as held:
        await held.run_sync(run)
    await remote.dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
async def bare_url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """The address of a database without tables."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'old.db'}"
        return
    server: Postgres = request.getfixturevalue("postgres")
    server.count += 1
    name = f"bare_{server.count}"
    await server.admin(f"CREATE DATABASE {name}")
    yield server.url(name)
    await server.admin(f"DROP DATABASE {name} WITH (FORCE)")


def _shape(conn: Connection) -> dict[str, Any]:
    """Columns and indexes of every table."""
    there = inspect(conn)
    return {
        name: (
            {column["name"] for column in there.get_columns(name)},
            {index["name"] for index in there.get_indexes(name)},
        )
        for name in metadata.tables
    }


async def _check_upgraded(db: Database) -> None:
    assert await db.read(invariants.breaches) == []
    account = await db.read(lambda conn: volunteers.by_id(conn, "v"))
    assert account is not None
    row = await db.read(lambda conn: contributions.by_id(conn, 1))
    assert row.state == "merged"
    assert (await db.read(lambda conn: runs.by_name(conn, "old"))).cursor == 8
    assert [row.version for row, _ in await db.read(lambda c: versions.listing(c, 1, -1, 9))] == [
        0,
        1,
    ]


async def test_a_database_of_the_first_revision_is_migrated(bare_url: str) -> None:
    await _write(bare_url, _to_first, _fill)
    with pytest.raises(Configuration, match="older version"):
        await Database.open(bare_url)
    await migrate(bare_url)
    db = await Database.open(bare_url)
    try:
        await _check_upgraded(db)
        for statement in ("DELETE FROM versions", "UPDATE versions SET size = 5"):
            with pytest.raises(DBAPIError, match="never change"):
                await db.write(lambda conn, sql=statement: conn.execute(text(sql)))  # type: ignore[misc]
    finally:
        await db.close()


async def test_an_incomplete_database_of_the_first_revision_is_completed(
    bare_url: str, database_url: str
) -> None:
    """Early databases lack the last indexes, a column and a table of the first revision."""

    def early(conn: Connection) -> None:
        for statement in (
            "DROP INDEX ix_contributions_newest",
            "DROP INDEX ix_evaluations_kept",
            "DROP TABLE version_blobs",
            "ALTER TABLE versions DROP COLUMN phase",
        ):
            conn.execute(text(statement))

    await _write(bare_url, _to_first, early, _fill)
    await migrate(bare_url)
    db = await Database.open(bare_url)
    fresh = await Database.open(database_url)
    try:
        await _check_upgraded(db)
        if db.dialect == fresh.dialect:
            assert await db.read(_shape) == await fresh.read(_shape)
    finally:
        await db.close()
        await fresh.close()


async def test_rows_of_a_backup_of_the_first_revision_are_loaded(database: Database) -> None:
    """Dropped columns are left out, and new ones get their defaults."""

    def load(conn: Connection) -> None:
        lines = _rows()
        for name in dump.names():
            if name in lines:
                for line in lines[name]:
                    dump.load(conn, name, [line])

    await database.write(load)
    await _check_upgraded(database)
