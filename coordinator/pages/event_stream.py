"""Event streams of a run: server-sent events from one read a second, shared by all viewers.

A viewer costs two tasks, which sleep while nothing changes. There is no queue of states: a slow
viewer gets only the newest state. A viewer that stalls is dropped, every stream ends after a while,
and all end when the server stops. The page opens a new stream whenever its stream ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import msgspec

from coordinator.pages.page_replies import head
from coordinator.request_body import Receive, Scope, Send
from shared.clock import Clock
from shared.errors import Unavailable

TICK_S = 1.0
SEND_S = 20.0  # a viewer that does not take one event within this time is dropped
# interval of beats where nothing changes, so that proxies and pages see a live stream
BEAT_S = 15.0
LIFE_S = 1800.0  # time after which a stream ends
BEAT = b"event: beat\ndata: still here\n\n"
HELLO = b"retry: 5000\n\n"  # the browser reconnects after so many milliseconds

State = Callable[[], Awaitable[msgspec.Struct]]


class Viewer:
    """One open event stream: the task that sends it, and since when that task waits for the
    browser to take data (None while it does not wait).
    """

    def __init__(self) -> None:
        self.stream: asyncio.Task[None] | None = None
        self.blocked_since: float | None = None


class Channel:
    """Newest state of one run, and its viewers."""

    def __init__(self, clock: Clock, state: State) -> None:
        self._clock = clock
        self._state = state
        self._changed = asyncio.Event()
        self._polling: asyncio.Task[None] | None = None
        self._sent_at = clock.monotonic()
        self.viewers: set[Viewer] = set()
        self.newest = b""
        self.closed = False

    def enter(self, viewer: Viewer) -> None:
        """Add a viewer; the first viewer starts the reads once a second."""
        self.viewers.add(viewer)
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll())

    def leave(self, viewer: Viewer) -> None:
        """Remove a viewer; the last viewer ends the reads."""
        self.viewers.discard(viewer)
        if not self.viewers and self._polling is not None:
            self._polling.cancel()
            self._polling = None

    async def _poll(self) -> None:
        while True:
            now = self._clock.monotonic()
            with contextlib.suppress(Exception):  # the database may be unreachable for a moment
                self._put(await self._state(), now)
            for viewer in self.viewers:
                since = viewer.blocked_since
                if since is not None and now - since > SEND_S and viewer.stream is not None:
                    viewer.stream.cancel()
            await self._clock.sleep(TICK_S)

    def _put(self, state: msgspec.Struct, now: float) -> None:
        data = b"event: state\ndata: " + msgspec.json.encode(state) + b"\n\n"
        if data != self.newest or now - self._sent_at >= BEAT_S:
            self.newest, self._sent_at = data, now
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """End every stream."""
        self.closed = True
        self._wake()

    async def next(self, last: bytes) -> bytes:
        """Return the newest state once it differs from `last`, or a beat after a while."""
        if self.newest in (b"", last) and not self.closed:
            await self._changed.wait()
        return BEAT if self.newest == last else self.newest


class Broadcast:
    """Event streams of all runs, with a limit on their viewers."""

    def __init__(self, clock: Clock, viewers_max: int, stopping: asyncio.Event) -> None:
        self._clock = clock
        self._viewers_max = viewers_max
        self._stopping = stopping
        self._ending: asyncio.Task[None] | None = None
        self._channels: dict[str, Channel] = {}

    @property
    def viewers(self) -> int:
        """Return how many streams are open."""
        return sum(len(channel.viewers) for channel in self._channels.values())

    async def serve(
        self, name: str, state: State, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send a run's state now and at each change. Raises Unavailable for too many viewers."""
        if self.viewers >= self._viewers_max or self._stopping.is_set():
            raise Unavailable(
                "too many people are watching; look again in a minute", retry_after_s=60.0
            )
        channel = self._channels.setdefault(name, Channel(self._clock, state))
        viewer = Viewer()
        stream = viewer.stream = asyncio.create_task(self._stream(viewer, channel, scope, send))
        channel.enter(viewer)
        if self._ending is None:
            self._ending = asyncio.create_task(self._close_at_stop())
        disconnect = asyncio.create_task(_gone(receive, stream))
        try:
            await asyncio.wait((stream,))
            if not stream.cancelled():
                stream.result()
        finally:
            disconnect.cancel()
            stream.cancel()
            await asyncio.gather(disconnect, stream, return_exceptions=True)
            self._leave(name, channel, viewer)

    def _leave(self, name: str, channel: Channel, viewer: Viewer) -> None:
        channel.leave(viewer)
        if not channel.viewers and self._channels.get(name) is channel:
            del self._channels[name]
        if not self._channels and self._ending is not None:
            self._ending.cancel()
            self._ending = None

    async def _close_at_stop(self) -> None:
        await self._stopping.wait()
        for channel in self._channels.values():
            channel.close()

    async def _stream(self, viewer: Viewer, channel: Channel, scope: Scope, send: Send) -> None:
        until = self._clock.monotonic() + LIFE_S
        scope["status"], scope["sent"] = 200, 0
        headers = head(scope, "text/event-stream; charset=utf-8", "no-store")
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        last, data = b"", HELLO
        while self._clock.monotonic() < until and not channel.closed:
            viewer.blocked_since = self._clock.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": True})
            viewer.blocked_since = None
            scope["sent"] += len(data)
            data = await channel.next(last)
            last = last if data is BEAT else data
        await send({"type": "http.response.body", "body": b""})


async def _gone(receive: Receive, stream: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.cancel()
