"""Local copy of a few ranges of a stored object."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coordinator.storage.blobs import READ_BYTES

AHEAD_BYTES = 64 << 10  # bytes read ahead, since small reads seldom come alone
FETCH_BYTES = 8 * READ_BYTES


class SparseCopy(io.FileIO):
    """File of an object's size with the fetched bytes, and holes between; reading fetches missing
    bytes first.
    """

    def __init__(self, path: Path, size: int, get: Callable[[int, int], Any]) -> None:
        super().__init__(path, "x+")
        self.truncate(size)
        self._size = size
        self._get = get
        self._newest = 0, 0

    def read(self, size: int | None = -1, /) -> bytes:
        start = self.tell()
        self.fetch(start, self._size if size is None or size < 0 else start + size, AHEAD_BYTES)
        return super().read(size)

    def fetch(self, start: int, stop: int, ahead: int = 0) -> None:
        """Copy the bytes [start, stop), and some ahead."""
        if self._newest[0] <= start and min(stop, self._size) <= self._newest[1]:
            return
        stop, place = min(self._size, max(stop, start + ahead)), self.tell()
        self._newest = start, stop
        self.seek(start)
        for begin in range(start, stop, FETCH_BYTES):
            self.write(self._get(begin, min(stop, begin + FETCH_BYTES)))
        self.seek(place)
