"""Live figures: one look a second for all viewers, none kept waiting or for ever."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import msgspec
import pytest

from coordinator.pages import event_stream
from coordinator.pages.event_stream import Broadcast
from shared.errors import Unavailable
from tests.support.virtual_clock import VirtualClock


class State(msgspec.Struct):
    """A state that changes."""

    version: int


class Viewer:
    """A browser's stream, and all that it got. `blocked`: it does not read."""

    def __init__(self, broadcast: Broadcast, source: Source, blocked: bool = False) -> None:
        self.got: list[bytes] = []
        self.news = asyncio.Event()
        self.left = asyncio.Event()
        self._blocked = blocked
        self.scope: dict[str, Any] = {"type": "http", "headers": []}
        self.task = asyncio.create_task(
            broadcast.serve("tiny", source.read, self.scope, self._receive, self._send)
        )

    async def _receive(self) -> MutableMapping[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            if self._blocked:
                await asyncio.Event().wait()
            self.got.append(message["body"])
            self.news.set()

    def states(self) -> list[int]:
        """Return the versions that were sent, in order."""
        return [
            int(msgspec.json.decode(piece.split(b"data: ")[1])["version"])
            for piece in self.got
            if piece.startswith(b"event: state")
        ]

    async def sees(self, version: int) -> None:
        while version not in self.states():
            self.news.clear()
            await self.news.wait()


class Source:
    """State of a run, and how often it was read."""

    def __init__(self) -> None:
        self.version, self.reads = 0, 0

    async def read(self) -> State:
        self.reads += 1
        return State(self.version)


async def settled() -> None:
    """Run every task of the loop until all wait."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_all_viewers_share_one_look_a_second_and_nothing_is_repeated() -> None:
    clock, source = VirtualClock(), Source()
    broadcast = Broadcast(clock, 100, asyncio.Event())
    viewers = [Viewer(broadcast, source) for _ in range(50)]
    for viewer in viewers:
        await viewer.sees(0)
    for _ in range(3):
        await clock.advance(1.0)
    await settled()
    assert source.reads <= 5
    assert all(viewer.states() == [0] for viewer in viewers)
    source.version = 7
    await clock.advance(1.0)
    for viewer in viewers:
        await viewer.sees(7)
        assert viewer.states() == [0, 7]
        viewer.left.set()
    await asyncio.gather(*(viewer.task for viewer in viewers))
    assert broadcast.viewers == 0
    reads = source.reads
    await clock.advance(10.0)
    await settled()
    assert source.reads == reads  # nobody looks any more


async def test_a_viewer_too_many_is_told_to_come_back() -> None:
    broadcast, source = Broadcast(VirtualClock(), 1, asyncio.Event()), Source()
    first = Viewer(broadcast, source)
    await first.sees(0)
    with pytest.raises(Unavailable, match="too many"):
        await Viewer(broadcast, source).task
    first.left.set()
    await first.task
    second = Viewer(broadcast, source)
    await second.sees(0)
    second.left.set()
    await second.task


async def test_who_never_reads_is_dropped() -> None:
    clock = VirtualClock()
    broadcast = Broadcast(clock, 10, asyncio.Event())
    deaf = Viewer(broadcast, Source(), blocked=True)
    await settled()
    assert broadcast.viewers == 1
    await clock.advance(event_stream.SEND_S + 2 * event_stream.TICK_S)
    await deaf.task
    assert deaf.got == []
    assert broadcast.viewers == 0


async def test_a_stream_is_not_for_ever() -> None:
    clock, source = VirtualClock(), Source()
    viewer = Viewer(Broadcast(clock, 10, asyncio.Event()), source)
    await viewer.sees(0)
    await clock.advance(event_stream.LIFE_S + 1)
    source.version = 1
    await clock.advance(event_stream.TICK_S)
    async with asyncio.timeout(120):
        await viewer.task
    assert viewer.got[-1] == b""


async def test_where_nothing_changes_the_stream_stays_open() -> None:
    clock, source = VirtualClock(), Source()
    viewer = Viewer(Broadcast(clock, 10, asyncio.Event()), source)
    await viewer.sees(0)
    for _ in range(int(event_stream.BEAT_S) + 1):
        await clock.advance(event_stream.TICK_S)
        await settled()
    assert viewer.got.count(event_stream.BEAT) == 1
    viewer.left.set()
    await viewer.task


async def test_streams_end_with_the_server() -> None:
    stopping, source = asyncio.Event(), Source()
    broadcast = Broadcast(VirtualClock(), 10, stopping)
    viewers = [Viewer(broadcast, source) for _ in range(3)]
    for viewer in viewers:
        await viewer.sees(0)
    stopping.set()
    await asyncio.gather(*(viewer.task for viewer in viewers))
    assert broadcast.viewers == 0
    with pytest.raises(Unavailable):
        await Viewer(broadcast, source).task
