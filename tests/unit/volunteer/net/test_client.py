"""HTTP to the coordinator: secrets stay secret, everything read has a limit, and trouble that
passes is waited out.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from typing_extensions import override

from coordinator.http.server import KEEP_ALIVE_S
from shared import errors
from shared.errors import VolunteerError
from shared.protocol import endpoints
from shared.protocol.base import ErrorBody
from shared.protocol.limits import HEARTBEAT_S
from shared.protocol.protocol_version import HEADER, PROTOCOL
from tests.support.account_rows import newcomer
from tests.support.certificates import certificate
from tests.support.virtual_clock import VirtualClock
from volunteer.net.api import Api
from volunteer.net.bandwidth import TimeLimit
from volunteer.net.client import ApiCall, Client
from volunteer.net.tls import Address

LOCAL = Address(url="http://127.0.0.1:1")


class Answer(msgspec.Struct):
    value: int


class Said(msgspec.Struct):
    """An answer on the wire."""

    status: int
    data: bytes = b""
    headers: dict[str, str] = {}


class Wire(httpx.AsyncBaseTransport):
    """Answers in turn; the last one for ever."""

    def __init__(self, *answers: Said | Exception) -> None:
        self.requests: list[httpx.Request] = []
        self._answers = list(answers)

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        self.requests.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        stream = httpx.ByteStream(answer.data)
        return httpx.Response(answer.status, headers=answer.headers, stream=stream)


def client(
    wire: httpx.AsyncBaseTransport, address: Address = LOCAL, clock: VirtualClock | None = None
) -> Client:
    return Client(
        address,
        clock=clock or VirtualClock(),
        rng=random.Random(1),
        token="worker.secret",
        transport=wire,
    )


def ask(secret: bool = True, patience_s: float = 0.0, bytes_max: int = 1000) -> ApiCall[Answer]:
    return ApiCall(
        method="GET",
        path="/thing",
        reply=Answer,
        secret=secret,
        patience_s=patience_s,
        bytes_max=bytes_max,
    )


def good(value: int = 7) -> Said:
    return Said(200, msgspec.json.encode({"value": value}))


def refusal(status: int, code: str, message: str = "no", **more: object) -> Said:
    return Said(
        status, msgspec.json.encode({"code": code, "message": message, "request_id": "r-1"} | more)
    )


async def test_a_typed_answer() -> None:
    wire = Wire(good())
    made = client(wire)
    assert (await made.call(ask())).value == 7
    assert wire.requests[0].headers["authorization"] == "Bearer worker.secret"
    assert wire.requests[0].headers["accept-encoding"] == "identity"
    assert wire.requests[0].headers[HEADER] == str(PROTOCOL)
    assert made.received_bytes == len(b'{"value":7}')


@pytest.mark.parametrize("url", ["http://203.0.113.5:80", "http://coordinator.example"])
async def test_no_secret_goes_over_plain_http_beyond_this_machine(url: str) -> None:
    wire = Wire(good())
    with pytest.raises(errors.Configuration, match="not encrypted"):
        await client(wire, Address(url=url)).call(ask())
    assert wire.requests == []
    await client(wire, Address(url=url)).call(ask(secret=False))
    assert not {"authorization", HEADER.lower()} & set(wire.requests[0].headers)


async def test_a_secret_in_a_body_is_kept_like_the_token() -> None:
    wire = Wire(good())
    api = Api(client(wire, Address(url="http://203.0.113.5:80")))
    with pytest.raises(errors.Configuration, match="not encrypted"):
        await api.call(endpoints.REGISTER, body=newcomer("Mia"), patience_s=0.0)
    assert wire.requests == []


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (408, "HTTP status 408"),
        (429, "HTTP status 429"),
        (503, "HTTP status 503"),
        (404, "another coordinator answers"),
    ],
)
async def test_a_coordinator_that_is_busy_is_not_taken_for_another(
    status: int, sentence: str
) -> None:
    wire = Wire(Said(status))
    address = dataclasses.replace(LOCAL, public_key="00" * 32)
    with pytest.raises(errors.Unreachable, match=sentence):
        await client(wire, address).call(ask())
    assert [request.url.path for request in wire.requests] == ["/api/v1/server"]


async def test_a_redirect_is_not_followed() -> None:
    wire = Wire(Said(302, headers={"Location": "http://203.0.113.5/"}))
    with pytest.raises(errors.VolunteerError):
        await client(wire).call(ask())
    assert len(wire.requests) == 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Said(200, headers={"Content-Encoding": "gzip"}), errors.Internal),
        (Said(200, b'{"value":' + b"1" * 2000 + b"}"), errors.Internal),
        (Said(200, b"<html>"), errors.Unreachable),
        (Said(200, b'{"value":"x"}', {"x-request-id": "r-1"}), errors.UpgradeRequired),
        (Said(200, b'{"value":"x"}'), errors.Unreachable),
        (Said(200, b'{"login":"http://portal.example"}'), errors.Unreachable),
        (Said(200, b"\xff\xfe"), errors.Internal),
        (Said(200, b"[" * 900, {"x-request-id": "r-1"}), errors.UpgradeRequired),
        (Said(200, b"[" * 900), errors.Unreachable),
        (Said(502, b"<html>bad gateway"), errors.Unreachable),
        (Said(404, b"nothing"), errors.Unreachable),
        (refusal(410, "gone"), errors.Gone),
        (refusal(403, "banned"), errors.Banned),
        (refusal(418, "teapot"), VolunteerError),
        (httpx.ConnectError("refused"), errors.Unreachable),
        (httpx.ReadTimeout("slow"), errors.Unreachable),
    ],
)
async def test_every_bad_answer_is_one_of_our_errors(
    answer: Said | Exception, kind: type[VolunteerError]
) -> None:
    with pytest.raises(VolunteerError) as caught:
        await client(Wire(answer)).call(ask())
    assert isinstance(caught.value, kind)
    assert caught.value.message


class SingleBytes(httpx.AsyncBaseTransport):
    """Answers with a text in pieces of one byte."""

    def __init__(self, count: int) -> None:
        self._count = count

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=self._pieces())

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield b'{"value":'
        for _ in range(self._count):
            yield b" "
        yield b"7}"


async def test_an_answer_of_single_bytes_is_joined() -> None:
    made = client(SingleBytes(100_000))
    assert (await made.call(ask(bytes_max=100_100))).value == 7


async def test_what_the_coordinator_says_cannot_steer_a_terminal() -> None:
    nasty = refusal(409, "conflict", "a\x1b[2Jb\u202ec" + "x" * 5000)
    with pytest.raises(errors.Conflict) as caught:
        await client(Wire(nasty)).call(ask())
    assert caught.value.message.isprintable()
    assert len(caught.value.message) <= 500


async def test_passing_trouble_is_waited_out_and_told() -> None:
    clock = VirtualClock()
    wire = Wire(httpx.ConnectError("down"), refusal(503, "unavailable"), good())
    made = client(wire, clock=clock)
    told: list[tuple[bool, float | None]] = []
    made.watch = lambda online, message, retry_at: told.append((online, retry_at))
    asking = asyncio.ensure_future(made.call(ask(patience_s=60)))
    await clock.advance(0)  # it is on its way
    await clock.advance(10)
    assert (await asking).value == 7
    assert [online for online, _ in told] == [False, False, True]
    assert told[0][1] is not None
    assert clock.now() - 10 < told[0][1] <= clock.now()


async def test_the_next_try_that_is_told_is_the_first_of_all_who_wait() -> None:
    """Somebody who gave up took the countdown away from the screen, though others went on."""
    clock = VirtualClock()
    made = client(Wire(httpx.ConnectError("down")), clock=clock)
    told: list[float | None] = []
    made.watch = lambda online, message, retry_at: told.append(retry_at)
    patient = asyncio.ensure_future(made.call(ask(patience_s=6000)))
    await clock.advance(0)
    await clock.advance(300)
    hasty = asyncio.ensure_future(made.call(ask(patience_s=0.001)))
    await clock.advance(0)
    with pytest.raises(errors.Unreachable):
        await hasty
    assert told[-1] is not None
    assert told[-1] > clock.now()
    patient.cancel()


async def test_the_wait_that_the_server_asks_for_is_kept() -> None:
    clock = VirtualClock()
    wire = Wire(refusal(429, "too_many_requests", retry_after_s=30.0), good())
    asking = asyncio.ensure_future(client(wire, clock=clock).call(ask(patience_s=600)))
    await clock.advance(0)  # it is on its way
    await clock.advance(29)
    assert len(wire.requests) == 1
    await clock.advance(5)
    assert (await asking).value == 7


async def test_nobody_has_to_wait_who_does_not_want_to() -> None:
    clock = VirtualClock()
    wire = Wire(refusal(503, "unavailable", retry_after_s=600.0), good())
    made = client(wire, clock=clock)
    asking = asyncio.ensure_future(made.call(ask(patience_s=6000)))
    await clock.advance(0)  # it is on its way
    await clock.advance(1)
    made.hurry()
    assert (await asking).value == 7


async def test_patience_ends() -> None:
    clock = VirtualClock()
    wire = Wire(httpx.ConnectError("down"))
    asking = asyncio.ensure_future(client(wire, clock=clock).call(ask(patience_s=5)))
    await clock.advance(0)  # it is on its way
    await clock.advance(60)
    with pytest.raises(errors.Unreachable):
        await asking
    assert 2 <= len(wire.requests) <= 8


async def test_what_will_not_change_is_not_tried_again() -> None:
    wire = Wire(refusal(404, "not_found"))
    with pytest.raises(errors.NotFound):
        await client(wire).call(ask(patience_s=600))
    assert len(wire.requests) == 1


# A certificate of the coordinator's own, known by its pin.


@asynccontextmanager
async def tls_server(file: Path) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Yield the server's address, and the first bytes of every request that it received."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            seen.append(head)
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"value":7}')
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    finally:
        server.close()
        await server.wait_closed()


async def call_pinned(url: str, pin: str) -> Answer:
    made = Client(Address(url=url, tls_pin=pin), clock=VirtualClock(), token="worker.secret")
    try:
        return await made.call(ask())
    finally:
        await made.close()


async def test_the_pinned_certificate_is_accepted_and_no_other(tmp_path: Path) -> None:
    file, pin = certificate(tmp_path)
    async with tls_server(file) as (url, seen):
        assert (await call_pinned(url, pin)).value == 7
        assert b"Bearer worker.secret" in seen.pop()
        with pytest.raises(errors.Configuration, match="another certificate"):
            await call_pinned(url, "0" * 64)
        with pytest.raises(errors.Configuration, match="cannot be trusted"):
            await call_pinned(url, "")
        assert seen == []  # not a byte of HTTP, so no secret


async def test_a_connection_outlives_the_time_between_two_heartbeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each heartbeat would shake hands anew. The clock of the library's connections is set
    on: HTTPX closes a connection after 5 s without being told otherwise.
    """
    late = 0.0
    connections: list[int] = []
    over: list[asyncio.Event] = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late)
    monkeypatch.setattr("httpcore._async.http11.time", clock)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        over.append(end := asyncio.Event())
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                connections[-1] += 1
                writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"value":7}')
        writer.close()
        await writer.wait_closed()
        end.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        made = Client(Address(url=f"http://127.0.0.1:{port}"), clock=VirtualClock(), token="a.b")
        for late in (0.0, HEARTBEAT_S, 2 * HEARTBEAT_S):  # noqa: B007 - the clock reads it
            assert (await made.call(ask())).value == 7
        assert connections == [3]
        late += KEEP_ALIVE_S  # by then the server has closed it
        assert (await made.call(ask())).value == 7
        assert connections == [3, 1]
        await made.close()
        await asyncio.gather(*(end.wait() for end in over))


def test_errors_of_the_wire_are_known_here() -> None:
    for code, kind in errors.BY_CODE.items():
        body = msgspec.json.decode(msgspec.json.encode(ErrorBody(code=code, message="m")))
        known = VolunteerError if kind in errors.LOCAL else kind
        assert type(errors.from_wire(body["code"], body["message"])) is known


class Dribble(httpx.AsyncBaseTransport):
    """An answer that never comes to its end, one byte at a time."""

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        async def body() -> AsyncIterator[bytes]:
            while True:
                await asyncio.sleep(0.005)
                yield b" "

        return httpx.Response(200, content=body())


async def test_an_answer_that_dribbles_has_its_limit() -> None:
    impatient = client(Dribble())
    impatient.slack_s = 0.0
    call = dataclasses.replace(ask(), timeout_s=0.1)
    with pytest.raises(errors.Unreachable, match="did not answer in time"):
        await impatient.call(call)


async def test_what_moves_gets_more_time() -> None:
    limit = TimeLimit(0.05)
    async with limit.running():
        limit.moved(1 << 20)
        await asyncio.sleep(0.1)
    with pytest.raises(TimeoutError):
        async with TimeLimit(0.05).running():
            await asyncio.Event().wait()


@pytest.mark.parametrize("kind", ["endless", "compressed"])
async def test_of_a_stores_answer_to_an_upload_only_the_status_is_read(kind: str) -> None:
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(3)
        coding = b"Content-Encoding: gzip\r\n" if kind == "compressed" else b""
        writer.write(b"HTTP/1.1 200 OK\r\n" + coding + b"Content-Length: 1000000000000\r\n\r\n")
        with suppress(ConnectionError):
            while sent < 256 << 20:
                writer.write(bytes(1 << 20))
                await writer.drain()
                sent += 1 << 20
        writer.close()

    async def body() -> AsyncIterator[bytes]:
        yield b"abc"

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await client(Wire(Said(200))).put_elsewhere(f"http://127.0.0.1:{port}/u", 3, body())
    assert sent < 64 << 20
