"""The owner's limit on bytes a second."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.virtual_clock import VirtualClock
from volunteer.net.bandwidth import BYTES_PER_S_MIN, MBIT, Throttle


async def seconds_for(throttle: Throttle, clock: VirtualClock, pieces: list[int]) -> float:
    """Virtual seconds that a flow of pieces takes."""
    began = clock.now()

    async def flow() -> None:
        for piece in pieces:
            await throttle.take(piece)

    task = asyncio.create_task(flow())
    while not task.done():
        await clock.advance(0.01)
    return clock.now() - began


async def test_a_flow_keeps_to_its_rate() -> None:
    clock = VirtualClock()
    throttle = Throttle(clock)
    throttle.limit(8)  # a megabyte a second
    pieces = [throttle.piece_bytes] * 40
    spent = await seconds_for(throttle, clock, pieces)
    assert spent == pytest.approx(sum(pieces) / 1e6, abs=1.1)


async def test_without_a_limit_nothing_waits() -> None:
    clock = VirtualClock()
    throttle = Throttle(clock)
    assert await seconds_for(throttle, clock, [10**9] * 3) < 0.05
    assert throttle.piece_bytes == 0
    throttle.limit(1)
    throttle.limit(0)
    assert await seconds_for(throttle, clock, [10**9] * 3) < 0.05


async def test_a_pause_is_not_saved_up_for_a_burst() -> None:
    clock = VirtualClock()
    throttle = Throttle(clock)
    throttle.limit(8)
    await clock.advance(3600)
    assert await seconds_for(throttle, clock, [MBIT] * 40) >= 3.9


async def test_the_slowest_rate_still_passes_for_an_honest_upload() -> None:
    throttle = Throttle(VirtualClock())
    throttle.limit(0.000001)
    assert throttle.piece_bytes >= 1024
    assert throttle.piece_bytes / BYTES_PER_S_MIN <= 1


async def test_what_is_only_counted_makes_the_next_wait() -> None:
    clock = VirtualClock()
    throttle = Throttle(clock)
    throttle.limit(8)
    assert throttle.charge(3_000_000) == pytest.approx(2.0)  # one second is credit
    assert await seconds_for(throttle, clock, [1_000_000]) == pytest.approx(3.0, abs=0.1)
