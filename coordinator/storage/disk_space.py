"""Watch of the disk space: uploads are refused below a floor, or while a disk takes no writes."""

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
from shared.files.deletions import delete_file
from shared.programs.machine_limits import disk_bytes
from shared.text import size

LOOK_S = 5.0  # time between two measurements
RETRY_S = 30.0  # time after which a refused upload is worth another try

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk, which can still be read

log = structlog.get_logger("space")


def _free(path: Path) -> int:
    return disk_bytes(path)[0]


def _probe(path: Path) -> None:
    """Write a file below `path` and remove it. Raises OSError if the disk takes no writes."""
    handle, name = tempfile.mkstemp(prefix="probe.", dir=path)
    try:
        os.write(handle, b"?")
    finally:
        os.close(handle)
        delete_file(Path(name), "scratch")


class Space:
    """Watch of the disks of the data directory and of the blobs (`scratch` is below the blobs)."""

    def __init__(
        self,
        path: Path,
        floor_bytes: int,
        clock: Clock,
        scratch: Path | None = None,
        free: Callable[[Path], int] = _free,
    ) -> None:
        self.floor_bytes = floor_bytes
        self._clock = clock
        self._free = free
        self._places = (path,) if scratch is None else (path, scratch)
        self.broken = ""  # reason why a disk takes no writes; "" if all take some
        self.full = ""  # reason why a write found no room, whatever the disk reports as free
        self.read_only = not self._enough()

    def free_bytes(self) -> int:
        """Return the bytes that are free now on the disk with less free space."""
        return self._least()[0]

    def _least(self) -> tuple[int, Path]:
        """Return the free bytes of the disk with less free space, and its path; a disk that cannot
        be read counts as 0.
        """
        return min((self._free_on(place), place) for place in self._places)

    def _free_on(self, place: Path) -> int:
        try:
            return self._free(place)
        except OSError:
            return 0

    @property
    def why(self) -> str:
        """Return the reason why no new data is accepted; "" while it is accepted."""
        if not self.read_only:
            return ""
        if self.broken or self.full:
            return self.broken or self.full
        free, place = self._least()
        return f"{size(free)} are free for {place}"

    def look(self) -> bool:
        """Measure the free space and try to write; return True if new data is accepted."""
        short = not self._enough()
        if short != self.read_only:
            self.read_only = short
            log.warning(
                "nothing new is accepted" if short else "everything is accepted again",
                why=self.why,
            )
        return not short

    def _enough(self) -> bool:
        self.broken, self.full = self._try()
        return not (self.broken or self.full) and self._least()[0] >= self.floor_bytes

    def _try(self) -> tuple[str, str]:
        """Write to each disk; return the values for `broken` and `full`."""
        broken = full = ""
        for place in self._places:
            try:
                _probe(place)
            except OSError as error:
                reason = f"{place} cannot be written: {why(error)}"
                broken, full = (broken, reason) if error.errno in NO_ROOM else (reason, full)
        return broken, full

    def check_command(self) -> None:
        """Raise StorageFull if a disk is too full for an organiser's command that stores data."""
        if not self._enough():
            raise StorageFull(
                self.broken
                or f"{self._least()[1]} has less than {size(self.floor_bytes)} free (setting "
                "space_floor_bytes): free some, then do it again"
            )

    def check(self, more: int = 0) -> None:
        """Raise StorageFull if `more` bytes leave too little free, or a disk takes no writes."""
        if self.broken or self.read_only or (more and self._least()[0] - more < self.floor_bytes):
            problem = "refuses to be written" if self.broken else "is nearly full"
            raise StorageFull(
                f"the coordinator's disk {problem}; keep your result, retry later",
                retry_after_s=RETRY_S,
            )

    async def run(self, stop: asyncio.Event) -> None:
        """Measure repeatedly until `stop`."""
        if self.read_only:
            log.warning("nothing new is accepted", why=self.why)
        while not stop.is_set():
            await asyncio.to_thread(self.look)
            await pause(self._clock, LOOK_S, stop)
