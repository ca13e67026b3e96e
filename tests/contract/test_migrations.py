"""Migrations and what the database itself forbids, on SQLite and PostgreSQL."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, Executable, delete, insert, select, text, update
from sqlalchemy.exc import DBAPIError

from coordinator.database.engine import open_database as opening
from coordinator.database.engine.open_database import Database, migrate
from coordinator.database.migrations.triggers import FROZEN
from coordinator.database.migrations.upgrade import REVISIONS
from coordinator.database.tables.ledger import accounts, events, postings
from coordinator.database.tables.record import record_lines
from coordinator.database.tables.schema import metadata
from coordinator.database.tables.versions import versions
from shared.errors import Configuration
from tests.support.databases import keys


def run(conn: Connection, statement: Executable) -> None:
    conn.execute(statement)


def _event(conn: Connection) -> None:
    values = {"key": "k", "digest": "d", "kind": "earn", "memo": "", "at": 1.0}
    conn.execute(insert(events).values(**values, run_id=None, contribution_id=None))
    conn.execute(insert(accounts).values(owner="system", kind="mint", balance_micro=-5))
    event = conn.execute(select(events.c.id)).scalar_one()
    account = conn.execute(select(accounts.c.id)).scalar_one()
    conn.execute(insert(postings).values(event_id=event, account_id=account, amount_micro=5))
    conn.execute(
        insert(record_lines).values(at=1.0, actor="a", action="b", subject="c", detail="d")
    )


@pytest.mark.parametrize(
    "statement",
    [
        update(postings).values(amount_micro=6),
        delete(postings),
        update(events).values(memo="other"),
        update(events).values(digest="other"),
        delete(events),
        update(record_lines).values(detail="other"),
        delete(record_lines),
    ],
    ids=str,
)
async def test_history_cannot_be_rewritten(database: Database, statement: Executable) -> None:
    await database.write(_event)
    with pytest.raises(DBAPIError, match="never change"):
        await database.write(partial(run, statement=statement))


async def test_no_trigger_is_missing(database: Database) -> None:
    """Versions need a run to exist, so their triggers are looked up instead of tried."""
    catalogue = {
        "sqlite": "SELECT name FROM sqlite_master WHERE type = 'trigger'",
        "postgresql": "SELECT DISTINCT trigger_name FROM information_schema.triggers",
    }[database.dialect]
    found = await database.read(lambda conn: set(conn.execute(text(catalogue)).scalars()))
    wanted = {f"{table}_no_{change}" for table in FROZEN for change in ("update", "delete")}
    assert wanted <= found
    assert versions.name in metadata.tables


async def test_migrating_again_changes_nothing(database_url: str) -> None:
    await migrate(database_url)
    db = await Database.open(database_url)
    assert await db.read(keys) == []
    await db.close()


async def test_migrations_end_at_the_tables_of_the_code(database: Database) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext

    def differences(conn: Connection) -> list[object]:
        context = MigrationContext.configure(conn, opts={"compare_type": True})
        return list(compare_metadata(context, metadata))

    assert await database.read(differences) == []


def test_the_known_revisions_are_those_of_the_scripts() -> None:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    import coordinator.database.migrations as package

    config = Config()
    config.set_main_option("script_location", str(Path(package.__file__).parent))
    scripts = ScriptDirectory.from_config(config)
    assert [script.revision for script in scripts.walk_revisions()][::-1] == list(REVISIONS)


def test_no_revision_follows_the_code() -> None:
    """A revision that imports today's tables makes other databases tomorrow; the first one may do
    so until the first release.
    """
    import coordinator.database.migrations as package

    for path in (Path(package.__file__).parent / "versions").glob("r*.py"):
        if path.stem == "r0001_tables":
            continue
        assert "coordinator.database.tables" not in path.read_text(), path.name


async def test_a_newer_database_is_left_alone(database_url: str) -> None:
    db = await Database.open(database_url)
    await db.write(
        lambda conn: conn.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    )
    await db.close()
    with pytest.raises(Configuration, match="newer version"):
        await Database.open(database_url)
    with pytest.raises(Configuration, match="newer version"):
        await migrate(database_url)


async def test_an_older_database_is_only_changed_by_migrate(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "REVISIONS", (*REVISIONS, "9999"))
    with pytest.raises(Configuration, match="older schema"):
        await Database.open(database_url)
