"""Bytes a second that may be sent or received, for connections that are shared with people."""

from __future__ import annotations

import asyncio

from shared.clock import Clock

MBIT = 125_000  # bytes
BYTES_PER_S_MIN = 6_250  # slower than this a coordinator takes an honest upload for an attack
PIECE_S = 0.5  # a piece takes about so long, so that the flow stays even
PIECE_BYTES_MIN = 1024
CREDIT_S = 1.0  # seconds of unused rate that may be used later


class Throttle:
    """Holds a flow of bytes to a rate; without a rate it costs nothing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._bytes_per_s = 0.0
        self._free_at = float("-inf")  # monotonic: when everything so far is paid for

    def limit(self, mbit: float) -> None:
        """Set the rate in Mbit/s; 0 = none."""
        self._bytes_per_s = max(mbit * MBIT, BYTES_PER_S_MIN) if mbit > 0 else 0.0

    @property
    def piece_bytes(self) -> int:
        """Return the size of the pieces to pass on; 0 = any."""
        if not self._bytes_per_s:
            return 0
        return max(PIECE_BYTES_MIN, int(self._bytes_per_s * PIECE_S))

    def charge(self, count: int) -> float:
        """Count passing bytes. Returns the seconds to wait before the next."""
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


# The time that one request may take in all. Timeouts of a client are for single reads and writes:
# an answer that

SLOWEST_BYTES_PER_S = 1024  # a slower transfer counts as broken


class Limit:
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
