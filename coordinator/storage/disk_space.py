"""Free disk space: below the floor uploads are refused; they resume when space returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from shared.clock import Clock
from shared.errors import StorageFull
from shared.machine_limits import disk_bytes
from shared.text import size

LOOK_S = 2.0
RETRY_S = 30.0

log = structlog.get_logger("space")


def _free(path: Path) -> int:
    return disk_bytes(path)[0]


class Space:
    """Watches the disk that data directory and blobs lie on."""

    def __init__(
        self,
        path: Path,
        floor_bytes: int,
        clock: Clock,
        free: Callable[[Path], int] = _free,
    ) -> None:
        self._path = path
        self.floor_bytes = floor_bytes
        self._clock = clock
        self._free = free
        self.read_only = not self._enough()

    def free_bytes(self) -> int:
        """Return the bytes that are free now."""
        return self._free(self._path)

    def look(self) -> bool:
        """Measure; returns whether new things are accepted."""
        short = not self._enough()
        if short != self.read_only:
            self.read_only = short
            log.warning(
                "disk nearly full: read-only" if short else "space is back", path=str(self._path)
            )
        return not short

    def _enough(self) -> bool:
        try:
            return self._free(self._path) >= self.floor_bytes
        except OSError:  # the disk itself is in trouble: refuse rather than guess
            return False

    def check_command(self) -> None:
        """Raises StorageFull where a command of the organiser would store more on a full disk."""
        if not self._enough():
            raise StorageFull(
                f"{self._path} has less than {size(self.floor_bytes)} free (setting "
                "space_floor_bytes): free some, then do it again"
            )

    def check(self, more: int = 0) -> None:
        """Raises StorageFull when `more` bytes would go below the floor."""
        if self.read_only or (more and self._free(self._path) - more < self.floor_bytes):
            raise StorageFull(
                "the coordinator's disk is nearly full; keep your result, retry later",
                retry_after_s=RETRY_S,
            )

    async def run(self, stop: asyncio.Event) -> None:
        """Look again and again until `stop`."""
        if self.read_only:
            log.warning("disk nearly full: read-only", path=str(self._path))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            while not stop.is_set():
                await asyncio.to_thread(self.look)
                tick = asyncio.ensure_future(self._clock.sleep(LOOK_S))
                await asyncio.wait((stopping, tick), return_when=asyncio.FIRST_COMPLETED)
                tick.cancel()
        finally:
            stopping.cancel()
