"""Time as a parameter: the system's clock, or one that tests and the simulator move by hand."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """Source of time for services. `now` is UTC epoch seconds, `monotonic` only for durations."""

    def now(self) -> float: ...

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own clock, shifted by `offset_s` (the database's clock minus ours)."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def now(self) -> float:
        return time.time() + self.offset_s

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class VirtualClock:
    """Stands still until `advance` is called, which wakes sleepers in the order of their
    instants.
    """

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = start
        self._ids = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._ids), waiter))
        await waiter

    @property
    def next_at(self) -> float | None:
        """Return when the earliest sleeper wants to wake."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        return self._sleepers[0][0] if self._sleepers else None

    async def advance(self, seconds: float) -> None:
        """Move on by `seconds`, letting everything that was due run in between."""
        until = self._now + seconds
        while (at := self.next_at) is not None and at <= until:
            self._now = max(self._now, at)
            _, _, waiter = heapq.heappop(self._sleepers)
            if not waiter.done():
                waiter.set_result(None)
            for _ in range(10):  # let the woken run up to their next wait
                await asyncio.sleep(0)
        self._now = until
        for _ in range(10):
            await asyncio.sleep(0)
