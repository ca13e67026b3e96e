"""Large files down and up, against a server that says what its script says: nothing received is
lost, nothing foreign is believed, every wait ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from shared import errors
from shared.clock import Clock, SystemClock
from shared.protocol.versions import BlobRef
from shared.units import MIB
from tests.support.certificates import certificate
from tests.support.virtual_clock import VirtualClock
from volunteer.net.api import Api
from volunteer.net.client import READ_S, Client
from volunteer.net.tls import Address
from volunteer.net.transfers import Transfers
from volunteer.storage.blob_cache import Cache

SIZE = 5 * MIB
DATA = os.urandom(SIZE)


def whole(head: bytes, body: bytes = DATA) -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (head, len(body)) + body


class Server:
    """Sends what its script says, one entry for each connection, the last one for ever; then
    closes.
    """

    def __init__(self, *script: bytes, takes: int = 0) -> None:
        """It takes so many bytes of each body before it answers; -1 = it never reads one."""
        self.requests: list[str] = []
        self.received = bytearray()
        self._takes = takes
        self._script = list(script)
        self.left = asyncio.Event()  # a client has closed
        self.close = asyncio.Event()
        self.close.set()
        self._over = asyncio.Event()
        self._serving: set[asyncio.Task[None] | None] = set()

    async def end(self) -> None:
        """End every connection, and wait until its transport is closed."""
        self.close.set()
        self._over.set()
        async with asyncio.timeout(120):
            await asyncio.gather(*(task for task in self._serving if task))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(asyncio.current_task())
        try:
            self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
            if self._takes < 0:
                await self._over.wait()
                return
            self.received += await reader.readexactly(self._takes)
            writer.write(self._script.pop(0) if len(self._script) > 1 else self._script[0])
            await writer.drain()
            if not self.close.is_set():
                await reader.read()
                self.left.set()
        except (ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()


@asynccontextmanager
async def listening(server: Server, tls: Path | None = None) -> AsyncIterator[str]:
    context = None
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls)
    found = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    port = found.sockets[0].getsockname()[1]
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    finally:
        found.close()
        await server.end()
        await found.wait_closed()


async def read(
    address: Address, clock: Clock | None = None, mbit: float = 0.0, read_s: float = READ_S
) -> list[bytes]:
    client = Client(address, clock=clock or SystemClock(), token="worker.secret")
    client.read_s = read_s
    client.down.limit(mbit)
    try:
        async with client.stream("/blobs/x", {}) as reply:
            return [bytes(piece) async for piece in reply.body]
    finally:
        await client.close()


async def test_it_comes_whole() -> None:
    server = Server(whole(b"200 OK"))
    async with listening(server) as url:
        pieces = await read(Address(url=url))
    assert b"".join(pieces) == DATA
    assert "Authorization: Bearer worker.secret" in server.requests[0]
    assert server.requests[0].startswith("GET /api/v1/blobs/x HTTP/1.1")


async def test_a_break_keeps_what_came_and_goes_on_there(tmp_path: Path) -> None:
    begun = 3 * MIB + 17
    rest = whole(b"206 Partial Content", DATA[begun:])
    server = Server(whole(b"200 OK")[: begun - SIZE], rest)
    async with listening(server) as url:
        clock = VirtualClock()
        client = Client(Address(url=url), clock=clock, rng=random.Random(1), token="worker.secret")
        moving = Transfers(Api(client), Cache(tmp_path, 1 << 30))
        ref = BlobRef(sha256=hashlib.sha256(DATA).hexdigest(), size=SIZE)
        getting = asyncio.ensure_future(moving.fetch(ref, lambda done: None))
        while not getting.done():
            await clock.advance(1)
            await asyncio.sleep(0)
        assert (await getting).read_bytes() == DATA
        await client.close()
    assert [f"Range: bytes={begun}-" in request for request in server.requests] == [False, True]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: "
        b"chunked\r\n\r\n%x\r\n" % SIZE + DATA + b"\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + DATA,
    ],
    ids=["chunked", "until it closes"],
)  # fmt: skip
async def test_a_body_of_unknown_length_comes_whole(answer: bytes) -> None:
    server = Server(answer)
    async with listening(server) as url:
        assert b"".join(await read(Address(url=url))) == DATA
    assert len(server.requests) == 1


async def test_a_refusal_is_told_in_the_words_of_the_coordinator() -> None:
    said = b'{"code": "not_found", "message": "there is no such blob", "request_id": "r"}'
    async with listening(Server(whole(b"404 Not Found", said))) as url:
        with pytest.raises(errors.NotFound, match="no such blob"):
            await read(Address(url=url))


async def test_a_compressed_answer_is_refused_at_once() -> None:
    answer = whole(b"200 OK").replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n", 1)
    async with listening(Server(answer)) as url:
        with pytest.raises(errors.Internal, match="compressed"):
            await read(Address(url=url))


async def test_the_last_byte_ends_an_answer_whose_connection_stays() -> None:
    server = Server(whole(b"200 OK"))
    server.close.clear()
    async with listening(server) as url, asyncio.timeout(120):
        assert b"".join(await read(Address(url=url), read_s=1e6)) == DATA


async def test_more_than_was_announced_is_not_read() -> None:
    async with listening(Server(whole(b"200 OK") + b"x" * MIB)) as url:
        assert b"".join(await read(Address(url=url))) == DATA


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-OpenSSH_9.6\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"a" * 200_000]
)
async def test_what_does_not_speak_http_is_an_error_and_no_crash(answer: bytes) -> None:
    async with listening(Server(answer)) as url:
        with pytest.raises(errors.VolunteerError):
            await read(Address(url=url))


async def test_silence_has_its_limit() -> None:
    server = Server(whole(b"200 OK")[:-1])
    server.close.clear()
    async with listening(server) as url:
        with pytest.raises(errors.Unreachable, match="did not answer in time"):
            await read(Address(url=url), read_s=0.1)


async def test_nobody_listens() -> None:
    async with listening(Server(b"")) as url:
        pass
    with pytest.raises(errors.Unreachable, match="connection refused"):
        await read(Address(url=url))


async def test_a_slow_connection_is_heard_before_a_piece_is_full() -> None:
    server = Server(whole(b"200 OK")[:5000])
    server.close.clear()
    async with listening(server) as url:
        client = Client(Address(url=url), clock=SystemClock())
        async with client.stream("/blobs/x", {}) as reply:
            piece = await anext(reply.body)
            assert 0 < len(piece) <= 5000
        await client.close()


async def test_a_rate_is_held_in_small_steps() -> None:
    async with listening(Server(whole(b"200 OK"))) as url:
        clock = VirtualClock()
        reading = asyncio.ensure_future(read(Address(url=url), clock=clock, mbit=0.4))
        while not reading.done():
            await clock.advance(0.1)
            await asyncio.sleep(0)
        pieces = await reading
    assert b"".join(pieces) == DATA
    assert max(map(len, pieces)) == 25_000  # half a second of it


async def test_only_the_pinned_certificate_is_believed(tmp_path: Path) -> None:
    file, pin = certificate(tmp_path)
    server = Server(whole(b"200 OK"))
    async with listening(server, file) as url:
        assert b"".join(await read(Address(url=url, tls_pin=pin))) == DATA
        seen = len(server.requests)
        with pytest.raises(errors.Configuration, match="another certificate"):
            await read(Address(url=url, tls_pin="0" * 64))
        with pytest.raises(errors.Configuration, match="cannot be trusted"):
            await read(Address(url=url))
        assert len(server.requests) == seen  # not a byte of HTTP, so no secret


async def test_who_gives_up_leaves_no_connection_open() -> None:
    server = Server(whole(b"200 OK")[:5000])
    server.close.clear()
    async with listening(server) as url:
        reading = asyncio.ensure_future(read(Address(url=url)))
        while not server.requests:
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert await asyncio.wait_for(server.left.wait(), 30)


# --- up ---


class Said(msgspec.Struct):
    value: int


async def send(
    address: Address, mbit: float = 0.0, clock: Clock | None = None, **limits: float
) -> int:
    client = Client(address, clock=clock or SystemClock(), token="worker.secret")
    client.up.limit(mbit)
    return await put(client, DATA, **limits)


async def put(client: Client, data: bytes, **limits: float) -> int:
    """Upload `data` with these limits of the client in place of its own."""
    for name, value in limits.items():
        setattr(client, name, value)

    async def body() -> AsyncIterator[bytes]:
        for start in range(0, len(data), MIB):
            yield data[start : start + MIB]

    try:
        headers = {"Content-Length": str(len(data)), "Upload-Offset": "0"}
        said = await client.put("/uploads/x", headers, body(), Said)
        assert client.sent_bytes == len(data)
        return said.value
    finally:
        await client.close()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_file_goes_up_whole(chunked: bool) -> None:
    answer = whole(b"200 OK", b'{"value":7}')
    if chunked:
        answer = (
            b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nb\r\n{"value":7}\r\n0\r\n\r\n'
        )
    server = Server(answer, takes=SIZE)
    async with listening(server) as url:
        assert await send(Address(url=url)) == 7
    assert bytes(server.received) == DATA
    assert "Upload-Offset: 0" in server.requests[0]
    assert "Authorization: Bearer worker.secret" in server.requests[0]


async def test_it_goes_up_over_tls_to_the_pinned_certificate_only(tmp_path: Path) -> None:
    file, pin = certificate(tmp_path)
    server = Server(whole(b"200 OK", b'{"value":7}'), takes=SIZE)
    async with listening(server, file) as url:
        assert await send(Address(url=url, tls_pin=pin)) == 7
        with pytest.raises(errors.Configuration, match="another certificate"):
            await send(Address(url=url, tls_pin="0" * 64))
    assert bytes(server.received) == DATA


@pytest.mark.parametrize("takes", [0, MIB])
async def test_a_refusal_in_the_middle_is_heard(takes: int) -> None:
    said = b'{"code": "offset_mismatch", "message": "the upload is at byte 5", "request_id": "r"}'
    server = Server(whole(b"409 Conflict", said), takes=takes)
    server.close.clear()  # what else comes is read and thrown away, as uvicorn does
    async with listening(server) as url:
        with pytest.raises(errors.OffsetMismatch, match="at byte 5"):
            await send(Address(url=url))


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"no http\r\n\r\n"])
async def test_an_upload_without_a_good_answer_is_an_error(answer: bytes) -> None:
    async with listening(Server(answer, takes=SIZE)) as url:
        with pytest.raises(errors.VolunteerError):
            await send(Address(url=url))


async def test_an_endless_answer_is_not_read() -> None:
    async with listening(Server(whole(b"200 OK", b" " * 5000), takes=SIZE)) as url:
        with pytest.raises(errors.Internal):
            await send(Address(url=url), json_bytes_max=1000)


async def test_who_takes_nothing_is_given_up() -> None:
    server = Server(b"", takes=-1)
    async with listening(server) as url:
        client = Client(Address(url=url), clock=SystemClock(), token="worker.secret")
        with pytest.raises(errors.Unreachable, match="did not answer in time"):
            await put(client, bytes(64 * MIB), read_s=0.2)
