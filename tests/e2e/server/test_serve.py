"""`coordinator serve` as a process: how it begins, what it refuses, how it ends."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from coordinator.accounts.server_identity import ServerAddress
from coordinator.admin import people_commands, runs
from coordinator.admin.command import EmptyRequest
from coordinator.admin.people_commands import CreateInvites
from coordinator.admin.remote_server import RemoteServer
from coordinator.cli.main import main
from coordinator.config import Settings
from coordinator.http.server import welcome
from coordinator.services import opened
from shared.errors import Configuration, Unauthorized
from shared.network.links import parse_link
from tests.e2e.conftest import Commanded, Forked
from tests.support.local_coordinator import RUN, local_coordinator
from tests.support.server_process import Process, command
from tests.support.sums import build_sums

SOON_S = 20.0
# commands that run in this process set up the log
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_as_it_was")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One server on loopback that closes slow connections early."""
    quick = {"COORDINATOR_HEADERS_DEADLINE_S": "1", "COORDINATOR_BODY_WINDOW_S": "1"}
    with Process(tmp_path_factory.mktemp("server"), "--port", "0", **quick) as process:
        yield process
        assert process.stop() == 0, "".join(process.errors)


def health(port: int) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=SOON_S)) as connection:
        connection.request("GET", "/health")
        return connection.getresponse().status


def until_closed(connection: socket.socket) -> bytes:
    """Read the rest of the reply until the server closes."""
    connection.settimeout(SOON_S)
    said = b""
    try:
        while data := connection.recv(65536):
            said += data
    except ConnectionError:
        pass
    return said


def test_no_option_is_needed_and_everything_is_private(server: Process) -> None:
    assert health(server.port) == 200
    link = parse_link(server.link)
    assert link.url == server.url == f"http://127.0.0.1:{server.port}"
    assert link.fingerprint
    for path in server.data_dir.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0 or path.parent != server.data_dir, path
    assert server.data_dir.stat().st_mode & 0o077 == 0


def test_a_second_server_on_one_directory_exits_78(server: Process, commanded: Commanded) -> None:
    second = commanded("serve", "--data-dir", str(server.data_dir), "--port", "0")
    assert second.returncode == 78
    assert "already serves" in second.stderr
    assert "Traceback" not in second.stderr


def test_a_port_in_use_exits_78_and_says_what_to_do(
    server: Process, tmp_path: Path, commanded: Commanded
) -> None:
    second = commanded("serve", "--data-dir", str(tmp_path), "--port", str(server.port))
    assert second.returncode == 78
    assert "--port" in second.stderr


def test_commands_work_while_it_serves(server: Process, commanded: Commanded) -> None:
    here = commanded("volunteer", "list", "--data-dir", str(server.data_dir))
    afar = commanded(
        "volunteer", "list", "--server", server.link, "--token-file", str(server.token_file)
    )
    assert (here.returncode, afar.returncode) == (0, 0), here.stderr + afar.stderr
    assert here.stdout == afar.stdout
    made = commanded("invite", "create", "--data-dir", str(server.data_dir), "--json")
    link = parse_link(json.loads(made.stdout)[0]["link"])
    assert (link.url, bool(link.code)) == (server.url, True)


async def test_it_names_the_command_that_brings_the_newest_run_on(tmp_path: Path) -> None:
    folder = tmp_path / "my data"
    async with opened(Settings(data_dir=str(folder))) as coordinator:
        await coordinator.server.set_address(ServerAddress(url="http://127.0.0.1:1"))
        there = f"--data-dir '{folder}'"
        assert (await welcome(coordinator))[-1].endswith(
            f"coordinator run create --example {there}"
        )
        await coordinator.datasets.add(build_sums)
        run = await coordinator.runs.create(RUN)
        assert (await welcome(coordinator))[-1].endswith(f"run start {run.name} {there}")
        await coordinator.runs.start(run.name)
        assert (await welcome(coordinator))[-1].endswith(f"run show {run.name} {there}")


async def test_the_lines_to_send_are_for_an_address_that_others_reach(tmp_path: Path) -> None:
    async with opened(Settings(data_dir=str(tmp_path), name="Lab")) as coordinator:
        await coordinator.server.set_address(ServerAddress(url="http://127.0.0.1:1"))
        assert "To send" not in "".join(await welcome(coordinator))
        (invite,) = await people_commands.invite_create.run(coordinator, CreateInvites())
        assert invite.message == ()
        address = ServerAddress(url="https://192.168.1.17:1", tls_pin="ab" * 32)
        await coordinator.server.set_address(address)
        said = "\n".join(await welcome(coordinator))
        (invite,) = await people_commands.invite_create.run(coordinator, CreateInvites())
    for text in (said, "\n".join(invite.message)):
        assert "uvx pipx install" in text
        assert f"volunteer join '{address.url}/join#key=" in text
        assert "certificate" in text


def test_an_invite_to_this_machine_alone_says_so(server: Process, commanded: Commanded) -> None:
    made = commanded("invite", "create", "--data-dir", str(server.data_dir))
    assert parse_link(made.stdout.strip()).code
    assert "--host 0.0.0.0" in made.stderr


def test_drip_feeding_connections_are_closed(server: Process) -> None:
    address = ("127.0.0.1", server.port)
    began = time.monotonic()
    idle = [socket.create_connection(address) for _ in range(20)]
    headers = [socket.create_connection(address) for _ in range(20)]
    for connection in headers:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow:")
    bodies = [socket.create_connection(address) for _ in range(20)]
    for connection in bodies:
        connection.sendall(
            b"POST /api/v1/workers/register HTTP/1.1\r\nhost: localhost\r\n"
            b"content-length: 1000\r\n\r\n{"
        )
    assert health(server.port) == 200
    said = [until_closed(connection) for connection in (*idle, *headers, *bodies)]
    assert time.monotonic() - began < 20.0 + SOON_S  # a body has its window
    assert said[:20] == [b""] * 20
    assert all(reply.startswith(b"HTTP/1.1 408 ") for reply in said[20:])
    assert health(server.port) == 200
    for connection in (*idle, *headers, *bodies):
        connection.close()


def test_a_giant_chunked_body_is_refused_and_memory_stays_flat(server: Process) -> None:
    def resident() -> int:
        status = Path(f"/proc/{server.child.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) << 10

    before, sent = resident(), 0
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /api/v1/workers/register HTTP/1.1\r\nhost: localhost\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        try:
            for _ in range(4800):  # 300 MB
                connection.sendall(piece)
                sent += len(piece)
        except ConnectionError:
            pass  # it does not listen to the end
        said = until_closed(connection)
    assert b" 413 " in said or sent < 300_000_000
    assert resident() - before < 32 << 20
    assert health(server.port) == 200


def test_a_hang_up_is_ignored(server: Process) -> None:
    server.signal(signal.SIGHUP)
    assert health(server.port) == 200


def test_beyond_loopback_it_encrypts_and_the_link_pins_the_certificate(
    tmp_path: Path, forked: Forked
) -> None:
    quick = {"COORDINATOR_HEADERS_DEADLINE_S": "1"}
    with forked(tmp_path, "--host", "0.0.0.0", "--port", "0", **quick) as server:
        link = parse_link(server.link)
        assert link.url.startswith("https://")
        with socket.create_connection(("127.0.0.1", server.port)) as no_handshake:
            assert until_closed(no_handshake) == b""
        assert len(link.tls_pin) == 64
        remote = RemoteServer.of(server.link, server.token_file)
        assert remote.call(runs.listing, EmptyRequest()) == ()
        other = server.link.replace(link.tls_pin, "0" * 64)
        with pytest.raises(Unauthorized, match="another certificate"):
            RemoteServer.of(other, server.token_file).call(runs.listing, EmptyRequest())
        with pytest.raises(Configuration, match="whole join link"):
            RemoteServer.of(link.url, server.token_file).call(runs.listing, EmptyRequest())
        assert server.stop() == 0
    assert (tmp_path / "tls.key").stat().st_mode & 0o777 == 0o600
    with forked(tmp_path, "--host", "0.0.0.0", "--port", "0") as again:
        assert parse_link(again.link).tls_pin == link.tls_pin  # old links stay good


def test_an_empty_token_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "admin.token").touch()
    with pytest.raises(Configuration, match=r"admin\.token is empty"):
        RemoteServer.of("http://127.0.0.1:1", tmp_path / "admin.token")


def test_beyond_loopback_it_is_by_invitation_and_a_restart_prints_the_same_link(
    tmp_path: Path, forked: Forked
) -> None:
    outward = ("--host", "0.0.0.0", "--port", "0", "--url", "https://train.example.org")
    with forked(tmp_path, *outward, COORDINATOR_INVITE_USES="2") as server:
        link = parse_link(server.link)
        assert link.code
        assert server.stop() == 0
    with forked(tmp_path, *outward, COORDINATOR_INVITE_USES="2") as again:
        assert parse_link(again.link).code == link.code
        assert again.stop() == 0
    with forked(tmp_path, *outward, "--open") as opened_up:
        assert parse_link(opened_up.link).code == ""
        assert opened_up.stop() == 0
    with forked(tmp_path, "--port", "0") as local:
        assert parse_link(local.link).code == ""
        register(local.port)
        assert local.stop() == 0


def test_open_and_by_invitation_at_once_is_refused(tmp_path: Path) -> None:
    refused = command("serve", "--data-dir", str(tmp_path), "--open", "--invite-only")
    assert refused.returncode == 78
    assert "contradict" in refused.stderr


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "anybody on this machine"),
        ({"url": "https://a.example.org"}, "by invitation; the code in this link lets 100 in"),
        ({"url": "https://a.example.org", "open": True}, "open to strangers"),
        ({"invite_only": True}, "by invitation only"),
    ],
)
async def test_one_line_says_who_may_join(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    async with opened(Settings(data_dir=str(tmp_path), **more)) as coordinator:
        assert sum(said in line for line in await welcome(coordinator)) == 1
        info = await coordinator.server.info()
        settings = coordinator.settings
        assert (info.invite_only, info.open) == (settings.by_invitation, settings.open)


async def test_an_open_server_names_runs_that_were_made_for_invited_people(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run()
    for is_open, many in ((False, 0), (True, 1)):
        async with opened(Settings(data_dir=str(tmp_path), open=is_open)) as coordinator:
            assert sum("by the mean" in line for line in await welcome(coordinator)) == many


def connected(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=SOON_S)


def register(port: int) -> str:
    """A worker; its token."""
    ids = {name: secrets.token_hex(16) for name in ("volunteer_id", "worker_id", "secret")}
    with closing(connected(port)) as connection:
        body = json.dumps(ids | {"nickname": f"Ann {secrets.token_hex(3)}"})
        connection.request("POST", "/api/v1/workers/register", body)
        assert connection.getresponse().status == 200
    return f"{ids['worker_id']}.{ids['secret']}"


def knows(port: int, token: str) -> bool:
    with closing(connected(port)) as connection:
        headers = {"Authorization": f"Bearer {token}"}
        connection.request("GET", "/api/v1/workers/me", headers=headers)
        return connection.getresponse().status == 200


def takes_connections(port: int) -> bool:
    try:
        return health(port) == 200
    except OSError:
        return False


def test_a_stop_signal_answers_who_waits_and_exits_0(tmp_path: Path, forked: Forked) -> None:
    with forked(tmp_path, "--port", "0", "--log-level", "debug") as server:
        token = register(server.port)
        with closing(connected(server.port)) as waiting:
            body = json.dumps({"claim_id": "c" * 32, "wait_s": 60})
            waiting.request("POST", "/api/v1/claims", body, {"Authorization": f"Bearer {token}"})
            assert health(server.port) == 200  # the claim was read before this was answered
            server.signal(signal.SIGTERM)
            reply = waiting.getresponse()
            assert reply.status == 503
            assert reply.headers["retry-after"]
            reply.read()
        assert server.ended() == 0, "".join(server.errors)
    written = "".join(server.errors)
    assert "/api/v1/claims" in written
    assert "Traceback" not in written
    secret = token.partition(".")[2]
    admin = server.token_file.read_text().strip()
    assert secret not in written
    assert admin not in written
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_a_second_stop_signal_ends_it_at_once_and_nothing_is_lost(
    tmp_path: Path, forked: Forked
) -> None:
    with forked(tmp_path, "--port", "0", COORDINATOR_SHUTDOWN_S="300") as server:
        token = register(server.port)
        with socket.create_connection(("127.0.0.1", server.port)) as unfinished:
            head = "POST /api/v1/claims HTTP/1.1\r\nhost: localhost\r\n"
            head += f"authorization: Bearer {token}\r\n"
            unfinished.sendall(f"{head}content-length: 100\r\n\r\n{{".encode())
            assert health(server.port) == 200
            server.signal(signal.SIGINT)
            while takes_connections(server.port):
                pass
            server.signal(signal.SIGINT)
            assert server.ended(SOON_S) == 1
    with forked(tmp_path, "--port", "0") as again:
        assert knows(again.port, token)


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, forked: Forked) -> None:
    with forked(tmp_path, "--port", "0") as server:
        tokens = [register(server.port) for _ in range(5)]
        server.signal(signal.SIGKILL)
        assert server.ended() == -signal.SIGKILL
    with forked(tmp_path, "--port", "0") as again:
        assert all(knows(again.port, token) for token in tokens)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("serve", "--port", "x"), 2, "--port"),
        (("serve", "--port", "99999"), 2, "65535"),
        (("serve", "--prot", "1"), 2, "--prot"),
        (("serve", "--host", "no.such.host.invalid"), 78, "not an address"),
        (("serve", "--tls-cert", "absent.pem", "--tls-key", "absent.pem"), 78, "TLS files"),
        (("serve", "--database", "mysql://x/y"), 78, "postgresql"),
        (("serve", "--port", "0", "--blobs", "ftp://x"), 78, "s3://"),
        (("serve", "--config", "absent.toml"), 78, "absent.toml"),
        (("run", "start", "nothing"), 78, "no coordinator in"),
        (("run", "create", "absent.toml"), 2, "absent.toml cannot be read: no such file"),
        (("run", "create", "/"), 2, "/ cannot be read: is a directory"),
        (("dataset", "add", "x", "--text", "/absent"), 2, "no file or folder /absent"),
        (("dataset", "add", "x", "--text", "/", "--tokenizer", "/absent"), 2, "/absent"),
        (("dataset", "add", "x", "--text", "/", "--vocab-size", "x"), 2, "vocab-size"),
        (("invite", "create", "--names", "absent.csv"), 2, "absent.csv cannot be read: no such"),
        (("restore", "/absent"), 2, "/absent is not a folder of backups"),
        (("backup", "/dev/null/x"), 78, "no coordinator in"),
        (("run", "create"), 2, "--example"),
        (("run", "list", "--server", "127.0.0.1:1"), 78, "--token-file"),
        (("nonsense",), 2, "nonsense"),
    ],
)
def test_a_mistake_gets_a_sentence_and_the_right_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    code: int,
    says: str,
) -> None:
    placed = words != ("nonsense",) and "--server" not in words
    place = ("--data-dir", str(tmp_path / "data")) if placed else ()
    monkeypatch.setattr("sys.argv", ["coordinator", *words, *place])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    written = capsys.readouterr()
    assert ended.value.code == code, written.err
    assert says in " ".join(written.err.replace("│", " ").split())
    assert written.out == ""
    assert "Errno" not in written.err
    assert words[0] == "serve" or list(tmp_path.iterdir()) == []


def test_an_unreachable_server_is_try_again_later(tmp_path: Path, commanded: Commanded) -> None:
    token = tmp_path / "token"
    token.write_text("x" * 43)
    done = commanded("run", "list", "--server", "http://127.0.0.1:1", "--token-file", str(token))
    assert done.returncode == 75
    assert "cannot be reached" in done.stderr


def test_a_database_of_a_newer_version_is_not_touched(tmp_path: Path) -> None:
    assert command("migrate", "--data-dir", str(tmp_path)).returncode == 0
    with closing(sqlite3.connect(tmp_path / "coordinator.sqlite3")) as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
        database.commit()
    done = command("serve", "--data-dir", str(tmp_path), "--port", "0")
    assert done.returncode == 78
    assert "newer version" in done.stderr


def test_a_read_only_data_directory_is_a_sentence(tmp_path: Path, commanded: Commanded) -> None:
    (tmp_path / "file").write_text("")
    done = commanded("serve", "--data-dir", str(tmp_path / "file" / "below"), "--port", "0")
    assert done.returncode == 78
    assert "cannot be made" in done.stderr
    assert os.listdir(tmp_path) == ["file"]
