"""A pause until the next login ends with it, and with nothing else."""

from __future__ import annotations

import asyncio

from tests.support.virtual_clock import VirtualClock
from volunteer.agent.lifecycle import Lifecycle
from volunteer.agent.pause_board import TIME_S, YOU, PauseBoard
from volunteer.control.commands import NEXT_LOGIN
from volunteer.control.event_bus import EventBus


async def test_a_pause_ends_when_somebody_logs_in() -> None:
    clock = VirtualClock()
    logins = [100.0]
    board = PauseBoard(Lifecycle(clock), EventBus(clock), lambda: logins[-1])
    board.pause(by=YOU, message="paused", until="the next login", ends_at=NEXT_LOGIN)
    board.pause("cpu", by=YOU, message="paused", until="you resume")
    keeping = asyncio.create_task(board.keep_time())

    async def look() -> None:
        while clock.next_at is None:
            await asyncio.sleep(0)
        await clock.advance(TIME_S)

    for _ in range(3):
        await look()
    assert board.paused_by("cuda:0", YOU)
    logins.append(500.0)
    await look()
    await look()
    assert not board.paused_by("cuda:0", YOU)
    assert board.paused_by("cpu", YOU)  # no other pause ends with it
    keeping.cancel()
