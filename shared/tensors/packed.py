"""Tensor files of raw floats, packed for the way up: what the snapshot is on the way down.

Lossless, and only worth it for floats.

    magic | for each tensor of the file, in its order, for each chunk of its grid, for each rank of
    its bytes: length, compressed bytes of that rank

Nothing in it says how large anything becomes: that follows from the schema, and no more is ever
unpacked.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from shared.errors import InvalidFrame
from shared.tensors.frame import (
    NUMPY,
    PARTIAL_SUFFIX,
    Frame,
    FrameWriter,
    Written,
    sync_directory,
)
from shared.tensors.shuffle import LENGTH, byte_planes, pack_bytes, read_array
from shared.tensors.spec import Schema, grid

MAGIC = b"VPACK\x00\x00\x01"
WHAT = "a packed update"


def pack(frame: Frame, path: Path) -> Written:
    """Write the tensors of a file packed; durable, and under its name only when it is whole.

    Raises OSError.
    """
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


def unpack(path: Path, wire: Schema, raw: Path) -> None:
    """Write the file that was packed.

    Raises InvalidFrame for anything that is not exactly one of this schema, StorageFull.
    """
    with path.open("rb") as file, FrameWriter(raw, wire, sync=False) as writer:
        if file.read(len(MAGIC)) != MAGIC:
            raise InvalidFrame(f"this is not {WHAT}")
        for spec in wire:
            kind = NUMPY[spec.dtype]
            for start, stop in grid(spec.count):
                writer.write(spec.name, read_array(file, kind, stop - start, WHAT))
        if file.read(1):
            raise InvalidFrame(f"{WHAT} goes on behind its last tensor")


def beside(path: Path) -> Path:
    """A name of a file that is nobody's once its writer died."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
