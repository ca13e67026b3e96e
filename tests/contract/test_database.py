"""The promises of `Database`, the same on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, Executable, delete, func, insert, select, text, update
from sqlalchemy.exc import DBAPIError

from coordinator.signals import Signals
from coordinator.store import sqlite
from coordinator.store.database import Database, migrate, parse
from coordinator.store.ledger_tables import accounts, audit, events, meta, metadata, postings
from coordinator.store.lock import DirectoryLock
from coordinator.store.migrations import REVISIONS
from coordinator.store.tables import versions
from shared.clock import SystemClock, VirtualClock
from shared.errors import Configuration, Conflict, StorageFull, Unavailable
from tests.databases import Postgres


def put(conn: Connection, key: str, value: str = "") -> None:
    conn.execute(insert(meta).values(key=key, value=value))


def putting(key: object, value: str = "") -> Callable[[Connection], None]:
    return lambda conn: put(conn, str(key), value)


def keys(conn: Connection) -> list[str]:
    return list(conn.execute(select(meta.c.key).order_by(meta.c.key)).scalars())


async def test_what_was_written_is_read_back_and_what_failed_is_not(database: Database) -> None:
    def fail(conn: Connection) -> None:
        put(conn, "lost")
        raise Conflict("no")

    await database.write(putting("kept"))
    with pytest.raises(Conflict):
        await database.write(fail)
    assert await database.read(keys) == ["kept"]


async def test_joined_writes_fail_one_by_one(database: Database) -> None:
    async def one(index: int) -> None:
        def write(conn: Connection) -> None:
            put(conn, f"{index:03}")
            if index % 3 == 0:
                raise Conflict(str(index))

        await database.write(write)

    outcomes = await asyncio.gather(*(one(i) for i in range(90)), return_exceptions=True)
    assert [i for i, outcome in enumerate(outcomes) if outcome] == list(range(0, 90, 3))
    kept = [f"{i:03}" for i in range(90) if i % 3]
    assert await database.read(keys) == kept


async def test_a_counter_raised_by_many_at_once_loses_nothing(database: Database) -> None:
    def raise_by_one(conn: Connection) -> None:
        query = select(meta.c.value).where(meta.c.key == "n").with_for_update()
        value = int(conn.execute(query).scalar_one())
        conn.execute(update(meta).where(meta.c.key == "n").values(value=str(value + 1)))

    await database.write(putting("n", "0"))
    await asyncio.gather(*(database.write(raise_by_one) for _ in range(100)))
    assert (
        await database.read(lambda conn: conn.execute(select(meta.c.value)).scalar_one()) == "100"
    )


async def test_lost_races_are_run_again(database: Database) -> None:
    """Two transactions that lock two rows in opposite order: on PostgreSQL one of them is a deadlock's victim."""

    def both(first: str, second: str) -> None:
        def move(conn: Connection) -> None:
            for key in (first, second):
                value = conn.execute(
                    select(meta.c.value).where(meta.c.key == key).with_for_update()
                ).scalar_one()
                conn.execute(update(meta).where(meta.c.key == key).values(value=value + "x"))

        jobs.append(database.write(move))

    jobs: list[Coroutine[object, object, None]] = []
    await database.write(putting("a"))
    await database.write(putting("b"))
    for _ in range(3):
        both("a", "b")
        both("b", "a")
    await asyncio.gather(*jobs)
    found = await database.read(lambda conn: conn.execute(select(meta.c.value)).scalars().all())
    assert found == ["x" * 6, "x" * 6]


async def test_a_view_is_consistent_and_cannot_write(database: Database) -> None:
    with pytest.raises(DBAPIError):
        await database.read(putting("sneaked in"))
    assert await database.read(keys) == []


async def test_closed_means_closed(database_url: str) -> None:
    db = await Database.open(database_url)
    waiting = [asyncio.ensure_future(db.write(putting(i))) for i in range(20)]
    await asyncio.sleep(0)
    await db.close()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    with pytest.raises(Unavailable):
        await db.write(putting("late"))
    again = await Database.open(database_url)
    kept = await again.read(keys)
    await again.close()
    assert sorted(str(i) for i, o in enumerate(outcomes) if o is None) == kept


# --- rows that never change ---


def run(conn: Connection, statement: Executable) -> None:
    conn.execute(statement)


def _event(conn: Connection) -> None:
    values = {"key": "k", "digest": "d", "kind": "earn", "memo": "", "at": 1.0}
    conn.execute(insert(events).values(**values, run_id=None, contribution_id=None, chain=None))
    conn.execute(insert(accounts).values(owner="system", kind="mint", balance_micro=-5))
    event = conn.execute(select(events.c.id)).scalar_one()
    account = conn.execute(select(accounts.c.id)).scalar_one()
    conn.execute(insert(postings).values(event_id=event, account_id=account, amount_micro=5))
    conn.execute(
        insert(audit).values(at=1.0, actor="a", action="b", subject="c", detail="d", chain=None)
    )


@pytest.mark.parametrize(
    "statement",
    [
        update(postings).values(amount_micro=6),
        delete(postings),
        update(events).values(memo="other"),
        update(events).values(chain="x", memo="other"),
        update(events).values(chain=None),
        delete(events),
        update(audit).values(detail="other"),
        delete(audit),
    ],
    ids=str,
)
async def test_history_cannot_be_rewritten(database: Database, statement: Executable) -> None:
    await database.write(_event)
    with pytest.raises(DBAPIError, match="never change"):
        await database.write(partial(run, statement=statement))


async def test_the_chain_is_sealed_once(database: Database) -> None:
    await database.write(_event)
    for seal in (update(events), update(audit)):
        await database.write(partial(run, statement=seal.values(chain="sealed")))
        with pytest.raises(DBAPIError, match="never change"):
            await database.write(partial(run, statement=seal.values(chain="again")))


async def test_no_trigger_is_missing(database: Database) -> None:
    """Versions need a run to exist, so their triggers are looked up instead of tried."""
    catalogue = {
        "sqlite": "SELECT name FROM sqlite_master WHERE type = 'trigger'",
        "postgresql": "SELECT DISTINCT trigger_name FROM information_schema.triggers",
    }[database.dialect]
    found = await database.read(lambda conn: set(conn.execute(text(catalogue)).scalars()))
    wanted = {
        f"{table}_no_{change}"
        for table in ("postings", "versions", "events", "audit")
        for change in ("update", "delete")
    }
    assert wanted <= found
    assert versions.name in metadata.tables


# --- migrations ---


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

    import coordinator.store.migrations as package

    config = Config()
    config.set_main_option("script_location", str(Path(package.__file__).parent))
    scripts = ScriptDirectory.from_config(config)
    assert [script.revision for script in scripts.walk_revisions()][::-1] == list(REVISIONS)


def test_only_a_lone_first_revision_may_follow_the_code() -> None:
    """Otherwise a new database gets the newest tables from revision 1 and then fails on revision 2."""
    import coordinator.store.migrations as package

    [first] = (Path(package.__file__).parent / "versions").glob("r0001_*.py")
    follows = "create_all" in first.read_text()
    assert len(REVISIONS) == 1 or not follows, (
        "write revision 0001 out first: let alembic autogenerate it against an empty database"
    )


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


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nonsense", "no database address"),
        ("mysql://a/b", "not supported"),
        ("sqlite://", "needs a file"),
        ("sqlite:////nonexistent/volunteer.db", "coordinator migrate"),
    ],
)
async def test_a_wrong_address_gets_a_sentence(url: str, says: str) -> None:
    with pytest.raises(Configuration, match=says) as caught:
        await Database.open(url)
    assert caught.value.exit_code == 78


def test_addresses_as_they_are_handed_around_are_understood() -> None:
    url = parse("postgres://me:secret@db.example/volunteer?sslmode=require")
    assert url.drivername == "postgresql+asyncpg"
    assert dict(url.query) == {"ssl": "require"}


async def test_an_unreachable_server_is_told(postgres: Postgres) -> None:
    with pytest.raises(Unavailable, match="cannot be reached"):
        await Database.open("postgresql://tester@/x?host=/nonexistent")
    with pytest.raises(Configuration, match="does not exist"):
        await Database.open(postgres.url("nowhere"))
    with pytest.raises(Configuration, match="coordinator migrate"):
        await Database.open(postgres.url("postgres"))


# --- PostgreSQL alone ---


async def test_a_lost_connection_is_replaced(postgres: Postgres) -> None:
    url = await postgres.fresh()
    db = await Database.open(url)
    await db.write(putting("before"))
    await postgres.admin(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
        "AND backend_type = 'client backend'"
    )
    await db.write(putting("after"))
    assert await db.read(keys) == ["after", "before"]
    await db.close()
    await postgres.recycle(url)


async def test_the_clock_follows_postgresql(postgres: Postgres) -> None:
    url = await postgres.fresh()
    clock = SystemClock()
    clock.offset_s = 5000.0
    db = await Database.open(url, clock=clock)
    theirs = await db.read(
        lambda conn: float(
            conn.execute(select(func.extract("epoch", func.clock_timestamp()))).scalar_one()
        )
    )
    assert abs(clock.now() - theirs) < 2
    await db.close()
    await postgres.recycle(url)


# --- SQLite alone ---


@pytest.fixture
def file(tmp_path: Path, sqlite_template: Path) -> Path:
    path = tmp_path / "data" / "volunteer.db"
    path.parent.mkdir()
    path.write_bytes(sqlite_template.read_bytes())
    return path


async def test_the_clock_never_falls_below_what_is_stored(file: Path) -> None:
    ahead = SystemClock()
    ahead.offset_s = 100_000.0
    db = await Database.open(f"sqlite:///{file}", clock=ahead)
    await db.write(putting("x"))
    ahead.offset_s = 0.0  # somebody sets the machine's clock back
    highest = time.time() + 99_000
    await db.write(putting("y"))
    assert ahead.now() > highest
    await db.close()
    fresh = SystemClock()
    db = await Database.open(f"sqlite:///{file}", clock=fresh)
    assert fresh.now() > highest
    await db.close()


async def test_a_second_server_is_refused(file: Path) -> None:
    url = f"sqlite:///{file}"
    first = await Database.open(url, exclusive=True)
    with pytest.raises(Configuration, match=f"process {os.getpid()}") as caught:
        await Database.open(url, exclusive=True)
    assert caught.value.exit_code == 78
    command = await Database.open(url)  # the organiser's commands work beside the server
    await command.write(putting("from a command"))
    await command.close()
    await first.close()
    again = await Database.open(url, exclusive=True)
    assert await again.read(keys) == ["from a command"]
    await again.close()


def test_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from coordinator.store.lock import DirectoryLock\n"
        "DirectoryLock.take(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(Configuration, match=f"process {process.pid}"):
        DirectoryLock.take(tmp_path)
    process.kill()
    process.communicate()
    DirectoryLock.take(tmp_path).release()


async def test_the_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "volunteer.db"
    await migrate(f"sqlite:///{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_a_full_disk_fails_the_writes_and_mends_itself(file: Path) -> None:
    db = await Database.open(f"sqlite:///{file}")
    pages = await db.write(lambda conn: int(conn.execute(text("PRAGMA page_count")).scalar_one()))
    await db.write(lambda conn: conn.execute(text(f"PRAGMA max_page_count = {pages + 2}")))
    outcomes = await asyncio.gather(
        *(db.write(putting(i, "x" * 2000)) for i in range(20)),
        return_exceptions=True,
    )
    assert any(isinstance(outcome, StorageFull) for outcome in outcomes)
    acknowledged = sorted(str(i) for i, outcome in enumerate(outcomes) if outcome is None)
    assert await db.read(keys) == acknowledged
    await db.write(lambda conn: conn.execute(text(f"PRAGMA max_page_count = {pages + 100}")))
    await db.write(lambda conn: put(conn, "room again", "x" * 2000))
    await db.close()


async def test_after_a_failed_commit_nothing_is_believed(file: Path) -> None:
    """The disk fails while others wait for the same commit: all are told, and nothing is written any more."""
    db = await Database.open(f"sqlite:///{file}")

    def broken(conn: Connection) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorname = "SQLITE_IOERR_FSYNC"
        conn.rollback()  # what SQLite does by itself
        raise DBAPIError("COMMIT", None, error)

    jobs = [db.write(putting(i)) for i in range(5)]
    outcomes = await asyncio.gather(
        db.write(lambda conn: None), *jobs, db.write(broken), return_exceptions=True
    )
    assert isinstance(outcomes[-1], Unavailable)
    with pytest.raises(Unavailable, match="look at it"):
        await db.write(putting("later"))
    acknowledged = sorted(str(i) for i, outcome in enumerate(outcomes[1:-1]) if outcome is None)
    assert await db.read(keys) == acknowledged
    await db.close()


async def test_durable_means_full_synchronous(file: Path) -> None:
    db = await Database.open(f"sqlite:///{file}")
    settings = await db.write(
        lambda conn: [
            conn.execute(text(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        ]
    )
    assert settings == ["wal", 2, 1]
    assert sqlite.READERS >= 2
    await db.close()


# --- signals ---


async def test_a_watch_misses_nothing() -> None:
    signals = Signals(VirtualClock())
    watch = signals.watch("queue", "run:1")
    signals.notify("run:2")
    signals.notify("run:1")
    assert await watch.wait(10)
    assert not await watch.wait(0)


async def test_a_watch_gives_up_when_time_is_up() -> None:
    clock = VirtualClock()
    signals = Signals(clock)
    waiting = asyncio.ensure_future(signals.watch("queue").wait(30))
    await clock.advance(0)  # it begins to wait
    await clock.advance(29)
    assert not waiting.done()
    await clock.advance(2)
    assert await waiting is False


async def test_other_processes_are_heard(database_url: str) -> None:
    """Two databases of one address stand for two processes: what one commits and tells wakes the other."""
    here, there = await Database.open(database_url), await Database.open(database_url)
    listening, telling = Signals(), Signals()
    await listening.connect(here)
    await telling.connect(there)
    watch = listening.watch("run:7")
    await here.write(putting("own commits wake nobody here"))
    await there.write(putting("x"))
    telling.notify("run:7")
    assert await watch.wait(10)
    await here.close()
    await there.close()
