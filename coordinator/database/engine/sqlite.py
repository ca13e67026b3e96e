"""SQLite behind one writing thread and a few reading ones.

Functions that wait while the disk is busy are joined into one commit, each in its own savepoint: a
function that fails does not affect the others, and no function is answered before the commit is on
the disk.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from sqlalchemy import Connection, Engine, Transaction, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool, QueuePool

from shared.errors import Configuration, StorageFull, Unavailable

if TYPE_CHECKING:
    from shared.clock import SystemClock

T = TypeVar("T")

READERS = 4
WRITE = "BEGIN IMMEDIATE"  # begins a transaction that writes
JOINED_MAX = 256  # functions in one commit
JOINED_S = 0.02  # a commit takes the functions that start within this time
QUEUED_MAX = 10_000
BUSY_MS = 30_000
CLOCK_S = 10.0  # interval of storing the clock's lower bound, which outlives a restart
PEEK_S = 0.25  # interval of checking for another process's commits

FAILED_RETRY_S = 60.0  # clients retry after this long, since only the organiser can mend the cause

CLOCK_KEY = "clock"

log = structlog.get_logger("database")


def engine(path: Path, *, readers: int = 0) -> Engine:
    """Return an engine whose driver begins no transaction by itself: `transaction` does."""
    created = create_engine(
        f"sqlite:///{path}",
        connect_args={
            "isolation_level": None,
            "check_same_thread": False,
            "timeout": BUSY_MS / 1000,
            "cached_statements": 512,
        },
        **(
            {"poolclass": QueuePool, "pool_size": readers, "max_overflow": 0}
            if readers
            else {"poolclass": NullPool}
        ),
    )

    @event.listens_for(created, "connect")
    def _prepare(connection: sqlite3.Connection, record: object) -> None:
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            "journal_size_limit=67108864",
            "cache_size=-32768",
            # the folder of temporary files may be full when a transaction is undone
            "temp_store=MEMORY",
            *(["query_only=ON"] if readers else []),
        ):
            connection.execute(f"PRAGMA {pragma}").close()

    return created


@contextmanager
def transaction(connection: Connection, begin: str) -> Iterator[Transaction]:
    """Open a transaction that starts with `begin`.

    An event listener could begin the transaction too, but an engine with any listener looks for
    listeners at each statement, which takes a sixth of the statement's time.
    """
    driver: Any = connection.connection.driver_connection
    with connection.begin() as opened:
        driver.execute(begin).close()  # the same through SQLAlchemy takes ten times as long
        yield opened


def prepare_file(path: Path) -> None:
    """Make the database file and its directory, for their owner only. Raises Configuration."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise Configuration(f"the database {path} cannot be opened: {error.strerror}") from error


def translate(error: BaseException) -> BaseException:
    """Return a SQLite failure as a VolunteerError; an unknown failure is returned as it is."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    name = getattr(cause, "sqlite_errorname", "") or ""
    # SHMSIZE: the index of the write-ahead log, a file next to the database, cannot grow
    if name in ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"):
        return StorageFull("no space is left for the database: free some; work then continues")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return Unavailable("the database is held by another program", retry_after_s=5)
    if name.startswith("SQLITE_IOERR"):
        return Unavailable(f"the disk of the database failed ({name}): look at it, then restart")
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return Configuration(
            "the database file is damaged, or no database at all: name the right one, or restore a"
            " backup with `coordinator restore FOLDER`"
        )
    return error


@dataclass(slots=True, eq=False)
class _WriteJob:
    fn: Callable[[Connection], object]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    result: object = None
    error: BaseException | None = None

    def run(self, connection: Connection) -> None:
        try:
            self.result = self.fn(connection)
        except Exception as error:
            self.error = error

    def deliver(self) -> None:
        if self.future.done():  # the caller was cancelled
            return
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


class SqliteRunner:
    """Runs functions of a connection. Made and closed by `Database`."""

    def __init__(self, path: Path, clock: SystemClock | None) -> None:
        self._path = path
        self._clock = clock
        self._highest = 0.0  # lower bound of the clock, so that instants only rise
        self._stored = 0.0
        self._writer = engine(path)
        self._reading = engine(path, readers=READERS)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="db-read")
        self._of_thread = threading.local()
        self._reader_connections: list[Connection] = []
        self._jobs: queue.Queue[_WriteJob | None] = queue.Queue(QUEUED_MAX)
        self.failed = ""  # reason why writes are refused
        self._file = _identity(path)
        self._closing = False
        self._changed: Callable[[], None] | None = None
        # SQLite's data version at the last look; None, on a new connection, counts as a change.
        self._version: int | None = None
        self._peeked = 0.0
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._loop, name="db-write", daemon=True)
        self._thread.start()

    async def write(self, fn: Callable[[Connection], T]) -> T:
        if self.failed:
            raise Unavailable(self.failed, retry_after_s=FAILED_RETRY_S)
        if self._closing:
            raise Unavailable("the coordinator is shutting down")
        self._keep_clock()
        loop = asyncio.get_running_loop()
        job = _WriteJob(fn, loop, loop.create_future())
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise Unavailable("too many writes are waiting", retry_after_s=2) from None
        return await job.future  # type: ignore[no-any-return]

    async def read(self, fn: Callable[[Connection], T]) -> T:
        if self._closing:
            raise Unavailable("the coordinator is shutting down")

        def run() -> T:
            self._check_file()  # an old reader would continue with the deleted file
            connection = self._reader()
            with transaction(connection, "BEGIN"):
                return fn(connection)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, run)
        except (DBAPIError, sqlite3.Error) as error:
            self._fail_if_unreliable(error)
            if self.failed:  # this server reads no more; a restarted one does
                raise Unavailable(self.failed, retry_after_s=FAILED_RETRY_S) from error
            raise translate(error) from error

    def _fail_if_unreliable(self, error: BaseException) -> None:
        """Refuse further writes after a failure that makes the file unreliable."""
        name = str(getattr(getattr(error, "orig", error), "sqlite_errorname", ""))
        lost = name.startswith(("SQLITE_IOERR", "SQLITE_CORRUPT", "SQLITE_NOTADB"))
        if lost and name != "SQLITE_IOERR_SHMSIZE":
            self._fail(str(translate(error)))

    def _fail(self, message: str) -> None:
        if not self.failed:
            self.failed = message
            log.error("the database failed", path=str(self._path), error=message)

    def _check_file(self) -> None:
        """Raise Unavailable if the database file was removed or replaced: later writes would be
        lost.

        Compares the inode of the file in 2 us, before each read and before each commit is
        acknowledged.
        """
        identity = _identity(self._path)
        if self._file is None:
            self._file = identity
        if identity is None or identity != self._file:
            self._fail(
                f"the database file {self._path} was removed or replaced while this server had it "
                "open: stop the server, then put it back or restore a backup (the server leaves "
                f"the newest transactions of the old one in {_log_aside(self._path).name})"
            )
            raise Unavailable(self.failed, retry_after_s=FAILED_RETRY_S)

    def _reader(self) -> Connection:
        """Return this thread's own connection, since taking one from a pool takes longer than a
        short read.
        """
        connection: Connection | None = getattr(self._of_thread, "connection", None)
        if connection is None or connection.invalidated:
            connection = self._of_thread.connection = self._reading.connect()
            self._reader_connections.append(connection)
        return connection

    async def bridge(self, deliver: Callable[[str | None], None]) -> Callable[[str], None]:
        loop = asyncio.get_running_loop()
        self._changed = lambda: _call(loop, deliver, None)
        return lambda topic: None  # other processes see the commits themselves

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._jobs.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._readers.shutdown(wait=True)
        for connection in self._reader_connections:
            connection.close()
        self._reading.dispose()
        self._writer.dispose()
        if self._file is not None and _identity(self._path) != self._file:
            _set_log_aside(self._path)

    # --- the clock ---

    def rise_to(self, instant: float) -> None:
        """Raise the clock's lower bound to an instant that is already stored."""
        self._highest = max(self._highest, instant)
        self._keep_clock()

    def _keep_clock(self) -> None:
        if self._clock is None:
            return
        now = self._clock.now()
        if now < self._highest:
            self._clock.offset_s += self._highest - now
        else:
            self._highest = now

    def _store_clock(self, connection: Connection, interval_s: float = CLOCK_S) -> None:
        if self._clock is None or self._highest < self._stored + interval_s:
            return
        self._stored = self._highest
        connection.exec_driver_sql(
            "INSERT INTO meta (key, value) VALUES (?, ?) "
            "ON CONFLICT (key) DO UPDATE SET value = excluded.value "
            "WHERE CAST(value AS REAL) < CAST(excluded.value AS REAL)",
            (CLOCK_KEY, repr(self._stored)),
        )

    # --- the writer's thread ---

    def _loop(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=PEEK_S)
            except queue.Empty:
                self._peek()
                continue
            if job is None:
                break
            done: list[_WriteJob] = []
            try:
                self._commit(job, done)
            except BaseException as error:
                self._abandon(error, done)
            _deliver(done)
            self._peek()
        self._drain()

    def _drain(self) -> None:
        """Refuse the queued jobs, store the clock, close the file."""
        refused: list[_WriteJob] = []
        while not self._jobs.empty():
            job = self._jobs.get_nowait()
            if job is not None:
                job.error = Unavailable("the coordinator is shutting down")
                refused.append(job)
        _deliver(refused)
        if self._connection is not None:
            if not self.failed:
                self._keep_clock()
                # after a failure the stored instant is up to `CLOCK_S` old, as after a kill
                with (
                    suppress(DBAPIError, sqlite3.Error),
                    transaction(self._connection, WRITE),
                ):
                    self._store_clock(self._connection, 0.0)
            self._connection.close()
            self._connection = None

    def _open(self) -> Connection:
        if self._connection is None:
            if self._file is not None:
                self._check_file()  # connecting would make a new file
            self._connection = self._writer.connect()
            self._check_file()
        return self._connection

    def _commit(self, first: _WriteJob, done: list[_WriteJob]) -> None:
        """Run `first` and the jobs queued behind it in one transaction."""
        done.append(first)
        connection = self._open()
        if self._jobs.empty():
            with transaction(connection, WRITE) as opened:
                first.run(connection)
                if first.error is None:
                    self._store_clock(connection)
                else:
                    opened.rollback()
        else:
            with transaction(connection, WRITE):
                self._run_joined(connection, done)
                self._store_clock(connection)
        self._check_file()
        for job in done:
            if isinstance(job.error, DBAPIError):
                self._fail_if_unreliable(job.error)
                job.error = translate(job.error)

    def _run_joined(self, connection: Connection, done: list[_WriteJob]) -> None:
        until = time.monotonic() + JOINED_S
        driver: Any = connection.connection.driver_connection
        job: _WriteJob | None = done[0]
        while job is not None:
            driver.execute("SAVEPOINT job").close()
            job.run(connection)
            if job.error is not None:
                # SQLite has undone the transaction itself, e.g. on a full disk
                if not _in_transaction(connection):
                    raise job.error
                driver.execute("ROLLBACK TO job").close()
            driver.execute("RELEASE job").close()
            job = None
            if len(done) < JOINED_MAX and time.monotonic() < until:
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if job is None:  # close() has ended the queue
                    self._jobs.put(None)
                    break
                done.append(job)

    def _abandon(self, error: BaseException, done: list[_WriteJob]) -> None:
        """Fail all jobs of a lost transaction, without retrying them."""
        failure = translate(error)
        self._fail_if_unreliable(error)  # after a failed fsync the content of the disk is unknown
        for job in done:
            job.result, job.error = None, failure
        if self._connection is not None:
            self._connection.invalidate()
            self._connection.close()
            self._connection = None
            self._version = None

    def _peek(self) -> None:
        """Notify of commits by other processes, which change SQLite's data version."""
        now = time.monotonic()
        if self._changed is None or now < self._peeked + PEEK_S:
            return
        self._peeked = now
        try:
            self._check_file()
            version = _data_version(self._open())
        except (DBAPIError, sqlite3.Error, Unavailable):
            return  # the next write meets the same failure and reports it
        if version != self._version:
            self._changed()
        self._version = version


def _log_aside(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal.removed")


def _set_log_aside(path: Path) -> None:
    """Move the log of a removed file aside: SQLite would replay the log into a file that takes the
    place of the removed one, and damage it.
    """
    with suppress(OSError):
        path.with_name(f"{path.name}-wal").replace(_log_aside(path))


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file; None if it is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _data_version(connection: Connection) -> int:
    """Return SQLite's count of the commits that other connections made."""
    driver: Any = connection.connection.driver_connection
    return int(driver.execute("PRAGMA data_version").fetchone()[0])


def _in_transaction(connection: Connection) -> bool:
    driver: Any = connection.connection.driver_connection
    return bool(driver.in_transaction)


def _call(loop: asyncio.AbstractEventLoop, fn: Callable[..., None], *values: object) -> None:
    try:
        loop.call_soon_threadsafe(fn, *values)
    except RuntimeError:
        pass  # the event loop has ended, and nobody waits for the result


def _deliver(done: list[_WriteJob]) -> None:
    loops = {job.loop for job in done}
    for loop in loops:
        _call(loop, _deliver_all, [job for job in done if job.loop is loop])


def _deliver_all(jobs: list[_WriteJob]) -> None:
    for job in jobs:
        job.deliver()
