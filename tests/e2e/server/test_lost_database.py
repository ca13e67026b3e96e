"""A database file that is damaged, removed or replaced while served, or missing afterwards."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import secrets
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, select

from coordinator.config import Settings
from coordinator.database.engine.sqlite import READERS
from coordinator.services import opened
from shared.errors import Configuration, Internal, Unavailable, VolunteerError
from tests.support.forkserver import ForkServer
from tests.support.local_coordinator import local_coordinator
from tests.support.server_process import Process
from volunteer.net.reply_errors import ForeignReply, refusal
from volunteer.net.retry import is_temporary

TIMEOUT_S = 120.0
PAGE_BYTES = 4096


def ask(port: int, method: str, path: str, body: object = None, token: str = "") -> VolunteerError:
    """Return the error that a volunteer reads from a reply, which must be a refusal."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as connection:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        reply = connection.getresponse()
        assert reply.status == 503, reply.read()
        assert reply.headers["retry-after"]
        return refusal("house", reply.status, dict(reply.headers.items()), reply.read())


def registration() -> dict[str, str]:
    ids = {name: secrets.token_hex(16) for name in ("volunteer_id", "worker_id", "secret")}
    return ids | {"nickname": f"Ann {secrets.token_hex(3)}"}


def register(port: int, said: dict[str, str]) -> str:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", "/api/v1/workers/register", json.dumps(said))
        assert connection.getresponse().status == 200
    return f"{said['worker_id']}.{said['secret']}"


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [False, True])
def test_nothing_is_acknowledged_once_the_file_is_gone(
    tmp_path: Path, replaced: bool, fork_server: ForkServer
) -> None:
    file = tmp_path / "coordinator.sqlite3"
    with Process(tmp_path, "--port", "0", command=fork_server) as server:
        register(server.port, registration())
        if replaced:
            file.with_suffix(".other").write_bytes(file.read_bytes())
            os.replace(file.with_suffix(".other"), file)
        else:
            file.unlink()
        error = ask(server.port, "POST", "/api/v1/workers/register", registration())
        assert isinstance(error, Unavailable)
        ask(server.port, "GET", "/ready")
        server.stop()
        assert any("removed or replaced" in line for line in server.errors)
    if not replaced:
        again = Process(tmp_path, "--port", "0", command=fork_server)
        assert again.ended() == 78
        assert not file.exists()


async def test_no_empty_database_is_made_where_a_coordinator_was(tmp_path: Path) -> None:
    async with opened(Settings(data_dir=str(tmp_path))):
        pass
    for path in tmp_path.glob("coordinator.sqlite3*"):
        path.unlink()
    with pytest.raises(Configuration, match=r"is missing or empty, but .*signing\.key"):
        async with opened(Settings(data_dir=str(tmp_path))):
            pass
    assert not list(tmp_path.glob("coordinator.sqlite3"))


@pytest.mark.slow
def test_a_damaged_file_is_the_organisers_trouble_and_ends_no_volunteer(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    with Process(tmp_path, "--port", "0", command=fork_server) as server:
        token = register(server.port, registration())
        server.stop()
    file = tmp_path / "coordinator.sqlite3"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        query = "SELECT rootpage FROM sqlite_master WHERE tbl_name = 'datasets'"
        pages = [page for (page,) in connection.execute(query) if page]
    with file.open("r+b") as damaged:
        for page in pages:
            damaged.seek((page - 1) * PAGE_BYTES)
            damaged.write(b"\xff" * PAGE_BYTES)
    with Process(tmp_path, "--port", "0", command=fork_server) as server:
        error = ask(server.port, "GET", "/api/v1/datasets/none", token=token)
        assert is_temporary(error)
        assert error.exit_code != 78
        ask(server.port, "GET", "/ready")
        ask(server.port, "POST", "/api/v1/workers/register", registration())
        server.stop()
        assert any("the database failed" in line for line in server.errors)


async def test_nobody_reads_on_from_a_file_that_is_gone(tmp_path: Path) -> None:
    met = threading.Barrier(READERS)

    def meet(conn: Connection) -> int:
        met.wait(TIMEOUT_S)
        return int(conn.execute(select(1)).scalar_one())

    async with local_coordinator(tmp_path) as home:
        db = home.coordinator.db
        await asyncio.gather(*(db.read(meet) for _ in range(READERS)))  # all have the file open
        (tmp_path / "coordinator.sqlite3").unlink()
        for _ in range(READERS):
            with pytest.raises(Unavailable, match="removed or replaced"):
                await db.read(lambda conn: conn.execute(select(1)).scalar_one())
        assert not (tmp_path / "coordinator.sqlite3").exists()


async def test_an_older_copy_is_not_damaged_by_the_log_of_the_removed_file(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.sqlite3"
    async with local_coordinator(tmp_path) as home:
        older = path.read_bytes()  # without what the log holds
        await home.start_run()
        path.unlink()
    assert not path.with_name(f"{path.name}-wal").exists()
    assert path.with_name(f"{path.name}-wal.removed").stat().st_size > 0
    path.write_bytes(older)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (0,)


async def test_a_failed_database_is_an_alert(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        (tmp_path / "coordinator.sqlite3").unlink()
        ann = home.client()
        assert (await ann.post("/api/v1/workers/register", json=registration())).status_code == 503
        assert [alert.kind for alert in await home.coordinator.alerts.look()] == ["database"]
        assert (await ann.get("/ready")).status_code == 503


@pytest.mark.parametrize("code", ["configuration", "unreachable", "error", "made_up"])
def test_local_errors_never_come_off_the_wire(code: str) -> None:
    body = json.dumps({"code": code, "message": "no", "request_id": "r"}).encode()
    assert type(refusal("house", 500, {}, body)) in (Internal, ForeignReply)
    assert type(refusal("house", 400, {}, body)) in (VolunteerError, ForeignReply)
