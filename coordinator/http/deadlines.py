"""Deadlines and limits of connections, which uvicorn lacks (measured: 700 of 700 dripping
connections stayed open).

All headers must arrive within a few seconds, and bodies and replies must have a minimum rate in
every window, which slow but honest uploads reach. The number of connections of an address is
limited. A subclass of uvicorn's protocol is needed, because a middleware sees a request only when
its headers are complete.

The framing of a message is bounded too: the body limits its chunk headers and trailers, bytes
between requests start the deadline of headers, and a connection may not send far ahead of its
answers. A sweep once a second checks every connection, so a request costs no timer of its own.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from coordinator.rules.networks import address_key
from shared.protocol.base import ErrorBody
from shared.protocol.limits import BODY_RATE_MIN, HEADER_BYTES_MAX

if TYPE_CHECKING:
    from coordinator.config import Settings

SWEEP_S = 1.0
FRAMING_BYTES_MAX = 16 << 10  # most bytes besides headers and body: chunk headers, trailers
FRAMING_A_BODY_BYTE = 16  # such bytes that each byte of the body allows in addition
PIPELINED_MAX = 256  # requests that a client may send ahead of their answers
# a connection that is being closed is aborted after this time if its peer does not read the last
# reply
LINGER_S = 5.0

Phase = Literal["idle", "headers", "body", "reply"]


class ConnectionProgress:
    """Progress of one connection, as the guard tracks it."""

    def __init__(self, address: str, now: float) -> None:
        self.address = address
        self.received = 0  # bytes that were received
        # number of begun requests, which tells one request from the next
        self.request = 0
        self.resumed = 0  # number of times that writing was resumed
        # phase, and the number of its request or of the resumption of its writing
        self.stage: tuple[Phase, int] = ("headers", 0)
        self.since = now  # when the stage began, or the newest window in which its rate is measured
        self.bytes_then = 0  # bytes received, or unsent in a reply, at that time
        self.closing_since: float | None = None


class GuardedConnection(Protocol):
    """Connection that a guard watches."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport

    def phase(self) -> Phase: ...

    def unsent(self) -> int: ...

    def refuse(self, status: int, message: str) -> None: ...


class ConnectionGuard:
    """Admits connections and closes slow ones. `now` is the loop's time."""

    def __init__(self, settings: Settings, connections_max: int | None = None) -> None:
        self._headers_s = settings.constants.headers_s
        self._window_s = settings.constants.body_window_s
        self._per_address = settings.constants.connections_per_address
        self._connections_max = connections_max or settings.constants.connections_max
        self._connections: dict[GuardedConnection, ConnectionProgress] = {}
        self._trusted = _trusted(settings)
        self._addresses: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        # Idle connections, each with the last request that it began; the one that has been idle for
        # longest first.
        self._idlest: deque[tuple[GuardedConnection, ConnectionProgress, int]] = deque()
        self._ranked_at = -math.inf

    def __len__(self) -> int:
        return len(self._connections)

    def admit(
        self, connection: GuardedConnection, address: str, now: float
    ) -> ConnectionProgress | None:
        """Admit and watch a connection; None if its address has too many connections already, or
        all places are taken and none of their connections is idle.

        An IPv6 /64, which one home gets, counts as one address; the organiser's proxies have no
        limit of their own. If all places are taken, the connection that has been idle for longest
        is closed, which costs its owner nothing.
        """
        key = address_key(address)
        proxy = self._trusted(address)
        if not proxy and self._addresses[key] >= self._per_address:
            return None
        if len(self._connections) >= self._connections_max and not self._make_room(now):
            return None
        self._addresses[key] += 1
        progress = self._connections[connection] = ConnectionProgress(key, now)
        if self._timer is None:
            self._timer = connection.loop.call_later(SWEEP_S, self._tick, connection.loop)
        return progress

    def _make_room(self, now: float) -> bool:
        """Close the connection that has been idle for longest. Return False when no connection is
        idle.

        Connections are ranked once a second at most, so that new clients of a full server cost it
        little.
        """
        if not self._idlest and now >= self._ranked_at + SWEEP_S:
            self._ranked_at = now
            idle = [pair for pair in self._connections.items() if _idle(*pair)]
            idle.sort(key=lambda pair: pair[1].since)
            self._idlest = deque((*pair, pair[1].request) for pair in idle)
        while self._idlest:
            connection, progress, request = self._idlest.popleft()
            same = self._connections.get(connection) is progress and progress.request == request
            if same and _idle(connection, progress):
                self.leave(connection)
                connection.transport.abort()
                return True
        return False

    def leave(self, connection: GuardedConnection) -> None:
        progress = self._connections.pop(connection, None)
        if progress is not None:
            self._addresses[progress.address] -= 1
            if not self._addresses[progress.address]:
                del self._addresses[progress.address]

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self.sweep(loop.time())
        if self._connections:
            self._timer = loop.call_later(SWEEP_S, self._tick, loop)

    def sweep(self, now: float) -> None:
        """Check every connection once."""
        for connection, progress in list(self._connections.items()):
            if progress.closing_since is not None:
                if now - progress.closing_since > LINGER_S:
                    connection.transport.abort()
            elif problem := self._problem(connection, progress, now):
                progress.closing_since = now
                connection.refuse(408, problem)

    def _problem(
        self, connection: GuardedConnection, progress: ConnectionProgress, now: float
    ) -> str:
        """Return why a connection is too slow, or ""; begin a window if the last one has ended."""
        phase: Phase = connection.phase()
        stage = (phase, progress.resumed if phase == "reply" else progress.request)
        moved_bytes = connection.unsent() if phase == "reply" else progress.received
        if stage != progress.stage:
            progress.stage, progress.since, progress.bytes_then = stage, now, moved_bytes
            return ""
        if phase == "headers" and now - progress.since > self._headers_s:
            return f"the headers were not complete within {self._headers_s:g} s"
        if phase in ("body", "reply") and now - progress.since >= self._window_s:
            rate = abs(moved_bytes - progress.bytes_then) / (now - progress.since)
            if rate < BODY_RATE_MIN:
                return f"fewer than {BODY_RATE_MIN} bytes a second came over {self._window_s:g} s"
            progress.since, progress.bytes_then = now, moved_bytes
        return ""


def _idle(connection: GuardedConnection, progress: ConnectionProgress) -> bool:
    return progress.closing_since is None and connection.phase() == "idle"


_PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def raw_reply(status: int, message: str) -> bytes:
    """Return a whole HTTP reply for a connection without a request."""
    code = "unavailable" if status == 503 else "bad_request"
    body = msgspec.json.encode(ErrorBody(code=code, message=message))
    head = (
        f"HTTP/1.1 {status} {_PHRASES[status]}\r\nconnection: close\r\ncontent-type: "
        "application/json\r\n"
    )
    if status == 503:
        head += "retry-after: 5\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _trusted(settings: Settings) -> Callable[[str], bool]:
    """Return a test for the addresses of the organiser's proxies; if the setting `url` is empty,
    the test is False for every address.
    """
    if not settings.url:
        return lambda address: False
    from uvicorn.middleware.proxy_headers import _TrustedHosts

    hosts = _TrustedHosts(settings.trusted_proxies)
    return lambda address: address in hosts


def protocol(guard: ConnectionGuard) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol on httptools, with deadlines."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Guarded(_PhaseTracker, HttpToolsProtocol):
        _guard = guard

    return Guarded


class _PhaseTracker:
    """Base class of the protocol that tracks the phase of a connection by the parser's callbacks.
    It stands before uvicorn's class among the bases, so that its methods are called first.
    """

    _guard: ConnectionGuard
    _framing = 0  # bytes after the headers of a message that are not part of its body
    _body = 0
    _refused = False
    _phase: Phase = "headers"
    _header_bytes = 0  # header bytes of the incoming message so far
    progress: ConnectionProgress | None = None
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    flow: Any
    cycle: Any
    client: tuple[str, int] | None
    url: bytes
    headers: list[tuple[bytes, bytes]]
    scope: Any
    pipeline: deque[Any]  # earlier requests that wait for their answers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        address = self.client[0] if self.client else ""
        self.progress = self._guard.admit(self, address, self.loop.time())
        if self.progress is None:
            self.refuse(503, "too many connections are open; close some and try again")

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.leave(self)
        super().connection_lost(exc)  # type: ignore[misc]

    def resume_writing(self) -> None:
        if self.progress is not None:
            self.progress.resumed += 1
        super().resume_writing()  # type: ignore[misc]

    def phase(self) -> Phase:
        """Return the phase that counts for deadlines: a client is not slow while the server does
        not read, or has not asked for the body.
        """
        if self.flow.write_paused:
            return "reply"
        if self._phase == "body":
            waiting = self.cycle is not None and self.cycle.waiting_for_100_continue
            return "idle" if self.flow.read_paused or waiting else "body"
        return self._phase

    def unsent(self) -> int:
        """Return the number of bytes of answers that wait for the client to take them."""
        return self.transport.get_write_buffer_size()

    def refuse(self, status: int, message: str) -> None:
        """Send the reason and close; it is not sent where it could pass for the answer to another
        request.
        """
        self._refused = True
        if self.transport.is_closing():
            return
        cycle, silent = self.cycle, self.progress is not None and not self.progress.received
        # A request gets its cycle when its headers are complete; until then `cycle` belongs to the
        # previous request.
        waiting = cycle is not None and not cycle.response_complete
        answering = waiting and (cycle.response_started or self.phase() != "body" or self.pipeline)
        if not answering and not silent:
            self.transport.write(raw_reply(status, message))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "this is not valid HTTP/1.1")

    def data_received(self, data: bytes) -> None:
        if self._refused or self.progress is None:
            return
        self.progress.received += len(data)
        request, phase, body = self.progress.request, self._phase, self._body
        super().data_received(data)  # type: ignore[misc]
        same = self.progress.request == request  # False if a request began within the data
        if self._phase == "idle" and same and phase == "idle":
            self._phase, self._header_bytes = "headers", 0  # the data began no request
        if self._phase == "headers":
            first = phase != "body" and self.progress.request == request + 1
            self._header_bytes += len(data) if same or first else 0
            self._check_headers()
        elif self._phase == "body" and same and phase == "body":
            self._framing += len(data) - (self._body - body)
            most = FRAMING_BYTES_MAX + FRAMING_A_BODY_BYTE * self._body
            if self._framing > most and not self._refused:
                self.refuse(431, "the chunk headers and trailers are too large for this body")

    def on_message_begin(self) -> None:
        assert self.progress is not None
        self.progress.request += 1
        self._phase, self._header_bytes, self._framing, self._body = "headers", 0, 0, 0
        super().on_message_begin()  # type: ignore[misc]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase == "headers":  # trailers are dropped, since nothing reads them
            super().on_header(name, value)  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        self._header_bytes = len(self.url) + sum(len(k) + len(v) + 4 for k, v in self.headers)
        self._phase = "body"
        if not self._check_headers():
            return
        if len(self.pipeline) >= PIPELINED_MAX:
            self.refuse(503, "too many requests were sent ahead of their answers")
            return
        super().on_headers_complete()  # type: ignore[misc]

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        if not self._refused:
            super().on_body(body)  # type: ignore[misc]

    def on_message_complete(self) -> None:
        self._phase = "idle"
        if not self._refused:
            super().on_message_complete()  # type: ignore[misc]

    def _check_headers(self) -> bool:
        if self._header_bytes > HEADER_BYTES_MAX and not self._refused:
            self.refuse(431, f"the headers are larger than {HEADER_BYTES_MAX} bytes")
        return not self._refused
