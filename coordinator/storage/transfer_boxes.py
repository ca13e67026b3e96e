"""Boxes: folders of files in transit between an organiser's command and the server, deleted after a
day.

A box carries a dataset's sources to the server, or an exported run from it. Volunteers cannot reach
boxes.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.storage.blobs import FileStream, Pieces, in_pool, open_in_pool, storage_errors
from shared.clock import Clock, machine_time, pause
from shared.errors import BadRequest, NotFound, TooLarge
from shared.files.deletions import delete_folder
from shared.protocol.limits import UPLOAD_BYTES_MAX
from shared.units import DAY_S, HOUR_S

if TYPE_CHECKING:
    from coordinator.storage.disk_space import Space

KEPT_S = DAY_S
SWEEP_S = HOUR_S
BATCH_BYTES = 2 << 20  # bytes after which the disk space is checked and a file is written
_BOX = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class TransferBoxes:
    """Boxes below a directory; a box is named by the client that fills it, with 128 random bits."""

    def __init__(self, directory: Path, clock: Clock, space: Space) -> None:
        self._directory = directory
        self._clock = clock
        self._space = space

    def folder(self, box: str) -> Path:
        """Return the folder of a box. Raises BadRequest for a malformed name."""
        if not _BOX.fullmatch(box):
            raise BadRequest("a box is named by 32 hexadecimal digits")
        return self._directory / box

    def _path(self, box: str, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise BadRequest("a file name has letters, digits, '.', '_' and '-', at most 200")
        return self.folder(box) / name

    def files(self, box: str) -> tuple[Path, ...]:
        """Return the files of a box, by name. Raises NotFound."""
        folder = self.folder(box)
        if not folder.is_dir():
            raise NotFound("there is no such box of files (any more)")
        return tuple(sorted(folder.iterdir()))

    async def put(self, box: str, name: str, stream: AsyncIterator[bytes]) -> int:
        """Store one file, replacing an earlier one, and return its size in bytes. Raises TooLarge,
        StorageFull.
        """
        path = self._path(box, name)
        self._space.check()
        await in_pool(lambda: path.parent.mkdir(parents=True, exist_ok=True, mode=0o700))
        size, batch, unchecked = 0, [], 0
        with storage_errors(), await open_in_pool(lambda: path.open("wb")) as file:
            async for data in stream:
                size, unchecked = size + len(data), unchecked + len(data)
                if size > UPLOAD_BYTES_MAX:
                    raise TooLarge(f"a file may have at most {UPLOAD_BYTES_MAX} bytes")
                batch.append(data)
                if unchecked >= BATCH_BYTES:
                    self._space.check(unchecked)
                    await in_pool(file.write, b"".join(batch))
                    batch, unchecked = [], 0
            await in_pool(file.write, b"".join(batch))
        return size

    async def get(self, box: str, name: str) -> tuple[int, Pieces]:
        """Return size and bytes of one file. Raises NotFound."""
        path = self._path(box, name)
        try:
            file = await open_in_pool(lambda: path.open("rb", buffering=0))
        except OSError as error:
            raise NotFound("there is no such file in this box (any more)") from error
        size = os.fstat(file.fileno()).st_size
        return size, FileStream(file, 0, size)

    def remove(self, box: str) -> None:
        delete_folder(self.folder(box), "moved")

    async def run(self, stop: asyncio.Event) -> None:
        """Delete old boxes, every hour, until `stop`."""
        while not stop.is_set():
            await in_pool(self.expire, machine_time(self._clock))
            await pause(self._clock, SWEEP_S, stop)

    def expire(self, now: float) -> None:
        """Delete boxes that were not touched for a day."""
        if self._directory.is_dir():
            for folder in self._directory.iterdir():
                if folder.stat().st_mtime < now - KEPT_S:
                    delete_folder(folder, "expired")
