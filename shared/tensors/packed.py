"""Packed tensor files of raw floats for uploads, the counterpart of the snapshot for downloads.

Lossless, and only worth it for floats.

    magic | for each tensor of the file, in its order, for each chunk of its grid, for each rank of
    its bytes: length, compressed bytes of that rank

Nothing in it says how large anything becomes: that follows from the schema, and no more is ever
unpacked.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import mmap
import os
import secrets
import tempfile
import threading
from pathlib import Path
from typing import BinaryIO

import numpy as np

from shared.errors import InvalidFrame
from shared.tensors.frame import (
    NUMPY,
    PARTIAL_SUFFIX,
    Array,
    Frame,
    Written,
    refuse_full,
    sync_directory,
)
from shared.tensors.shuffle import LENGTH, byte_planes, pack_bytes, read_array, skip_piece
from shared.tensors.spec import CHUNK_ELEMENTS, Schema, TensorSpec, by_name, grid

MAGIC = b"VPACK\x00\x00\x01"
WHAT = "a packed update"
_ZEROS = bytes(1 << 20)


def pack(frame: Frame, path: Path) -> Written:
    """Write the tensors of a file packed; durable, under its name when complete. Raises OSError."""
    sha256, size = hashlib.sha256(), 0
    temporary = beside(path)
    try:
        with temporary.open("xb") as file:

            def put(data: bytes) -> None:
                nonlocal size
                file.write(data)
                sha256.update(data)
                size += len(data)

            put(MAGIC)
            for spec in frame.schema:
                flat = frame.array(spec.name).reshape(-1)
                for start, stop in grid(spec.count):
                    for plane in byte_planes(flat[start:stop]):
                        packed = pack_bytes(plane)
                        put(LENGTH.pack(len(packed)))
                        put(packed)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return Written(sha256=sha256.hexdigest(), size=size)


class PackedFile:
    """Tensors of a packed file, unpacked a chunk of the grid at a time: one chunk for each reading
    thread, whatever the size of the model.

    A chunk lies in a nameless file beside the packed one, so that the contributions of a large
    merge need little memory.
    """

    def __init__(self, path: Path, wire: Schema) -> None:
        """Find the chunks; their bytes are checked when they are read.

        Raises InvalidFrame for anything that is not exactly one file of this schema.
        """
        self._specs = by_name(wire)
        self._directory = path.parent
        self._room = max((_chunk_bytes(spec) for spec in wire), default=0)
        self._slots: dict[int, _ChunkSlot] = {}  # by thread
        with path.open("rb") as file:
            self._places = places(file, wire)
            self._packed = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def chunk(self, name: str, index: int) -> Array:
        """Return chunk `index` of the grid over a tensor, flat; empty after its end.

        The chunk is valid until the same thread asks for another one. Raises InvalidFrame,
        StorageFull.
        """
        if index >= len(self._places[name]):
            return np.empty(0, NUMPY[self._specs[name].dtype])
        slot = self._slots.get(threading.get_ident())
        if slot is None:
            slot = self._slots[threading.get_ident()] = _ChunkSlot(self._directory, self._room)
        if slot.holds != (name, index):
            self._fill(slot, name, index)
        return slot.numbers

    def close(self) -> None:
        """Close the file and the unpacked chunks."""
        slots, self._slots = self._slots, {}
        for slot in slots.values():
            slot.close()
        self._packed.close()

    def _fill(self, slot: _ChunkSlot, name: str, index: int) -> None:
        spec = self._specs[name]
        count = min(CHUNK_ELEMENTS, spec.count - index * CHUNK_ELEMENTS)
        begin, end = self._places[name][index]
        planes = io.BytesIO(self._packed[begin:end])
        slot.put((name, index), read_array(planes, NUMPY[spec.dtype], count, WHAT))


class _ChunkSlot:
    """Slot for one unpacked chunk."""

    def __init__(self, directory: Path, size: int) -> None:
        """Reserve the slot's room on the disk. Raises StorageFull."""
        self.holds: tuple[str, int] | None = None
        self.numbers: Array = np.empty(0, np.uint8)
        with tempfile.TemporaryFile(dir=directory) as file:
            try:  # a write into a mapped hole on a full disk would kill the process
                for start in range(0, size, len(_ZEROS)):
                    file.write(_ZEROS[: size - start])
                file.flush()
            except OSError as error:
                refuse_full(error, directory)
                raise
            self._map = mmap.mmap(file.fileno(), size)

    def put(self, holds: tuple[str, int], numbers: Array) -> None:
        self.holds = None
        flat = np.frombuffer(self._map, numbers.dtype, numbers.size)
        np.copyto(flat, numbers)
        self.holds, self.numbers = holds, flat

    def close(self) -> None:
        self.numbers = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # arrays still use it: it goes when they go
            self._map.close()


def places(file: BinaryIO, wire: Schema) -> dict[str, list[tuple[int, int]]]:
    """Return the first byte of each chunk in the file, and the byte after the last.

    Raises InvalidFrame.
    """
    size = os.fstat(file.fileno()).st_size
    if file.read(len(MAGIC)) != MAGIC:
        raise InvalidFrame(f"this is not {WHAT}")
    found: dict[str, list[tuple[int, int]]] = {spec.name: [] for spec in wire}
    for spec in wire:
        for start, stop in grid(spec.count):
            begin = file.tell()
            for _ in range(NUMPY[spec.dtype].itemsize):
                skip_piece(file, stop - start, WHAT)
            found[spec.name].append((begin, file.tell()))
    if file.tell() > size:
        raise InvalidFrame(f"{WHAT} ends too early")
    if file.tell() < size:
        raise InvalidFrame(f"{WHAT} goes on behind its last tensor")
    return found


def _chunk_bytes(spec: TensorSpec) -> int:
    return min(CHUNK_ELEMENTS, spec.count) * NUMPY[spec.dtype].itemsize


def beside(path: Path) -> Path:
    """Return a temporary name, which is unowned once its writer died."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
