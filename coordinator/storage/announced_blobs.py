"""Announcements of the blobs that this process writes.

A blob is announced in the database before it is written, and a sweep that deletes the blob ends its
announcement: bytes written under an announcement are in the store while its serial is valid.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeAlias

SERIALS_S = 7200.0  # time in which a process registers a written blob, or else writes it again

# Announces a name in the database; returns the serial of the announcement.
Announcer: TypeAlias = Callable[[str], Awaitable[str]]


async def unannounced(sha256: str) -> str:
    """Announce no blob, for a store without a database."""
    return ""


class AnnouncedBlobs:
    """Serials of the announcements under which this process has written blobs, by name."""

    def __init__(self, announce: Announcer) -> None:
        self._announce = announce
        self._serials: dict[str, str] = {}
        # times of writing (monotonic), names and serials, oldest first
        self._ages = deque[tuple[float, str, str]]()

    @property
    def serials(self) -> Mapping[str, str]:
        return self._serials

    @asynccontextmanager
    async def writing(self, sha256: str) -> AsyncIterator[None]:
        """Announce a blob, which the block writes; its serial is noted at the end of the block."""
        serial = await self._announce(sha256)
        yield
        self._serials[sha256] = serial
        self._ages.append((time.monotonic(), sha256, serial))
        self._forget(time.monotonic() - SERIALS_S)

    def _forget(self, before: float) -> None:
        while self._ages and self._ages[0][0] < before:
            _, sha256, serial = self._ages.popleft()
            if self._serials.get(sha256) == serial:
                del self._serials[sha256]
