"""Replies below /v1: whole, or server-sent events that end when the client is gone or too slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager

import msgspec

from coordinator.request_body import ClientGone, Receive, Scope, Send, until_gone

COMMENT_S = 5.0  # interval of comments in a stream
SEND_S = 20.0  # a client that takes longer for one piece is dropped


class ReplySender:
    """Sends one reply: a whole body, or streamed events."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, send_s: float = SEND_S) -> None:
        self._scope = scope
        self._send = send
        self._receive = receive
        self._send_s = send_s
        self._gone: asyncio.Future[None] | None = None

    @property
    def begun(self) -> bool:
        """Return True once the head of the reply is sent."""
        return bool(self._scope.get("status"))

    async def whole(self, value: object, status: int = 200) -> None:
        """Send a JSON reply."""
        headers = [(b"content-type", b"application/json")]
        await self.reply(status, headers, msgspec.json.encode(value))

    async def reply(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a whole reply."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*headers, length])
        await self._put({"type": "http.response.body", "body": body})
        self._scope["sent"] = len(body)

    async def stream(self) -> None:
        """Begin a stream of events."""
        kind = (b"content-type", b"text/event-stream; charset=utf-8")
        await self._start(200, [kind, (b"cache-control", b"no-cache")])
        self._scope["sent"] = 0

    async def event(self, value: object) -> None:
        """Send an event. Raises ClientGone where the client left or reads too slowly."""
        data = b"data: " + (value if isinstance(value, bytes) else msgspec.json.encode(value))
        await self._put({"type": "http.response.body", "body": data + b"\n\n", "more_body": True})
        self._scope["sent"] += len(data) + 2

    async def done(self) -> None:
        """End a stream of events."""
        await self.event(b"[DONE]")
        await self._put({"type": "http.response.body", "body": b""})

    async def comment(self) -> None:
        """Send a line that clients skip; it may begin the stream."""
        if not self.begun:
            await self.stream()
        line = {"type": "http.response.body", "body": b": waiting\n\n", "more_body": True}
        await self._put(line)

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Send a comment from time to time inside the block, so that no proxy closes the stream."""

        async def bridge() -> None:
            while True:
                await asyncio.sleep(COMMENT_S)
                await self.comment()

        task = asyncio.ensure_future(bridge())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def gone(self) -> asyncio.Future[None]:
        """Return a future that is done as soon as the client leaves."""
        if self._gone is None:
            self._gone = asyncio.ensure_future(until_gone(self._receive))
        return self._gone

    def close(self) -> None:
        if self._gone is not None:
            self._gone.cancel()

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        name = (b"x-request-id", str(self._scope.get("request_id", "")).encode())
        if not self._scope.get("body_read") and self._scope["method"] == "POST":
            headers = [*headers, (b"connection", b"close")]
        self._scope["status"] = status
        start = {"type": "http.response.start", "status": status, "headers": [*headers, name]}
        await self._put(start)

    async def _put(self, message: MutableMapping[str, object]) -> None:
        try:
            async with asyncio.timeout(self._send_s):
                await self._send(message)
        except TimeoutError:
            raise ClientGone from None
