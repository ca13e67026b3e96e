"""Log of how many tokens a process streams, on its own disk, written before each piece is sent.

The database learns the number of streamed tokens once a second, so a `kill -9` would leave up to a
second of delivered tokens unpaid. Each running request has a slot of a file, which survives the
process. No request waits for the disk to sync its slot: after a loss of power the number in the
database counts.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

import msgspec
import structlog

from coordinator.database.inference.request_rows import StreamProgress
from shared.decoding import decode
from shared.files.deletions import delete_file
from shared.files.file_lock import locked

FOLDER = "streams"  # folder in the data directory
SLOT_BYTES = 2048  # half a page, so that a kill never leaves half a slot written
SLOTS_MAX = 8192  # requests at once; the tokens of further ones are only in the database
FILES_MAX = 1000  # files of dead processes that one recovery reads at most

log = structlog.get_logger("metering")


class _StreamSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Log slot of one request: how many tokens it streamed, as JSON with a newline."""

    id: str
    streamed: StreamProgress


class StreamLog:
    """Slots of this process, in a locked file that the first slot creates."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._file = -1
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._failed = False

    def write(self, request_id: str, streamed: StreamProgress) -> None:
        """Log how many tokens a request has streamed, including the tokens of the next piece."""
        slot = self._slots.get(request_id)
        if slot is None:
            if len(self._slots) >= SLOTS_MAX:
                return
            slot = self._free.pop() if self._free else len(self._slots)
            self._slots[request_id] = slot
        self._put(slot, msgspec.json.encode(_StreamSlot(id=request_id, streamed=streamed)))

    def forget(self, request_id: str) -> None:
        """Clear the slot of a settled request."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)
            self._put(slot, b"")

    def close(self) -> None:
        """Close the file; a file without requests is deleted."""
        if self._path is not None:
            os.close(self._file)
            if not self._slots:
                delete_file(self._path, "settled")
            self._path, self._file = None, -1

    def _put(self, slot: int, data: bytes) -> None:
        # the slot is too small for the record, or there is no file to clear
        if len(data) >= SLOT_BYTES or not (data or self._path):
            return
        try:
            if self._path is None:
                self._open()
            os.lseek(self._file, slot * SLOT_BYTES, os.SEEK_SET)
            os.write(self._file, data + b"\n")
        except OSError as error:  # the number in the database counts then
            if not self._failed:
                log.warning("streams are written down once a second only", error=str(error))
            self._failed = True

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / f"{secrets.token_hex(8)}.slots"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if not locked(file):  # another process is reading the file now, and deletes it
            os.close(file)
            raise OSError(f"{path} is held by another process")
        self._path, self._file = path, file


class OrphanStreams:
    """Stream logs of dead processes, and how many tokens their requests had streamed."""

    def __init__(self) -> None:
        self.streamed: dict[str, StreamProgress] = {}
        self._files: dict[Path, BinaryIO] = {}

    @classmethod
    def take(cls, folder: Path) -> Self:
        """Lock and read the logs of a folder that no living process has locked."""
        orphans = cls()
        for path in sorted(folder.glob("*.slots"))[:FILES_MAX]:
            with suppress(OSError):  # the file's process has just ended, and deleted it
                file = path.open("r+b")
                if locked(file.fileno()):
                    orphans._files[path] = file
                    orphans.streamed |= read_slots(file)
                else:
                    file.close()
        return orphans

    def release(self, *, settled: bool) -> None:
        """Close the files; with `settled`, delete them."""
        for path, file in self._files.items():
            file.close()
            if settled:
                delete_file(path, "settled")
        self._files = {}


def read_slots(file: BinaryIO) -> dict[str, StreamProgress]:
    """Return the logged tokens of each request in a file; damaged slots are left out."""
    slots: dict[str, StreamProgress] = {}
    for _ in range(SLOTS_MAX):
        slot = file.read(SLOT_BYTES)
        data, ended, _ = slot.partition(b"\n")
        if data and ended:
            with suppress(msgspec.DecodeError, ValueError, RecursionError):
                record = decode(data, _StreamSlot)
                slots[record.id] = record.streamed
        if len(slot) < SLOT_BYTES:
            break
    return slots
