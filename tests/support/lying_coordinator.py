"""A coordinator that lies: a real one on a real socket, some of whose replies are replaced.

A lie is the whole reply to one endpoint. `EXTREMES` fill a reply of the right shape with the worst
values that its types let through, so that what is refused is refused for its content.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import uvicorn
from msgspec import inspect

from coordinator.http.server import listen
from shared.protocol.endpoint import Endpoint
from tests.support.served import accepting

JSON = (b"content-type", b"application/json")
ENDLESS_PIECE = b" " * 65536
DEEP = 200_000
MANY = 2_000

Send = Callable[[Mapping[str, Any]], Any]
Lie = Callable[[Send], Any]


def says(body: bytes, status: int = 200, *headers: tuple[bytes, bytes]) -> Lie:
    """Return a reply with this body."""

    async def lie(send: Send) -> None:
        start = {"type": "http.response.start", "status": status, "headers": [JSON, *headers]}
        await send(start)
        await send({"type": "http.response.body", "body": body})

    return lie


async def endless(send: Send) -> None:
    """A body without an end, as fast as it is taken."""
    await send({"type": "http.response.start", "status": 200, "headers": [JSON]})
    for _ in range(1 << 16):
        await send({"type": "http.response.body", "body": ENDLESS_PIECE, "more_body": True})
        await asyncio.sleep(0)


async def silent(send: Send) -> None:
    """Headers, then nothing for ever."""
    await send({"type": "http.response.start", "status": 200, "headers": [JSON]})
    await asyncio.Event().wait()


SHAPELESS: dict[str, Lie] = {
    "nothing": says(b""),
    "empty": says(b"{}"),
    "list": says(b"[]"),
    "null": says(b"null"),
    "number": says(b"1e400"),
    "text": says(b'"x"'),
    "half": says(b'{"a":'),
    "bytes": says(bytes(range(256)) * 16),
    "deep": says(b"[" * DEEP + b"]" * DEEP),
    "page": says(b"<html>", 200, (b"content-type", b"text/html")),
    "failed": says(b"Internal Server Error", 500),
    "local": says(b'{"code":"configuration","message":"end"}', 500),
    "later": says(b'{"code":"unavailable","message":"x","retry_after_s":1e300}', 503),
    "elsewhere": says(b"", 307, (b"location", b"http://127.0.0.1:9/")),
    "packed": says(b"x", 200, (b"content-encoding", b"gzip")),
    "endless": endless,
    "silent": silent,
}

# A value for each kind of field; what a type forbids is sent all the same.
EXTREMES: dict[str, dict[type, Any]] = {
    "low": {int: -5, float: -1e308, str: "", list: 0},
    "high": {int: 10**15, float: 1e308, str: "a\r\nx: y", list: 1},
    "huge": {int: 2**63 - 1, float: 1e18, str: "\x1b[2J\u202e" * 2000, list: 3},
    "many": {int: 1, float: 1.0, str: "x", list: MANY},
}


def extreme(kind: Any, values: Mapping[type, Any], depth: int = 0) -> Any:
    """A value of a type as plain JSON, every leaf at its extreme."""
    t = inspect.type_info(kind) if depth == 0 else kind
    match t:
        case inspect.StructType():
            return {f.encode_name: extreme(f.type, values, depth + 1) for f in t.fields}
        case inspect.IntType():
            return values[int]
        case inspect.FloatType():
            return values[float]
        case inspect.BoolType():
            return True
        case inspect.LiteralType():
            return t.values[-1]
        case inspect.EnumType():
            return next(iter(t.cls)).value
        case inspect.VarTupleType() | inspect.ListType():
            count = values[list] if depth <= 2 else min(2, values[list])
            return [extreme(t.item_type, values, depth + 1)] * count
        case inspect.TupleType():
            return [extreme(each, values, depth + 1) for each in t.item_types]
        case inspect.DictType():
            return {"a": extreme(t.value_type, values, depth + 1)}
        case inspect.UnionType():
            known = [each for each in t.types if not isinstance(each, inspect.NoneType)]
            return extreme(known[0], values, depth + 1)
        case inspect.StrType():
            return values[str]
    return None


def shaped(endpoint: Endpoint[Any], name: str) -> Lie:
    """A reply of the right shape whose values are extreme."""
    return says(msgspec.json.encode(extreme(endpoint.reply, EXTREMES[name])))


def changed(change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    """A change to an honest JSON reply."""

    def apply(body: bytes) -> bytes:
        return msgspec.json.encode(change(msgspec.json.decode(body)))

    return apply


class LyingCoordinator:
    """ASGI application in front of an honest one. `lies` are replies by endpoint, `changes` edits
    of honest replies.
    """

    def __init__(self, honest: Any = None) -> None:
        self._honest = honest
        self.lies: dict[Endpoint[Any], Lie] = {}
        self.changes: dict[Endpoint[Any], Callable[[bytes], bytes]] = {}
        self.asked: Counter[str] = Counter()
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.asked[scope["path"]] += 1
        for endpoint, lie in self.lies.items():
            if _fits(endpoint, scope):
                await _drain(receive)
                await lie(send)
                return
        for endpoint, change in self.changes.items():
            if _fits(endpoint, scope):
                send = _Changed(send, change)
        await self._honest(scope, receive, send)


class _Changed:
    """Collects a reply, changes it, and passes it on."""

    def __init__(self, send: Any, change: Callable[[bytes], bytes]) -> None:
        self._send = send
        self._change = change
        self._start: Any = None
        self._body = b""

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        body = self._change(self._body) if self._start["status"] == 200 else self._body
        kept = [pair for pair in self._start["headers"] if pair[0] != b"content-length"]
        await self._send({**self._start, "headers": kept})
        await self._send({"type": "http.response.body", "body": body})


async def _drain(receive: Any) -> None:
    while (await receive()).get("more_body"):
        pass


def _fits(endpoint: Endpoint[Any], scope: Any) -> bool:
    if endpoint.method != scope["method"]:
        return False
    wanted, got = endpoint.full_path.split("/"), scope["path"].split("/")
    pairs = zip(wanted, got, strict=False)
    return len(wanted) == len(got) and all(a == b or a.startswith("{") for a, b in pairs)


@asynccontextmanager
async def lying_coordinator(honest: Any = None) -> AsyncIterator[LyingCoordinator]:
    """A liar that listens on loopback; `url` says where."""
    liar = LyingCoordinator(honest)
    config = uvicorn.Config(
        liar, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=0
    )
    with listen("127.0.0.1", 0) as listener:
        liar.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with accepting(config, listener):
            yield liar
