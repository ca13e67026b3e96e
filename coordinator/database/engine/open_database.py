"""Database on SQLite or PostgreSQL: each `write` is one transaction, each `read` sees one
consistent view.

Functions of this package take a connection; a runner for each database runs them (`sqlite.py`,
`postgres.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import structlog
from sqlalchemy import Connection, inspect, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from coordinator.database.engine import postgres, sqlite
from coordinator.database.engine.server_lock import DirectoryLock
from coordinator.database.migrations.upgrade import REVISIONS, upgrade
from coordinator.database.tables.contributions import verdicts
from coordinator.database.tables.ledger import events
from coordinator.database.tables.record import meta, record_lines
from coordinator.traffic import Durations
from shared.errors import Configuration
from shared.text import duration, printable

if TYPE_CHECKING:
    from shared.clock import SystemClock

T = TypeVar("T")

Dialect = Literal["sqlite", "postgresql"]
AHEAD_S = 300.0  # a stored instant that is more than this ahead of the machine's clock is reported
MIGRATION_LOCK = 0x766F6C75  # arbitrary number of the lock under which a process migrates


log = structlog.get_logger("database")


class Runner(Protocol):
    """Interface of a database engine. With `failed`, a reason, it refuses every write."""

    failed: str

    async def write(self, fn: Callable[[Connection], T]) -> T: ...

    async def read(self, fn: Callable[[Connection], T]) -> T: ...

    async def bridge(self, deliver: Callable[[str | None], None]) -> Callable[[str], None]: ...

    async def close(self) -> None: ...


class Database:
    """Open database. Made by `open`."""

    def __init__(self, runner: Runner, dialect: Dialect, lock: DirectoryLock | None = None) -> None:
        self._runner = runner
        self._lock = lock
        self.dialect: Dialect = dialect
        # Times of transactions, with the wait for a turn.
        self.reads, self.writes = Durations(), Durations()

    @staticmethod
    async def open(
        url: str, *, clock: SystemClock | None = None, exclusive: bool = False
    ) -> Database:
        """Open a migrated database; `exclusive` also locks the directory of an SQLite file, for a
        server.

        `clock` then follows PostgreSQL's clock, or never falls below the newest instant in SQLite.
        Raises Configuration for a wrong address, a database without tables or of another version,
        or a directory that another server holds; Unavailable if PostgreSQL cannot be reached.
        """
        target = parse(url)
        if target.get_backend_name() == "sqlite":
            return await _open_sqlite(_path(target), clock, exclusive)
        runner = postgres.PostgresRunner(target.render_as_string(hide_password=False), clock)
        try:
            await runner.read(check_revision)
            await runner.start()
        except BaseException:
            await runner.close()
            raise
        return Database(runner, "postgresql")

    @property
    def failed(self) -> str:
        """Return the reason why writes are impossible; "" while they are possible."""
        return self._runner.failed

    async def check_schema(self) -> None:
        """Refuse every write from now on if another version has migrated the database meanwhile.

        Raises Configuration for the schema of another version, or without tables.
        """
        try:
            await self.read(check_revision)
        except Configuration as error:
            if await self.read(revision) is not None and not self.failed:
                self._runner.failed = error.message
                log.error("the database failed", error=error.message)
            raise

    async def write(self, fn: Callable[[Connection], T]) -> T:
        """Run `fn` in one transaction, durable on return. PostgreSQL may run `fn` several times."""
        with self.writes.timed():
            return await self._runner.write(fn)

    async def read(self, fn: Callable[[Connection], T]) -> T:
        """Run `fn` on one consistent view of the data; it cannot write."""
        with self.reads.timed():
            return await self._runner.read(fn)

    async def bridge(self, deliver: Callable[[str | None], None]) -> Callable[[str], None]:
        """Receive notifications of other processes: `deliver` gets a topic, or None if any topic
        may have changed.

        Return the function that notifies the other processes. `Signals.connect` calls this.
        """
        return await self._runner.bridge(deliver)

    async def close(self) -> None:
        """Finish the queued writes and release the database."""
        await self._runner.close()
        if self._lock is not None:
            self._lock.release()


async def _open_sqlite(path: Path, clock: SystemClock | None, exclusive: bool) -> Database:
    _check_file(path)
    lock = DirectoryLock.take(path.parent) if exclusive else None
    runner = sqlite.SqliteRunner(path, clock)
    try:
        await runner.read(check_revision)
        newest = await runner.read(highest_instant)
        if newest > time.time() + AHEAD_S:
            log.warning(
                "the newest stored time is later than this machine's clock, and no time advances "
                "until the clock reaches it; was the clock ahead once, or is it behind now?",
                ahead=duration(newest - time.time()),
            )
        runner.rise_to(newest)
    except BaseException:
        await runner.close()
        if lock is not None:
            lock.release()
        raise
    return Database(runner, "sqlite", lock)


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise Configuration(f"there is no database {path}: make it with `coordinator migrate`")


def highest_instant(connection: Connection) -> float:
    """Return the newest instant in the database, from the rows that are written last."""
    clock_text = connection.execute(
        select(meta.c.value).where(meta.c.key == sqlite.CLOCK_KEY)
    ).scalar()
    instants = [float(clock_text or 0.0)]
    for table in (events, record_lines, verdicts):
        newest = select(table.c.at).order_by(table.c.id.desc()).limit(1)
        instants.append(float(connection.execute(newest).scalar() or 0.0))
    return max(instants)


def parse(url: str) -> URL:
    """Return the address of a database, with the driver filled in. Raises Configuration."""
    try:
        target = make_url(url)
        backend = target.get_backend_name()
    except (ArgumentError, ValueError) as error:
        raise Configuration(
            "this is not a database address: write sqlite:///path/to/file.db "
            "or postgresql://user@host/name"
        ) from error
    if backend == "sqlite":
        if not target.database or target.database == ":memory:":
            raise Configuration("an SQLite database needs a file: sqlite:///path/to/file.db")
        return target.set(drivername="sqlite")
    if backend in ("postgresql", "postgres"):
        # asyncpg calls the setting "ssl"
        query = {{"sslmode": "ssl"}.get(key, key): value for key, value in target.query.items()}
        for key in query.keys() - postgres.PARAMETERS:
            raise Configuration(f'a database address has no parameter "{printable(key, 40)}"')
        return target.set(drivername="postgresql+asyncpg", query=query)
    raise Configuration(f'"{backend}" is not supported: use sqlite or postgresql')


def _path(target: URL) -> Path:
    return Path(str(target.database)).absolute()


def revision(connection: Connection) -> str | None:
    """Return the revision of the database's schema, or None without tables."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def check_revision(connection: Connection) -> None:
    """Raise Configuration unless the schema is this program's."""
    revision_found = revision(connection)
    if revision_found == REVISIONS[-1]:
        return
    if revision_found is None:
        raise Configuration("the database has no tables yet: run `coordinator migrate`")
    if revision_found in REVISIONS:
        raise Configuration("the database has an older schema: run `coordinator migrate`")
    raise Configuration(
        f"the database was written by a newer version (revision {revision_found}): "
        "start the version that wrote it; nothing was changed"
    )


def identity(connection: Connection) -> str:
    """Return the mark that a copy of this database does not share; "" for an SQLite file, which may
    move.
    """
    if connection.dialect.name == "sqlite":
        return ""
    query = "SELECT system_identifier::text || '/' || current_database() FROM pg_control_system()"
    return str(connection.execute(text(query)).scalar_one())


async def is_new(url: str) -> bool:
    """Return True if a database has no tables. A server makes missing tables; tables of an older
    version need `migrate`.
    """
    file = file_of(url)
    if file is not None and (not file.is_file() or not file.stat().st_size):
        return True
    return await _once(url, lambda connection: revision(connection) is None)


def file_of(url: str) -> Path | None:
    """Return the file of an SQLite database; None for a database of another kind."""
    target = parse(url)
    return _path(target) if target.get_backend_name() == "sqlite" else None


async def migrate(url: str) -> bool:
    """Upgrade a database to this version in one transaction, or create it. Return True if it was
    missing or empty.

    Raises Configuration, Unavailable or StorageFull.
    """
    if (file := file_of(url)) is not None:
        await asyncio.to_thread(sqlite.prepare_file, file)
    return await _once(url, _migrate, begin=sqlite.WRITE)


async def _once(url: str, work: Callable[[Connection], T], begin: str = "BEGIN") -> T:
    """Return the result of one transaction on a database that is not open; SQLite's starts with
    `begin`.
    """
    if (file := file_of(url)) is not None:
        return await asyncio.to_thread(_once_sqlite, file, work, begin)
    target = parse(url).render_as_string(hide_password=False)
    engine = postgres.engine(target, pool_size=1)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(postgres.check_session)
            return await connection.run_sync(work)
    except (OSError, DBAPIError) as error:
        raise postgres.translate(error) from error
    finally:
        await engine.dispose()


def _once_sqlite(path: Path, work: Callable[[Connection], T], begin: str) -> T:
    engine = sqlite.engine(path)
    try:
        with engine.connect() as connection, sqlite.transaction(connection, begin):
            return work(connection)
    except DBAPIError as error:
        raise sqlite.translate(error) from error
    finally:
        engine.dispose()


def _migrate(connection: Connection) -> bool:
    if connection.dialect.name == "postgresql":
        lock = text("SELECT pg_advisory_xact_lock(:key)").bindparams(key=MIGRATION_LOCK)
        connection.execute(lock)
    revision_found = revision(connection)
    if revision_found is not None and revision_found not in REVISIONS:
        check_revision(connection)
    if revision_found != REVISIONS[-1]:
        upgrade(connection)
    return revision_found is None
