"""The diary is kept over restarts, and a mark is told once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tests.support.virtual_clock import VirtualClock
from tests.tui.scenes import ME
from volunteer.agent.diary_keeper import DiaryKeeper
from volunteer.control import events
from volunteer.control.event_bus import Hub
from volunteer.control.events import AnyEvent
from volunteer.stats.diary import Diary


@asynccontextmanager
async def keeping(path: Path) -> AsyncIterator[tuple[Hub, DiaryKeeper, list[AnyEvent]]]:
    clock = VirtualClock()
    hub = Hub(clock)
    keeper = DiaryKeeper(path, hub, clock)
    told: list[AnyEvent] = []

    async def listen() -> None:
        with hub.subscribe() as stream:
            told.extend([event async for event in stream])

    listening = asyncio.create_task(listen())
    task = asyncio.create_task(keeper.run())
    await asyncio.sleep(0)
    try:
        yield hub, keeper, told
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        hub.close()  # ends the listening
        await listening


async def see(hub: Hub, merged: int) -> None:
    hub.emit(events.Credits(me=replace(ME, merged=merged)))
    for _ in range(4):
        await asyncio.sleep(0)


def celebrated(told: list[AnyEvent]) -> list[str]:
    return [event.message for event in told if isinstance(event, events.Celebrated)]


async def test_a_mark_is_told_once_also_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "diary.json"
    async with keeping(path) as (hub, _, told):
        await see(hub, 49)
        await see(hub, 50)
        await see(hub, 51)
    assert celebrated(told) == ["50 contributions merged"]
    async with keeping(path) as (hub, keeper, told):
        await see(hub, 52)
        assert keeper.diary.days[-1].merged == 52
    assert celebrated(told) == []
    assert msgspec.json.decode(path.read_bytes(), type=Diary).days[-1].rank == ME.rank


async def test_a_damaged_diary_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "diary.json"
    path.write_text("{")
    async with keeping(path) as (hub, keeper, told):
        await see(hub, 50)
        assert len(keeper.diary.days) == 1
    assert celebrated(told) == []
    assert (tmp_path / "diary.json.damaged").exists()
