"""What only one of the two engines does: a server that goes away, a file that is locked, full or
lost.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import DBAPIError

from coordinator.database import key_values
from coordinator.database.engine import sqlite
from coordinator.database.engine.open_database import Database, is_new, migrate
from coordinator.database.engine.postgres import POOL, SERVER
from coordinator.database.engine.server_lock import LOCK_FILE, DirectoryLock
from shared.clock import SystemClock
from shared.errors import Configuration, StorageFull, Unavailable
from tests.support.databases import Postgres, _unprivileged, keys, put, putting


async def test_an_unreachable_server_is_told(postgres: Postgres) -> None:
    with pytest.raises(Unavailable, match="cannot be reached"):
        await Database.open("postgresql://tester@/x?host=/nonexistent")
    with pytest.raises(Configuration, match="does not exist"):
        await Database.open(postgres.url("nowhere"))
    with pytest.raises(Configuration, match="coordinator migrate"):
        await Database.open(postgres.url("postgres"))


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


async def test_a_clean_stop_stores_the_highest_instant(file: Path) -> None:
    clock = SystemClock()
    clock.offset_s = 1_000.0
    db = await Database.open(f"sqlite:///{file}", clock=clock)
    await db.write(putting("x"))
    clock.offset_s += sqlite.CLOCK_S / 2
    await db.write(putting("y"))
    highest = clock.now()
    await db.close()
    fresh = SystemClock()
    db = await Database.open(f"sqlite:///{file}", clock=fresh)
    assert fresh.now() >= highest
    await db.close()


async def test_a_process_behind_lowers_no_other_ones_instant(file: Path) -> None:
    behind, ahead, fresh = SystemClock(), SystemClock(), SystemClock()
    command = await Database.open(f"sqlite:///{file}", clock=behind)
    ahead.offset_s = 100_000.0
    server = await Database.open(f"sqlite:///{file}", clock=ahead)
    await server.write(putting("x"))
    highest = ahead.now()
    await server.close()
    await command.write(putting("y"))
    await command.close()
    db = await Database.open(f"sqlite:///{file}", clock=fresh)
    assert fresh.now() >= highest
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
        "import sys; from pathlib import Path; from coordinator.database.engine.server_lock "
        "import DirectoryLock\n"
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


def test_a_lock_that_cannot_be_written_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as changed:
        changed.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left") as refusal:
            DirectoryLock.take(tmp_path)
    assert refusal.value.filename == str(tmp_path / LOCK_FILE)
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
    """The disk fails while others wait for the same commit: all are told, and nothing is written
    any more.
    """
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


async def test_a_database_that_finds_no_room_to_be_made_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = sys.modules[migrate.__module__]
    whole = opening._migrate

    def cramped(connection: Connection) -> None:
        connection.exec_driver_sql("PRAGMA max_page_count = 2")
        whole(connection)

    monkeypatch.setattr(opening, "_migrate", cramped)
    with pytest.raises(StorageFull, match="no space is left for the database"):
        await migrate(f"sqlite:///{tmp_path / 'coordinator.sqlite3'}")


FREEZE = """
import asyncio, sys, time
from coordinator.database import key_values
from coordinator.database.engine.open_database import Database

async def main():
    db = await Database.open(sys.argv[1])

    def freeze(conn):
        key_values.get(conn, "run", lock=True)
        print("held", flush=True)
        time.sleep(60)

    await db.write(freeze)

asyncio.run(main())
"""


async def test_a_frozen_peer_loses_its_locks_within_seconds(postgres: Postgres) -> None:
    url = await postgres.fresh()
    db = await Database.open(url)
    await db.write(putting("run"))
    frozen = subprocess.Popen([sys.executable, "-c", FREEZE, url], stdout=subprocess.PIPE)
    assert frozen.stdout is not None
    assert frozen.stdout.readline() == b"held\n"
    began = time.monotonic()
    await db.write(lambda conn: key_values.get(conn, "run", lock=True))
    assert time.monotonic() - began < 10
    frozen.kill()
    frozen.communicate()
    await db.close()
    await postgres.recycle(url)


async def test_reads_do_not_wait_behind_writes_that_wait_for_a_row(postgres: Postgres) -> None:
    url = await postgres.fresh()
    db = await Database.open(url)
    await db.write(putting("run"))
    name = url.split("@/")[1].split("?")[0]
    holder = await asyncpg.connect(host=str(postgres.directory), user="tester", database=name)
    locked = holder.transaction()
    await locked.start()
    await holder.execute("SELECT * FROM meta WHERE key = 'run' FOR UPDATE")
    waiting = [
        asyncio.create_task(db.write(lambda conn: key_values.get(conn, "run", lock=True)))
        for _ in range(POOL + 5)
    ]
    await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.wait_for(db.read(keys), 5)  # as of a heartbeat
    assert not any(each.done() for each in waiting)
    await locked.rollback()
    await asyncio.gather(*waiting)
    await holder.close()
    await db.close()
    await postgres.recycle(url)


@pytest.mark.skipif(shutil.which("pgbouncer") is None, reason="pgbouncer is not installed")
@pytest.mark.parametrize(
    "more", ["", "ignore_startup_parameters = " + ", ".join(name.lower() for name in SERVER)]
)
async def test_a_pooler_that_drops_settings_is_refused_with_a_sentence(
    postgres: Postgres, tmp_path: Path, more: str
) -> None:
    url = await postgres.fresh()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        file = Path(folder) / "bouncer.ini"
        file.write_text(
            f"[databases]\n* = host={postgres.directory} user=tester\n"
            "[pgbouncer]\npool_mode = transaction\n"
            f"unix_socket_dir = {folder}\nlisten_port = 6432\nauth_type = any\n{more}\n"
        )
        who = _unprivileged()
        if who:
            os.chown(folder, who["user"], who["group"])  # type: ignore[arg-type]
        bouncer = subprocess.Popen(
            ["pgbouncer", "-q", str(file)],
            stderr=subprocess.DEVNULL,
            **who,  # type: ignore[call-overload]
        )
        try:
            while not (Path(folder) / ".s.PGSQL.6432").exists():
                assert bouncer.poll() is None
                await asyncio.sleep(0.05)
            between = url.split("?")[0] + f"?host={folder}&port=6432"
            for attempt in (is_new, Database.open):
                with pytest.raises(Configuration, match="name PostgreSQL itself"):
                    await attempt(between)
        finally:
            bouncer.kill()
            bouncer.wait()
    await postgres.recycle(url)
