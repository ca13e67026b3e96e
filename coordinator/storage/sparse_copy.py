"""Local copy of a stored object that has only the ranges of bytes which were needed."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typing_extensions import override

from coordinator.storage.blobs import READ_BYTES

AHEAD_BYTES = 64 << 10  # bytes fetched at least, since a small read is usually followed by others
FETCH_BYTES = 8 * READ_BYTES


class SparseCopy(io.FileIO):
    """New file of an object's size, with holes in place of bytes that were not fetched; reading
    fetches missing bytes first. `get` returns the object's bytes [start, stop).
    """

    def __init__(self, path: Path, size: int, get: Callable[[int, int], Any]) -> None:
        super().__init__(path, "x+")
        self.truncate(size)
        self._size = size
        self._get = get
        self._newest = 0, 0  # range that was fetched last

    @override
    def read(self, size: int | None = -1, /) -> bytes:
        start = self.tell()
        self.fetch(start, self._size if size is None or size < 0 else start + size, AHEAD_BYTES)
        return super().read(size)

    def fetch(self, start: int, stop: int, ahead: int = 0) -> None:
        """Copy the bytes [start, stop), and at least `ahead` bytes from `start` on."""
        if self._newest[0] <= start and min(stop, self._size) <= self._newest[1]:
            return
        stop, place = min(self._size, max(stop, start + ahead)), self.tell()
        self._newest = start, stop
        self.seek(start)
        for begin in range(start, stop, FETCH_BYTES):
            left = memoryview(self._get(begin, min(stop, begin + FETCH_BYTES)))
            while left:  # a disk that fills up takes a part, and refuses the next
                left = left[self.write(left) :]
        self.seek(place)
