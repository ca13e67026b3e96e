"""Limits on bandwidth, for connections that people share, and on the time of a request."""

from __future__ import annotations

import asyncio

from shared.clock import Clock

MBIT = 125_000  # bytes
BYTES_PER_S_MIN = 6_250  # well above the rate below which the coordinator ends a body
PIECE_S = 0.5  # time in which a piece is sent; short, so that the flow stays even
PIECE_BYTES_MIN = 1024
CREDIT_S = 1.0  # seconds of unused bandwidth that may be used later


class Throttle:
    """Limits a flow of bytes to a rate; without a rate it never waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._bytes_per_s = 0.0
        self._free_at = float("-inf")  # monotonic time at which the bytes so far fit the rate

    def limit(self, mbit: float) -> None:
        """Set the rate in Mbit/s; 0 = no limit."""
        self._bytes_per_s = max(mbit * MBIT, BYTES_PER_S_MIN) if mbit > 0 else 0.0

    @property
    def piece_bytes(self) -> int:
        """Return the size of pieces that keep the flow even; 0 = any."""
        if not self._bytes_per_s:
            return 0
        return max(PIECE_BYTES_MIN, int(self._bytes_per_s * PIECE_S))

    def charge(self, count: int) -> float:
        """Count `count` bytes as moved. Return the seconds to wait before the next bytes."""
        if not self._bytes_per_s:
            return 0.0
        now = self._clock.monotonic()
        self._free_at = max(self._free_at, now - CREDIT_S) + count / self._bytes_per_s
        return max(0.0, self._free_at - now)

    async def take(self, count: int) -> None:
        """Wait until `count` more bytes may pass."""
        wait = self.charge(count)
        if wait > 0:
            await self._clock.sleep(wait)


# The timeouts of httpx limit single reads and writes; `TimeLimit` limits the whole request.

SLOWEST_BYTES_PER_S = 1024  # a slower transfer counts as broken


class TimeLimit:
    """Time limit of a request: fixed seconds, and more for every byte that moves."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._scope: asyncio.Timeout | None = None

    def running(self) -> asyncio.Timeout:
        """Run the time limit while entered. Raises TimeoutError."""
        self._scope = asyncio.timeout(self._seconds)
        return self._scope

    def moved(self, count: int) -> None:
        """Extend the limit for `count` bytes moved."""
        if self._scope is not None and not self._scope.expired():
            until = self._scope.when()
            if until is not None:
                self._scope.reschedule(until + count / SLOWEST_BYTES_PER_S)
