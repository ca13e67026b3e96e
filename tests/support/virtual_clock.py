"""Clock that a test moves by hand: time stands still until `advance`."""

from __future__ import annotations

import asyncio
import heapq
import itertools


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
