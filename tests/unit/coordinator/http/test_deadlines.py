"""Receipt deadlines: who drips is closed, who is slow but honest lives.

Time is given to the guard, nothing sleeps.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from typing_extensions import override
from uvicorn import Config
from uvicorn.server import ServerState

from coordinator.config import Constants, Settings
from coordinator.http.deadlines import ConnectionGuard, GuardedConnection, protocol
from coordinator.http.server import connections_possible
from shared.protocol.limits import HEADER_BYTES_MAX


class Wire(asyncio.Transport):
    """The client's end of a connection: what was sent to it, and whether it was closed."""

    def __init__(self, address: str = "10.0.0.1") -> None:
        super().__init__()
        self.sent = b""
        self.closed = False
        self.aborted = False
        self.unread = 0  # bytes the client does not take
        self.address = address

    @override
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self.address, 5) if name == "peername" else default

    @override
    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    @override
    def close(self) -> None:
        self.closed = True

    @override
    def abort(self) -> None:
        self.aborted = True

    @override
    def is_closing(self) -> bool:
        return self.closed

    @override
    def pause_reading(self) -> None: ...

    @override
    def resume_reading(self) -> None: ...

    @override
    def get_write_buffer_size(self) -> int:
        return self.unread


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Takes the body and answers with its size; GET /wait waits for ever."""
    if scope["path"] == "/wait":
        await asyncio.Event().wait()
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    body = str(size).encode()
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-length", b"%d" % len(body))],
        }
    )
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def lines() -> Any:
    """A guard, and a way to open connections to it."""
    guard = ConnectionGuard(
        Settings(constants=Constants(connections_per_address=3, connections_max=5))
    )
    kind = protocol(guard)
    config = Config(application, log_config=None, lifespan="off")
    state = ServerState()
    opened: list[tuple[Any, Wire]] = []

    def connect(address: str = "10.0.0.1") -> tuple[Any, Wire]:
        connect: Any = kind
        connection = connect(config=config, server_state=state, app_state={})
        wire = Wire(address)
        connection.connection_made(wire)
        opened.append((connection, wire))
        return connection, wire

    yield guard, connect
    for connection, _ in opened:
        connection.connection_lost(None)
    for task in list(state.tasks):
        task.cancel()
    await asyncio.gather(*state.tasks, return_exceptions=True)
    assert len(guard) == 0


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def sweep(guard: ConnectionGuard, seconds: float, start: float | None = None) -> float:
    """Sweep once a second for so long; returns the time reached."""
    now = asyncio.get_running_loop().time() if start is None else start
    end = now + seconds
    while now < end:
        now += 1.0
        guard.sweep(now)
    return now


async def test_a_silent_connection_is_closed(lines: Any) -> None:
    guard, connect = lines
    _, wire = connect()
    now = sweep(guard, 9)
    assert not wire.closed
    sweep(guard, 3, now)
    assert wire.closed
    assert wire.sent == b""


async def test_dripping_headers_are_closed_with_a_reason(lines: Any) -> None:
    guard, connect = lines
    connection, wire = connect()
    connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n")
    now = asyncio.get_running_loop().time()
    for _ in range(14):
        connection.data_received(b"x")
        now = sweep(guard, 1, now)
    assert wire.closed
    assert wire.sent.startswith(b"HTTP/1.1 408 ")
    assert b"headers were not complete within 10 s" in wire.sent
    sweep(guard, 7, now)
    assert wire.aborted  # it did not read that either


async def test_a_dripping_body_is_closed(lines: Any) -> None:
    guard, connect = lines
    connection, wire = connect()
    connection.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
    await settle()
    now = asyncio.get_running_loop().time()
    for _ in range(24):
        connection.data_received(b"x" * 100)
        now = sweep(guard, 1, now)
        await settle()
    assert wire.closed
    assert b"408" in wire.sent
    assert b"1024 bytes a second" in wire.sent


async def test_a_slow_but_honest_body_lives(lines: Any) -> None:
    guard, connect = lines
    connection, wire = connect()
    connection.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 180000\r\n\r\n")
    await settle()
    now = asyncio.get_running_loop().time()
    for _ in range(120):
        connection.data_received(b"x" * 1500)
        await settle()
        now = sweep(guard, 1, now)
    await settle()
    assert not wire.closed
    assert wire.sent.endswith(b"180000")


async def test_a_long_answer_is_not_the_clients_fault(lines: Any) -> None:
    guard, connect = lines
    connection, wire = connect()
    connection.data_received(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
    await settle()
    sweep(guard, 120)
    assert not wire.closed


async def test_a_body_we_have_not_asked_for_is_waited_for(lines: Any) -> None:
    guard, connect = lines
    connection, wire = connect()
    connection.data_received(
        b"POST /wait HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\nexpect: 100-continue\r\n\r\n"
    )
    await settle()
    sweep(guard, 120)
    assert not wire.closed


async def test_who_does_not_read_the_reply_is_closed(lines: Any) -> None:
    guard, connect = lines
    connection, wire = connect()
    connection.data_received(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
    await settle()
    wire.unread = 1 << 20
    connection.pause_writing()
    now = sweep(guard, 15)
    assert not wire.closed
    connection.resume_writing()  # it took some
    connection.pause_writing()
    now = sweep(guard, 15, now)
    assert not wire.closed
    sweep(guard, 10, now)
    assert wire.closed


async def test_many_requests_on_one_connection_are_fine(lines: Any) -> None:
    guard, connect = lines
    connection, wire = connect()
    now = asyncio.get_running_loop().time()
    for _ in range(30):
        connection.data_received(
            b"GET / HTTP/1.1\r\nhost"
        )  # each sweep finds it in the middle of its headers
        now = sweep(guard, 1, now)
        connection.data_received(b": x\r\n\r\n")
        await settle()
    assert not wire.closed
    assert wire.sent.count(b"HTTP/1.1 200") == 30
    connection._unset_keepalive_if_required()


@pytest.mark.parametrize("complete", [True, False])
async def test_giant_headers_are_refused(lines: Any, complete: bool) -> None:
    _, connect = lines
    connection, wire = connect()
    junk = b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: " + b"b" * (HEADER_BYTES_MAX + 10)
    if complete:
        junk += b"\r\n\r\n"
    for start in range(0, len(junk), 1000):
        connection.data_received(junk[start : start + 1000])
    await settle()
    assert wire.closed
    assert b" 431 " in wire.sent or b" 400 " in wire.sent
    assert b"HTTP/1.1 200" not in wire.sent


async def test_connections_are_counted_per_address_and_in_all(lines: Any) -> None:
    guard, connect = lines
    mine = [connect("10.0.0.1") for _ in range(4)]
    assert [wire.closed for _, wire in mine] == [False, False, False, True]
    assert b" 503 " in mine[3][1].sent
    assert b"retry-after" in mine[3][1].sent
    others = [connect(f"10.0.1.{i}") for i in range(3)]
    assert [wire.closed for _, wire in others] == [False, False, True]
    mine[0][0].connection_lost(None)
    assert not connect("10.0.0.1")[1].closed
    assert len(guard) == 5


@pytest.mark.parametrize(
    ("address", "settings", "limited"),
    [
        ("10.0.0.1", {}, True),
        ("127.0.0.1", {}, False),
        ("127.0.0.1", {"url": ""}, True),
        ("127.0.0.1", {"trusted_proxies": "192.0.2.1,10.0.0.0/24"}, True),
        ("10.0.0.1", {"trusted_proxies": "192.0.2.1,10.0.0.0/24"}, False),
        ("10.0.1.1", {"trusted_proxies": "192.0.2.1,10.0.0.0/24"}, True),
    ],
)
async def test_behind_a_proxy_only_the_proxy_is_unlimited(
    address: str, settings: dict[str, Any], limited: bool
) -> None:
    constants = Constants(connections_per_address=3)
    chosen: dict[str, Any] = {"url": "https://house.example"} | settings
    guard = ConnectionGuard(Settings(constants=constants, **chosen))
    kind: Any = protocol(guard)
    config = Config(application, log_config=None, lifespan="off")
    made = [kind(config=config, server_state=ServerState(), app_state={}) for _ in range(5)]
    wires = [Wire(address) for _ in made]
    for connection, wire in zip(made, wires, strict=True):
        connection.connection_made(wire)
    assert [wire.closed for wire in wires] == [False] * 3 + [limited] * 2
    for connection in made:
        connection.connection_lost(None)


async def test_garbage_is_refused(lines: Any) -> None:
    _, connect = lines
    connection, wire = connect()
    connection.data_received(b"\x16\x03\x01\x00\xa5\x01\x00\x00\r\n\r\n")
    assert wire.closed
    assert b" 400 " in wire.sent


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def feed(connection: Any, wire: Wire, data: bytes, times: int) -> int:
    """Send the same again until it is too much; returns how many bytes were taken."""
    for number in range(times):
        if wire.closed:
            return number * len(data)
        connection.data_received(data)
    return times * len(data)


@pytest.mark.parametrize(
    "flood",
    [
        b"Xn: yyyy\r\n" * 1000,  # trailers without end
        b"y" * 10_000,  # one trailer without end
    ],
    ids=["many", "long"],
)
async def test_trailers_are_bounded(lines: Any, flood: bytes) -> None:
    _, connect = lines
    connection, wire = connect()
    connection.data_received(HEAD + b"1\r\nx\r\n0\r\nA: ")
    await settle()
    assert feed(connection, wire, flood, 1000) <= 64 << 10
    await settle()
    assert wire.closed
    assert b" 431 " in wire.sent or b" 400 " in wire.sent or not wire.sent


async def test_trailers_reach_nobody(lines: Any) -> None:
    _, connect = lines
    connection, wire = connect()
    connection.data_received(HEAD + b"1\r\nx\r\n")
    await settle()
    before = len(connection.cycle.scope["headers"])
    connection.data_received(b"0\r\nauthorization: Bearer mine\r\n\r\n")
    await settle()
    assert len(connection.cycle.scope["headers"]) == before
    assert wire.sent.startswith(b"HTTP/1.1 200")
    connection._unset_keepalive_if_required()


async def test_chunk_headers_may_not_outweigh_the_body(lines: Any) -> None:
    _, connect = lines
    connection, wire = connect()
    connection.data_received(HEAD)
    await settle()
    assert feed(connection, wire, b"1;" + b"e" * 2000 + b"\r\nx\r\n", 2000) <= 1 << 20
    assert wire.closed


async def test_small_honest_chunks_live(lines: Any) -> None:
    _, connect = lines
    connection, wire = connect()
    connection.data_received(HEAD)
    for _ in range(20_000):
        connection.data_received(b"1\r\nx\r\n")
    connection.data_received(b"0\r\n\r\n")
    await settle()
    assert wire.sent.endswith(b"20000")
    connection._unset_keepalive_if_required()


async def test_bytes_that_begin_no_request_start_the_deadline(lines: Any) -> None:
    guard, connect = lines
    connection, wire = connect()
    connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await settle()
    now = asyncio.get_running_loop().time()
    for _ in range(15):
        if not wire.closed:
            connection.data_received(b"\r\n")
        now = sweep(guard, 1, now)
    assert wire.closed
    connection._unset_keepalive_if_required()


async def test_a_refusal_is_never_the_answer_to_an_earlier_request(lines: Any) -> None:
    _, connect = lines
    connection, wire = connect()
    connection.data_received(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
    await settle()
    connection.data_received(b"GET / HTTP/1.1\r\nbad header without colon\r\n\r\n")
    await settle()
    assert not wire.sent


async def test_requests_far_ahead_of_their_answers_are_refused(lines: Any) -> None:
    _, connect = lines
    connection, wire = connect()
    one = b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n"
    feed(connection, wire, one * 1000, 20)
    assert wire.closed
    assert not wire.sent


async def test_two_hundred_requests_at_once_are_answered(lines: Any) -> None:
    _, connect = lines
    connection, wire = connect()
    connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 200 + b"GET / HT")
    for _ in range(300):
        await settle()
    assert wire.sent.count(b"HTTP/1.1 200") == 200
    assert not wire.closed
    connection._unset_keepalive_if_required()


async def test_nonsense_is_refused_in_our_own_words(lines: Any) -> None:
    _, connect = lines
    connection, wire = connect()
    connection.data_received(b"GET / SPDY/9\r\n\r\n")
    assert b" 400 " in wire.sent
    assert b'"code":"bad_request"' in wire.sent


async def test_when_all_places_are_taken_the_longest_idle_makes_room(lines: Any) -> None:
    guard, connect = lines
    idle, idle_wire = connect("10.0.1.1")
    idle.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await settle()
    guard.sweep(asyncio.get_running_loop().time())
    busy = [connect(f"10.0.2.{i}") for i in range(4)]
    _, new = connect("10.0.3.1")
    assert not new.closed
    assert idle_wire.aborted
    assert not any(wire.closed for _, wire in busy)
    assert connect("10.0.4.1")[1].closed
    idle._unset_keepalive_if_required()


async def test_a_crowd_at_the_door_of_a_full_server_does_not_have_all_connections_looked_at() -> (
    None
):
    class Open:
        """Connection that waits for its next request."""

        looked = 0
        loop = asyncio.get_running_loop()
        transport = Wire()

        def phase(self) -> str:
            Open.looked += 1
            return "idle"

    guard = ConnectionGuard(Settings(constants=Constants(connections_max=400)))
    now = asyncio.get_running_loop().time()
    admitted = [
        guard.admit(cast(GuardedConnection, Open()), f"10.0.{n // 250}.{n % 250}", now)
        for n in range(800)
    ]
    assert all(admitted)
    assert len(guard) == 400
    assert Open.looked < 3 * 800
    for connection in list(guard._connections):
        guard.leave(connection)


async def test_neighbours_of_one_home_are_one(lines: Any) -> None:
    _, connect = lines
    wires = [connect(f"2001:db8:1:2::{i}")[1] for i in range(4)]
    assert [wire.closed for wire in wires] == [False, False, False, True]


def test_the_limit_of_open_files_is_raised_and_kept_below() -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        allowed = connections_possible(8192)
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert 1 <= allowed < soft
        assert soft > 256 or before[1] <= 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
