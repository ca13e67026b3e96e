"""PostgreSQL through asyncpg: functions of a connection run inside `run_sync`, one transaction
each.

A transaction that lost a deadlock, a serialisation race or its connection is run again, so a
function must affect only its connection. A failed COMMIT is never repeated, since it may have
happened. Locks end with their transaction.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg
from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from shared.errors import Configuration, StorageFull, Unavailable, VolunteerError, why

if TYPE_CHECKING:
    from shared.clock import SystemClock

T = TypeVar("T")

POOL = 12
# concurrent writes: the rest of the pool is for reads, and for the connection that listens
WRITES = 9
TURN_S = 20.0  # longest wait for one of the WRITES places, and then for a connection
ATTEMPTS = 8
RETRY_S = 0.01  # base of the random wait before a retry; doubled each time
FAILED_RETRY_S = 60.0  # clients retry after this long, since only the organiser can mend the cause
CLOCK_S = 60.0  # interval of comparing the database's clock with this machine's
LISTEN_S = 30.0  # longest wait for the listening connection
ALIVE_S = 20.0  # interval of testing the listening connection
CHANNEL = "volunteer"
CLOSE_S = 30.0  # longest wait for running functions when closing
TOPICS_MAX = 10_000  # topics of one transaction; more are announced as `EVERYTHING`
EVERYTHING = ""  # announces that any topic may have changed
GATHER_S = 0.05  # time for which topics gather for one transaction

SERVER = {
    "application_name": "coordinator",
    "jit": "off",  # compiling such short statements takes longer than it saves
    "lock_timeout": "15s",
    "statement_timeout": "120s",
    # PostgreSQL ends the session of a frozen or vanished peer after this time and frees its row
    # locks.
    "idle_in_transaction_session_timeout": "5s",
    "tcp_user_timeout": "5s",
    "tcp_keepalives_idle": "5s",
    "tcp_keepalives_interval": "2s",
    "tcp_keepalives_count": "3",
}
# names of the parameters behind the "?" of an address
PARAMETERS = inspect.signature(asyncpg.connect).parameters.keys()
LONG_READ_IDLE_S = 120  # longest pause between statements of a transaction that reads all rows
POOLER = (
    "something between this server and PostgreSQL (PgBouncer in transaction mode?) does not pass "
    "on settings of a session: name PostgreSQL itself in --database"
)
CONNECTIONS = f"each server needs {POOL}, so raise max_connections, or run fewer servers"
RACES = frozenset({"40001", "40P01"})  # serialization_failure, deadlock_detected


def engine(url: str, **options: object) -> AsyncEngine:
    """Return an engine on asyncpg that reuses the last connection, with its prepared statements."""
    return create_async_engine(
        url,
        connect_args={"server_settings": SERVER, "timeout": 10, "command_timeout": 150},
        **{
            "pool_size": POOL,
            "max_overflow": 0,
            "pool_timeout": TURN_S,
            "pool_use_lifo": True,
            **options,
        },
    )


def allow_long_read(conn: Connection) -> None:
    """Raise the idle timeout for a long read, which holds no row lock."""
    if conn.dialect.name == "postgresql":
        conn.execute(text(f"SET LOCAL idle_in_transaction_session_timeout = '{LONG_READ_IDLE_S}s'"))


def check_session(conn: Connection) -> None:
    """Raise Configuration if the settings of a session do not arrive."""
    if conn.execute(text("SHOW lock_timeout")).scalar_one() != SERVER["lock_timeout"]:
        raise Configuration(POOLER)


def sqlstate(error: BaseException) -> str:
    """Return PostgreSQL's five-character code of an error, or ""."""
    return str(getattr(getattr(error, "orig", error), "sqlstate", None) or "")


def translate(error: BaseException) -> BaseException:
    """Return a PostgreSQL failure as a VolunteerError; an unknown failure is returned as it is."""
    code = sqlstate(error)
    if code in RACES or code == "55P03":
        return Unavailable("the database is busy with the same rows", retry_after_s=2)
    if code == "53300":
        return Unavailable(f"PostgreSQL takes no more connections: {CONNECTIONS}", retry_after_s=5)
    if code == "53100":
        return StorageFull("no space is left for the database: free some; work then continues")
    if code in ("26000", "42P05") or "unsupported startup parameter" in str(error):
        return Configuration(POOLER)
    if code in ("28P01", "28000", "3D000"):
        return Configuration(f"PostgreSQL refuses: {getattr(error, 'orig', error)}")
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    if lost or code.startswith(("08", "57P", "53")):
        return Unavailable("the database cannot be reached", retry_after_s=5)
    if isinstance(error, PoolTimeout):
        return Unavailable("every connection to the database is busy", retry_after_s=5)
    if isinstance(error, OSError | asyncpg.InterfaceError):
        return Unavailable(f"the database cannot be reached: {why(error)}", retry_after_s=5)
    return error


def _may_retry(error: BaseException) -> bool:
    """Return True if a failure before COMMIT left no trace: a lost race or connection."""
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    return lost or sqlstate(error) in RACES


class PostgresRunner:
    """Runs functions of a connection. Made and closed by `Database`."""

    failed = ""  # set for another version's schema, not for an unreachable server

    def __init__(self, url: str, clock: SystemClock | None) -> None:
        self._engine = engine(url)
        self._reading = self._engine.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )
        self._clock = clock
        self._name = secrets.token_hex(8)
        self._pending: dict[str, None] = {}
        self._send = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._running = 0  # functions that have a connection
        self._idle = asyncio.Event()
        self._idle.set()
        self._writes = asyncio.Semaphore(WRITES)

    async def start(self) -> None:
        """Compare the clocks at once, then every minute. Raises Configuration, Unavailable."""
        await self.read(check_session)
        if self._clock is None:
            return
        await self._compare_clocks(self._clock)
        self._tasks.append(asyncio.create_task(self._keep_clock(self._clock)))

    async def write(self, fn: Callable[[Connection], T]) -> T:
        if self.failed:
            raise Unavailable(self.failed, retry_after_s=FAILED_RETRY_S)
        if self._closing:
            raise Unavailable("the coordinator is shutting down")
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with self._counted():
                    async with self._turn():
                        return await self._once(fn)
            except _LostTransaction as lost:
                if attempt == ATTEMPTS:
                    raise translate(lost.error) from lost.error
                await asyncio.sleep(RETRY_S * 2**attempt * random.random())
        raise Unavailable("the database is busy", retry_after_s=2)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Track a running transaction so that `close` can wait for it."""
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Take one of the places for writers. Raises Unavailable."""
        try:
            async with asyncio.timeout(TURN_S):
                await self._writes.acquire()
        except TimeoutError as error:
            raise translate(PoolTimeout()) from error
        try:
            yield
        finally:
            self._writes.release()

    async def _once(self, fn: Callable[[Connection], T]) -> T:
        committing = False
        try:
            async with self._engine.connect() as connection:
                result = await connection.run_sync(_in_transaction(fn))
                committing = True
                await connection.commit()
                return result
        except (DBAPIError, PoolTimeout, OSError, asyncpg.InterfaceError) as error:
            if committing:
                raise Unavailable("the database did not confirm the commit") from error
            if _may_retry(error):
                raise _LostTransaction(error) from error
            raise translate(error) from error

    async def read(self, fn: Callable[[Connection], T]) -> T:
        if self._closing:
            raise Unavailable("the coordinator is shutting down")
        for attempt in (1, 2):
            try:
                with self._counted():
                    async with self._reading.connect() as connection:
                        return await connection.run_sync(fn)
            except (DBAPIError, PoolTimeout, OSError, asyncpg.InterfaceError) as error:
                if attempt == 2 or not _may_retry(error):
                    raise translate(error) from error
        raise Unavailable("the database cannot be reached", retry_after_s=5)

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await asyncio.wait_for(self._idle.wait(), CLOSE_S)
        except TimeoutError:
            pass  # the connections of functions that still run are dropped
        await self._engine.dispose()

    # --- the clock ---

    async def _compare_clocks(self, clock: SystemClock) -> None:
        """Set the clock's offset to the offset that the quickest of three round trips measured."""
        offsets: list[tuple[float, float]] = []

        def ask(connection: Connection) -> None:
            for _ in range(3):
                sent_at = time.time()
                epoch = connection.execute(select(func.extract("epoch", func.clock_timestamp())))
                server_time = float(epoch.scalar_one())
                trip_s = time.time() - sent_at
                offsets.append((trip_s, server_time - (sent_at + trip_s / 2)))

        await self.read(ask)
        clock.offset_s = min(offsets)[1]

    async def _keep_clock(self, clock: SystemClock) -> None:
        while True:
            await asyncio.sleep(CLOCK_S)
            try:
                await self._compare_clocks(clock)
            except Unavailable:
                pass  # the last offset is kept

    # --- other processes ---

    async def bridge(self, deliver: Callable[[str | None], None]) -> Callable[[str], None]:
        listening = asyncio.Event()

        def receive(connection: object, pid: int, channel: str, payload: str) -> None:
            sender, _, topic = payload.partition(" ")
            if sender != self._name:
                deliver(topic or None)

        def send(topic: str) -> None:
            self._pending[topic] = None
            if len(self._pending) > TOPICS_MAX:
                self._pending = {EVERYTHING: None}
            self._send.set()

        self._tasks.append(asyncio.create_task(self._listen(receive, deliver, listening)))
        self._tasks.append(asyncio.create_task(self._announce()))
        try:
            await asyncio.wait_for(listening.wait(), LISTEN_S)
        except TimeoutError:
            raise Unavailable("the database cannot be reached", retry_after_s=5) from None
        return send

    async def _announce(self) -> None:
        while True:
            await self._send.wait()
            await asyncio.sleep(GATHER_S)
            self._send.clear()
            topics, self._pending = self._pending, {}
            try:
                await self.write(
                    partial(_notify, topics=[f"{self._name} {topic}" for topic in topics])
                )
            except (VolunteerError, DBAPIError, OSError):
                await asyncio.sleep(1)
                self._pending = topics | self._pending
                self._send.set()

    async def _listen(
        self,
        receive: Callable[[object, int, str, str], None],
        deliver: Callable[[str | None], None],
        ready: asyncio.Event,
    ) -> None:
        """Receive notifications of other processes; after a lost connection, deliver None."""
        while True:
            try:
                async with self._engine.connect() as connection:
                    await self._listen_on(connection, receive, deliver, ready)
            except (
                DBAPIError,
                PoolTimeout,
                OSError,
                asyncpg.InterfaceError,
                asyncpg.PostgresError,
            ):
                await asyncio.sleep(1)

    async def _listen_on(
        self,
        connection: AsyncConnection,
        receive: Callable[[object, int, str, str], None],
        deliver: Callable[[str | None], None],
        ready: asyncio.Event,
    ) -> None:
        driver: Any = (await connection.get_raw_connection()).driver_connection
        await driver.add_listener(CHANNEL, receive)
        try:
            if ready.is_set():
                deliver(None)
            ready.set()
            while True:
                await asyncio.sleep(ALIVE_S)
                await driver.fetchval("SELECT 1", timeout=10)
        finally:
            if not driver.is_closed():
                await driver.remove_listener(CHANNEL, receive)


_NOTIFY = text("SELECT pg_notify(:channel, topic) FROM unnest(CAST(:topics AS text[])) AS topic")


def _notify(connection: Connection, topics: Sequence[str]) -> None:
    connection.execute(_NOTIFY, {"channel": CHANNEL, "topics": topics})


class _LostTransaction(Exception):
    """Transaction that did not commit and may be repeated."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _in_transaction(fn: Callable[[Connection], T]) -> Callable[[Connection], T]:
    def run(connection: Connection) -> T:
        connection.begin()
        return fn(connection)

    return run
