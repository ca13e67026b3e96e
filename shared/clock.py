"""Clocks that services take as a parameter: the system's, the coordinator's, or a test's."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Source of time for services. `now` is UTC epoch seconds, `monotonic` only for durations."""

    def now(self) -> float: ...

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


def machine_time(clock: Clock) -> float:
    """Return the time of the machine's own clock, in UTC epoch seconds, without the shift to the
    database's clock. Times of files are compared with it.
    """
    return clock.now() - getattr(clock, "offset_s", 0.0)


async def pause(clock: Clock, seconds: float, stop: asyncio.Event) -> None:
    """Sleep for `seconds`, or until `stop` is set."""
    waits = [asyncio.ensure_future(wait) for wait in (stop.wait(), clock.sleep(seconds))]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


class SystemClock:
    """Clock of this machine, shifted by `offset_s` (the database's clock minus the machine's)."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def now(self) -> float:
        return time.time() + self.offset_s

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ServerClock:
    """Clock of the coordinator: the time of its last reply plus the time since, which does not jump
    when the local clock is set.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.learn(clock.now())

    def learn(self, now: float) -> None:
        """Set the clock by the coordinator's time in a reply."""
        self._offset_s = now - self._clock.monotonic()

    def now(self) -> float:
        return self._clock.monotonic() + self._offset_s

    def local(self, instant: float) -> float:
        """Convert an instant of the coordinator's clock to the local clock."""
        return instant - self.now() + self._clock.now()
