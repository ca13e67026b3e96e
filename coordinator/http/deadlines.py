"""Deadlines for what comes in on a connection: uvicorn has none (measured: 700 of 700 dripping
connections stayed open).

All headers must be in within a few seconds, a body must come at a least rate over every window, and
a reader must take the reply it requested; a slow but honest upload lives. One address may hold so
many connections and no more. It takes a subclass of uvicorn's protocol, because a middleware sees a
request only when its headers are complete.

A sweep once a second checks every connection, so that a request costs no timer of its own.

"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from coordinator.http.sendfile import EXTENSION, ZeroCopy, possible
from shared.protocol.base import ErrorBody
from shared.protocol.limits import BODY_RATE_MIN, HEADER_BYTES_MAX

if TYPE_CHECKING:
    from coordinator.config import Settings

SWEEP_S = 1.0
LINGER_S = 5.0  # a closed connection whose peer does not read its last reply is cut off then

ConnectionPhase = Literal["idle", "headers", "body", "reply"]


class ConnectionProgress:
    """Progress of one connection."""

    def __init__(self, address: str, now: float) -> None:
        self.address = address
        self.received = 0  # bytes
        self.request = 0  # how many requests have begun: tells a new one from the same one
        self.resumed = 0  # how often writing went on
        self.seen: tuple[ConnectionPhase, int] = ("headers", 0)
        self.since = now
        self.bytes_then = 0
        self.closing_since: float | None = None


class Guard:
    """Admits connections and closes those that are too slow. `now` is the loop's time."""

    def __init__(self, settings: Settings) -> None:
        self._headers_s = settings.headers_deadline_s
        self._window_s = settings.body_window_s
        # Behind a proxy every connection comes from the proxy's address.
        self._per_address = (
            settings.connections_max if settings.url else settings.connections_per_ip
        )
        self._connections_max = settings.connections_max
        self._connections: dict[Any, ConnectionProgress] = {}
        self._addresses: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._connections)

    def admit(self, connection: Any, address: str, now: float) -> ConnectionProgress | None:
        """Begin to watch a connection; return None when there are too many already."""
        if (
            len(self._connections) >= self._connections_max
            or self._addresses[address] >= self._per_address
        ):
            return None
        self._addresses[address] += 1
        watch = self._connections[connection] = ConnectionProgress(address, now)
        if self._timer is None:
            self._timer = connection.loop.call_later(SWEEP_S, self._tick, connection.loop)
        return watch

    def leave(self, connection: Any) -> None:
        watch = self._connections.pop(connection, None)
        if watch is not None:
            self._addresses[watch.address] -= 1
            if not self._addresses[watch.address]:
                del self._addresses[watch.address]

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self.sweep(loop.time())
        if self._connections:
            self._timer = loop.call_later(SWEEP_S, self._tick, loop)

    def sweep(self, now: float) -> None:
        """Check every connection once."""
        for connection, watch in list(self._connections.items()):
            if watch.closing_since is not None:
                if now - watch.closing_since > LINGER_S:
                    connection.transport.abort()
            elif problem := self._problem(connection, watch, now):
                watch.closing_since = now
                connection.refuse(408, problem)

    def _problem(self, connection: Any, watch: ConnectionProgress, now: float) -> str:
        phase: ConnectionPhase = connection.phase()
        key = (phase, watch.resumed if phase == "reply" else watch.request)
        moved = connection.unsent() if phase == "reply" else watch.received
        if key != watch.seen:
            watch.seen, watch.since, watch.bytes_then = key, now, moved
            return ""
        if phase == "headers" and now - watch.since > self._headers_s:
            return f"the headers were not complete within {self._headers_s:g} s"
        if phase in ("body", "reply") and now - watch.since >= self._window_s:
            rate = abs(moved - watch.bytes_then) / (now - watch.since)
            if rate < BODY_RATE_MIN:
                return f"fewer than {BODY_RATE_MIN} bytes a second came over {self._window_s:g} s"
            watch.since, watch.bytes_then = now, moved
        return ""


_PHRASES = {
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def raw_reply(status: int, message: str) -> bytes:
    """Return a whole HTTP reply, for connections that have no request to answer."""
    code = {408: "bad_request", 431: "bad_request", 503: "unavailable"}[status]
    body = msgspec.json.encode(ErrorBody(code=code, message=message))
    head = f"HTTP/1.1 {status} {_PHRASES[status]}\r\nconnection: close\r\n"
    head += "content-type: application/json\r\n"
    if status == 503:
        head += "retry-after: 5\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def protocol(
    guard: Guard, kind: Literal["auto", "httptools", "h11"] = "auto"
) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol with deadlines; "auto" takes httptools where it is installed."""
    if kind == "h11":
        return _on_h11(guard)
    try:
        return _on_httptools(guard)
    except ImportError:
        if kind == "httptools":
            raise
        return _on_h11(guard)


def _on_httptools(guard: Guard) -> type[asyncio.Protocol]:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class GuardedHttpTools(_Watched, HttpToolsProtocol):
        """Protocol on httptools: the parser's callbacks set the phase."""

        _guard = guard
        _phase: ConnectionPhase = "headers"
        _header_bytes = 0
        _refused = False

        def phase(self) -> ConnectionPhase:
            return self._while(self._phase)

        def data_received(self, data: bytes) -> None:
            if self._refused or self.watch is None:
                return
            self.watch.received += len(data)
            super().data_received(data)
            if self._phase == "headers" and self.watch.received:
                self._header_bytes += len(data)
                self._check_headers()

        def on_message_begin(self) -> None:
            assert self.watch is not None
            self.watch.request += 1
            self._phase, self._header_bytes = "headers", 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._header_bytes = len(self.url) + sum(len(k) + len(v) + 4 for k, v in self.headers)
            self._phase = "body"
            if self._check_headers():
                super().on_headers_complete()
                self.offer_files(self.scope)

        def on_body(self, body: bytes) -> None:
            if not self._refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._phase = "idle"
            if not self._refused:
                super().on_message_complete()

        def _check_headers(self) -> bool:
            if self._header_bytes > HEADER_BYTES_MAX and not self._refused:
                self.refuse(431, f"the headers are larger than {HEADER_BYTES_MAX} bytes")
            return not self._refused

        def refuse(self, status: int, message: str) -> None:
            self._refused = True
            super().refuse(status, message)

    return GuardedHttpTools


def _on_h11(guard: Guard) -> type[asyncio.Protocol]:
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class GuardedH11(_Watched, H11Protocol):
        """Protocol on h11: its state gives the phase; its own size limit holds for headers."""

        _guard = guard

        def phase(self) -> ConnectionPhase:
            assert self.watch is not None
            theirs = self.conn.their_state
            if theirs is h11.SEND_BODY:
                return self._while("body")
            partial = theirs is h11.IDLE and (self.conn.trailing_data[0] or not self.watch.request)
            return self._while("headers" if partial else "idle")

        def data_received(self, data: bytes) -> None:
            if self.watch is None or self.watch.closing_since is not None:
                return
            self.watch.received += len(data)
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:
                self.watch.request += 1

    return GuardedH11


class _Watched:
    """Parts of both protocols; stands before uvicorn's class in the order of inheritance."""

    _guard: Guard
    watch: ConnectionProgress | None = None
    wire: ZeroCopy | None = None
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    flow: Any
    cycle: Any
    client: tuple[str, int] | None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        if possible(self.transport):
            self.wire = ZeroCopy(self.transport, self.loop)
        address = self.client[0] if self.client else ""
        self.watch = self._guard.admit(self, address, self.loop.time())
        if self.watch is None:
            self.refuse(503, "too many connections are open; close some and try again")

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.leave(self)
        if self.wire is not None:
            self.wire.lost()
        super().connection_lost(exc)  # type: ignore[misc]

    def resume_writing(self) -> None:
        if self.watch is not None:
            self.watch.resumed += 1
        super().resume_writing()  # type: ignore[misc]

    def _while(self, receiving: ConnectionPhase) -> ConnectionPhase:
        """Return the phase to judge by: not the client's fault while we have stopped reading or
        not requested yet.
        """
        if self.flow.write_paused or (self.wire is not None and self.wire.busy):
            return "reply"
        if receiving == "body":
            waiting = self.cycle is not None and self.cycle.waiting_for_100_continue
            return "idle" if self.flow.read_paused or waiting else "body"
        return receiving

    def offer_files(self, scope: Any) -> None:
        """Let the answer to a request come from files. Called before it begins."""
        if self.wire is not None and self.cycle is not None:
            scope["extensions"] = {EXTENSION: partial(self._send_file, self.cycle)}

    async def _send_file(self, cycle: Any, descriptor: int, offset: int, count: int) -> int:
        assert self.wire is not None
        done = await self.wire.send(descriptor, offset, count)
        cycle.expected_content_length -= done
        return done

    def unsent(self) -> int:
        """Falls with every byte of an answer that the client takes, whichever way it went."""
        past = self.wire.sent if self.wire is not None else 0
        return self.transport.get_write_buffer_size() - past

    def refuse(self, status: int, message: str) -> None:
        """Say why, if nothing was said yet, and close."""
        if self.transport.is_closing():
            return
        answered = (
            self.cycle is not None
            and self.cycle.response_started
            and not self.cycle.response_complete
        )
        silent = self.watch is not None and not self.watch.received
        if not answered and not silent:
            self.transport.write(raw_reply(status, message))
        self.transport.close()
