"""Disk space: below the floor, or while a disk cannot be written, uploads are refused."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import structlog

from shared.clock import Clock, pause
from shared.errors import StorageFull, why
from shared.programs.machine_limits import disk_bytes
from shared.text import size

LOOK_S = 2.0
RETRY_S = 30.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk, which the free bytes report better

log = structlog.get_logger("space")


def _free(path: Path) -> int:
    return disk_bytes(path)[0]


def _write(path: Path) -> None:
    """Write a file and remove it. Raises OSError where the disk takes no writes."""
    handle, name = tempfile.mkstemp(prefix="probe.", dir=path)
    try:
        os.write(handle, b"?")
    finally:
        os.close(handle)
        os.unlink(name)


class Space:
    """Watches the disks of the data directory and of the blobs."""

    def __init__(
        self,
        path: Path,
        floor_bytes: int,
        clock: Clock,
        scratch: Path | None = None,
        free: Callable[[Path], int] = _free,
    ) -> None:
        self._path = path
        self.floor_bytes = floor_bytes
        self._clock = clock
        self._free = free
        self._written = (path,) if scratch is None else (path, scratch)
        self.broken = ""  # reason why a disk takes no writes, however much of it is free
        self.read_only = not self._enough()

    def free_bytes(self) -> int:
        """Return the bytes that are free now."""
        return self._free(self._path)

    @property
    def why(self) -> str:
        """Return why no new data is accepted; "" where it is."""
        if not self.read_only:
            return ""
        return self.broken or f"{size(self.free_bytes())} are free"

    def look(self) -> bool:
        """Measure the free space and try to write; return whether new data is accepted."""
        short = not self._enough()
        if short != self.read_only:
            self.read_only = short
            log.warning(
                "nothing new is accepted" if short else "everything is accepted again",
                path=str(self._path),
                why=self.why,
            )
        return not short

    def _enough(self) -> bool:
        self.broken = self._try()
        try:
            return not self.broken and self._free(self._path) >= self.floor_bytes
        except OSError:  # the disk itself fails, so refuse
            return False

    def _try(self) -> str:
        """Return why a disk cannot be written; "" where each can."""
        for path in self._written:
            try:
                _write(path)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    return f"{path} cannot be written: {why(error)}"
        return ""

    def check_command(self) -> None:
        """Raise StorageFull where a command of the organiser would store more on a full disk."""
        if not self._enough():
            raise StorageFull(
                self.broken
                or f"{self._path} has less than {size(self.floor_bytes)} free (setting "
                "space_floor_bytes): free some, then do it again"
            )

    def check(self, more: int = 0) -> None:
        """Raise StorageFull if `more` bytes would leave too little free, or none can be written."""
        if (
            self.broken
            or self.read_only
            or (more and self._free(self._path) - more < self.floor_bytes)
        ):
            problem = "refuses to be written" if self.broken else "is nearly full"
            raise StorageFull(
                f"the coordinator's disk {problem}; keep your result, retry later",
                retry_after_s=RETRY_S,
            )

    async def run(self, stop: asyncio.Event) -> None:
        """Measure repeatedly until `stop`."""
        if self.read_only:
            log.warning("nothing new is accepted", path=str(self._path), why=self.why)
        while not stop.is_set():
            await asyncio.to_thread(self.look)
            await pause(self._clock, LOOK_S, stop)
