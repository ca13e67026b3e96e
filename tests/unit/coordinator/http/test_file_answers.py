"""Answers from stored files: real sockets and the server's own protocol."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from coordinator.config import Constants, Settings
from coordinator.http.deadlines import ConnectionGuard, protocol
from coordinator.http.routes.endpoint_app import Reply, respond
from coordinator.request_body import ClientGone
from coordinator.storage.blobs import READ_BYTES, FileStream

LARGE = 24 * READ_BYTES + 7  # more than a socket takes
DATA = random.Random(8).randbytes(1 << 20) * 24 + b"the end"


class Server:
    """Sends a file: /FIRST/LAST is its bytes [FIRST, LAST), /small a short answer."""

    def __init__(self, path: Path) -> None:
        self.guard = ConnectionGuard(
            Settings(data_dir=str(path.parent), constants=Constants(body_window_s=10.0))
        )
        self.path = path
        self.connections: list[Any] = []
        self.ended: list[BaseException | None] = []  # how answers did
        kind: Any = protocol(self.guard)
        config = Config(self, log_config=None, lifespan="off")
        state = ServerState()

        def connect() -> Any:
            self.connections.append(kind(config=config, server_state=state, app_state={}))
            return self.connections[-1]

        self.connect: Callable[[], Any] = connect

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope["request_id"] = "1"
        if scope["path"] == "/small":
            return await respond(scope, receive, send, Reply(body=b"small"))
        first, last = map(int, scope["path"].strip("/").split("/"))
        stream = FileStream(self.path.open("rb", buffering=0), first, last)
        try:
            await respond(scope, receive, send, Reply(stream=stream, size=last - first))
        except ClientGone as error:
            self.ended.append(error)
        else:
            self.ended.append(None)

    @property
    def waiting(self) -> bool:
        """Return True while a client does not take what was sent."""
        return any(connection.flow.write_paused for connection in self.connections)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[Server, int]]:
    (tmp_path / "file").write_bytes(DATA)
    server = Server(tmp_path / "file")
    listening = await asyncio.get_running_loop().create_server(server.connect, "127.0.0.1", 0)
    yield server, listening.sockets[0].getsockname()[1]
    listening.close()
    for connection in server.connections:
        if not connection.transport.is_closing():
            connection.transport.abort()
    await until(lambda: len(server.guard) == 0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():
            await asyncio.sleep(0)


def request(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: here\r\n\r\n".encode()


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
    return await reader.readexactly(length)


@pytest.mark.parametrize(
    ("first", "last"),
    [(0, 0), (5, 6), (3, 3 + READ_BYTES), (0, LARGE)],
)
async def test_what_arrives_is_the_file(server: tuple[Server, int], first: int, last: int) -> None:
    served, port = server
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):  # a connection is good for more than one
        writer.write(request(f"/{first}/{last}"))
        assert await answer(reader) == DATA[first:last]
    assert served.ended == [None, None]
    writer.close()


async def test_requests_that_come_all_at_once_are_answered_in_their_order(
    server: tuple[Server, int],
) -> None:
    _, port = server
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    half = LARGE // 2
    writer.write(request(f"/0/{half}") + request("/small") + request(f"/{half}/{LARGE}"))
    assert await answer(reader) == DATA[:half]
    assert await answer(reader) == b"small"
    assert await answer(reader) == DATA[half:]
    writer.close()


async def test_what_the_kernel_does_not_have_in_memory_is_read_by_a_thread(
    server: tuple[Server, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, port = server
    monkeypatch.setattr("coordinator.storage.blobs.read_cached", lambda file, size: None)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(f"/0/{LARGE}"))
    assert await answer(reader) == DATA
    writer.close()


async def test_others_are_answered_while_a_file_is_sent(server: tuple[Server, int]) -> None:
    served, port = server
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    writer.write(request(f"/0/{LARGE}"))
    await until(lambda: served.waiting)
    other_reader, other = await asyncio.open_connection("127.0.0.1", port)
    other.write(request("/small"))
    assert await answer(other_reader) == b"small"
    assert await answer(reader) == DATA
    writer.close()
    other.close()


async def test_who_hangs_up_in_the_middle_leaves_nothing_behind(
    server: tuple[Server, int],
) -> None:
    served, port = server
    before = len(os.listdir("/proc/self/fd"))
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    writer.write(request(f"/0/{LARGE}"))
    await until(lambda: served.waiting)
    writer.transport.abort()
    await until(lambda: len(served.ended) == 1)
    assert isinstance(served.ended[0], ClientGone)
    await until(lambda: len(os.listdir("/proc/self/fd")) == before)


async def test_who_does_not_read_is_cut_off(server: tuple[Server, int]) -> None:
    served, port = server
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    writer.write(request(f"/0/{LARGE}"))
    await until(lambda: served.waiting)
    now = asyncio.get_running_loop().time()
    for second in range(9):
        served.guard.sweep(now + second)
    assert not served.ended
    for second in range(9, 20):
        served.guard.sweep(now + second)
    await until(lambda: len(served.ended) == 1)
    assert isinstance(served.ended[0], ClientGone)
    writer.close()


async def test_a_file_that_was_cut_short_breaks_the_answer(
    server: tuple[Server, int],
) -> None:
    served, port = server
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    writer.write(request(f"/0/{LARGE}"))
    await until(lambda: served.waiting)
    os.truncate(served.path, READ_BYTES)
    with pytest.raises(asyncio.IncompleteReadError) as broken:
        await answer(reader)
    assert DATA.startswith(broken.value.partial)
    writer.close()
