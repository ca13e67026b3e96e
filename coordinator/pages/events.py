"""Server-sent events of a run: one look at the run a second for everybody who watches it.

A viewer costs a task, its place in a set, and nothing while nothing changes. There is no queue: who
is behind gets the newest state, once. Who does not read is dropped, and every stream ends after a
while, so that none is for ever; a browser comes back by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import msgspec

from coordinator.pages.replies import Receive, Scope, Send, head
from shared.clock import Clock
from shared.errors import Unavailable

TICK_S = 1.0
SEND_S = 20.0  # a viewer that does not take one event within this time is dropped
BEAT_S = 15.0  # a comment as often as that, where nothing changes: proxies keep the stream open
LIFE_S = 1800.0
RETRY_MS = 5000

State = Callable[[], Awaitable[msgspec.Struct]]


class Channel:
    """Newest state of one run, and those who watch it."""

    def __init__(self, clock: Clock, state: State) -> None:
        self._clock = clock
        self._state = state
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.viewers = 0
        self.newest = b""

    def enter(self) -> None:
        """Count a viewer; the first one starts the look once a second."""
        self.viewers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._look())

    def leave(self) -> None:
        """Uncount a viewer; the last one ends it."""
        self.viewers -= 1
        if not self.viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _look(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # the database may be away for a moment
                self._put(await self._state())
            await self._clock.sleep(TICK_S)

    def _put(self, state: msgspec.Struct) -> None:
        data = b"event: state\ndata: " + msgspec.json.encode(state) + b"\n\n"
        if data != self.newest:
            self.newest = data
            self._changed.set()
            self._changed = asyncio.Event()

    async def wait(self, known: bytes, timeout_s: float) -> bytes:
        """Return the newest event once it is another than `known`, or b"" when time is up."""
        if self.newest in (b"", known):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        return b"" if self.newest == known else self.newest


class Broadcast:
    """Streams of all runs; so many viewers and no more."""

    def __init__(self, clock: Clock, viewers_max: int) -> None:
        self._clock = clock
        self._viewers_max = viewers_max
        self._channels: dict[str, Channel] = {}

    @property
    def viewers(self) -> int:
        """Return how many streams are open."""
        return sum(channel.viewers for channel in self._channels.values())

    async def serve(
        self, name: str, state: State, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send the state of a run now and whenever it changes. Raises Unavailable when there are
        too many viewers.
        """
        if self.viewers >= self._viewers_max:
            raise Unavailable("too many are watching; look again in a minute", retry_after_s=60.0)
        channel = self._channels.setdefault(name, Channel(self._clock, state))
        channel.enter()
        gone = asyncio.ensure_future(_gone(receive))
        stream = asyncio.ensure_future(self._stream(channel, scope, send))
        try:
            await asyncio.wait((gone, stream), return_when=asyncio.FIRST_COMPLETED)
            if stream.done():
                stream.result()
        finally:
            gone.cancel()
            stream.cancel()
            await asyncio.gather(gone, stream, return_exceptions=True)
            channel.leave()
            if not channel.viewers:
                self._channels.pop(name, None)

    async def _stream(self, channel: Channel, scope: Scope, send: Send) -> None:
        until = self._clock.monotonic() + LIFE_S
        scope["status"], scope["sent"] = 200, 0
        headers = head(scope, "text/event-stream; charset=utf-8", "no-store")
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        known, data = b"", b"retry: %d\n\n" % RETRY_MS
        while self._clock.monotonic() < until:
            message = {"type": "http.response.body", "body": data, "more_body": True}
            try:
                await asyncio.wait_for(send(message), SEND_S)
            except TimeoutError:
                return  # the server cuts a reply off that did not end
            scope["sent"] += len(data)
            news = await channel.wait(known, BEAT_S)
            known, data = news or known, news or b": still here\n\n"
        await send({"type": "http.response.body", "body": b""})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
