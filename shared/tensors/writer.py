"""Writer of a file that writes and hashes its bytes while the next ones are computed, and syncs it
meanwhile if it must survive a power cut.

    fill a buffer ──> a thread writes and hashes it, while others are filled
                                     └──> every few MiB another thread syncs the file so far

Computing, hashing and syncing take about as long each; in sequence they took most of the time of a
merge. Files that are not synced are written without threads: volunteers write them, and the other
cores belong to the machine's owner.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from shared.tensors.slices import aligned

PIECE_BYTES = 512 << 10  # written and hashed at once
PIECES = 4  # buffers: while one is filled, the others are written
SMALL_BYTES = 16 << 20  # for a smaller file threads cost more than they save
SYNC_BYTES = 8 << 20  # growth after which a file is synced again


class BackgroundSync:
    """Sync of a growing file in a thread, every few MiB, so that the last sync is short."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._thread = ThreadPoolExecutor(1, "sync")  # begins with the first sync
        self._unsynced = 0  # bytes since the start of the newest sync
        self._running: Future[None] | None = None

    def add(self, count: int) -> None:
        """Count `count` bytes as written; start a sync after every SYNC_BYTES.

        Raises OSError when an earlier sync failed, because its bytes may be lost.
        """
        self._unsynced += count
        if self._unsynced >= SYNC_BYTES and (self._running is None or self._running.done()):
            self._wait()
            self._unsynced = 0
            self._running = self._thread.submit(os.fsync, self._descriptor)

    def end(self) -> None:
        """Wait for the running sync, before the file is closed. Raises OSError as `add` does."""
        self.abort()
        self._wait()

    def abort(self) -> None:
        """Wait for the running sync and ignore its errors."""
        self._thread.shutdown()

    def _wait(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()


class Sink:
    """New file that is written piece by piece and hashed. An OSError may be about bytes of earlier
    calls.
    """

    def __init__(self, path: Path, size: int, *, sync: bool) -> None:
        """Open a new file of about `size` bytes."""
        self.size = 0  # bytes so far
        self._file = path.open("xb", buffering=0)
        self._hash = hashlib.sha256()
        self._sync = sync
        large = sync and size >= SMALL_BYTES
        self._thread = (
            ThreadPoolExecutor(1, "sink") if large else None
        )  # one thread, so that bytes keep their order
        self._syncing = BackgroundSync(self._file.fileno()) if large else None
        room = min(PIECE_BYTES, max(1, size))
        self._buffers = deque(
            aligned(room, dtype=np.uint8).data for _ in range(PIECES if large else 1)
        )
        self._filled = 0
        self._waiting: deque[Future[None]] = deque()

    def room(self, count: int) -> memoryview:
        """Return the next `count` bytes of the file, at most a piece, to be filled before the next
        call.

        Raises OSError.
        """
        if self._filled + count > len(self._buffers[0]):
            self._write_buffer()
        start, self._filled = self._filled, self._filled + count
        self.size += count
        return self._buffers[0][start : self._filled]

    def write(self, data: memoryview) -> None:
        """Append bytes; they may be changed afterwards. Raises OSError."""
        while data:
            left = len(self._buffers[0]) - self._filled
            part = self.room(min(len(data), left or len(self._buffers[0])))
            part[:] = data[: len(part)]
            data = data[len(part) :]

    def close(self) -> str:
        """Finish the file; return its SHA-256. Raises OSError; after that, call `abort`."""
        self._write_buffer()
        while self._waiting:
            self._waiting.popleft().result()
        if self._syncing is not None:
            self._syncing.end()
        if self._sync:
            os.fsync(self._file.fileno())
        self.abort()
        return self._hash.hexdigest()

    def abort(self) -> None:
        """Close the unfinished file; a no-op after `close`."""
        if self._thread is not None:
            self._thread.shutdown()
        if self._syncing is not None:
            self._syncing.abort()
        self._file.close()

    def _write_buffer(self) -> None:
        piece, self._filled = self._buffers[0][: self._filled], 0
        if self._thread is None:
            self._put(piece)
            return
        self._waiting.append(self._thread.submit(self._put, piece))
        self._buffers.rotate(-1)
        if len(self._waiting) == len(self._buffers):  # the next buffer is still in use
            self._waiting.popleft().result()

    def _put(self, piece: memoryview) -> None:
        left = piece
        while left:
            left = left[self._file.write(left) :]
        self._hash.update(piece)
        if self._syncing is not None:
            self._syncing.add(len(piece))
