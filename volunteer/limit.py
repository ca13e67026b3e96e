"""The time that one request may take in all. Timeouts of a client are for single reads and writes: an answer that
dribbles would go on for ever, and whoever waits for it would look alive.
"""

from __future__ import annotations

import asyncio

SLOWEST_BYTES_PER_S = 1024  # what is slower has broken off


class Limit:
    """So many seconds for a request, and more for every byte that moves."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._scope: asyncio.Timeout | None = None

    def running(self) -> asyncio.Timeout:
        """The time runs while this is entered; it raises TimeoutError."""
        self._scope = asyncio.timeout(self._seconds)
        return self._scope

    def moved(self, count: int) -> None:
        """So many bytes came or went."""
        if self._scope is not None and not self._scope.expired():
            until = self._scope.when()
            if until is not None:
                self._scope.reschedule(until + count / SLOWEST_BYTES_PER_S)
