"""Snapshot: a file of published weights whose parameters are bfloat16 numbers, packed without loss.

    magic | length, compressed schema | for each tensor in the order of the schema, for each chunk
    of its grid, for each byte of a number (first, second): length, all these bytes compressed

First and second bytes are compressed separately: a parameter takes 1.4 bytes in tensors of 10,000
elements, and 1.6 if they are compressed together. Lengths are 32-bit little-endian. Buffers and
counters are packed as they are stored. A receiver reads the schema from the snapshot, and checks
the schema by its hash in the signed manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from shared.decoding import MALFORMED, decode
from shared.errors import InvalidFrame
from shared.proofs.signing import canonical, digest
from shared.tensors.frame import NUMPY, FrameWriter, WrittenFile
from shared.tensors.header import HEADER_BYTES_MAX
from shared.tensors.shuffle import (
    LENGTH,
    byte_planes,
    pack_bytes,
    read_array,
    read_piece,
    unpack_bytes,
)
from shared.tensors.slices import Array, bf16_from_float, float_from_bf16
from shared.tensors.spec import Schema, TensorSpec, grid, nbytes

MAGIC = b"VSNAP\x00\x00\x01"
LABEL = "a snapshot"


def write_snapshot(weights: Mapping[str, Array], schema: Schema, path: Path) -> WrittenFile:
    """Pack weights (arrays, or a `Frame`) into a new file. Raises InvalidFrame for a parameter that
    is not bfloat16, and OSError.
    """
    sha256, size = hashlib.sha256(), 0
    with path.open("xb") as file:

        def put(data: bytes) -> None:
            nonlocal size
            for piece in (LENGTH.pack(len(data)), data):
                file.write(piece)
                sha256.update(piece)
                size += len(piece)

        file.write(MAGIC)
        sha256.update(MAGIC)
        size += len(MAGIC)
        put(pack_bytes(canonical(schema)))
        for spec in schema:
            flat = np.asarray(weights[spec.name]).reshape(-1)
            for start, stop in grid(spec.count):
                for plane in byte_planes(_packed(spec, flat[start:stop])):
                    put(pack_bytes(plane))
    return WrittenFile(sha256=sha256.hexdigest(), size=size)


def unpack_snapshot(path: Path, schema_sha256: str, weights: Path, most: int) -> WrittenFile:
    """Write a snapshot's weights as a tensor file of at most `most` bytes; return its hash and
    size. Raises InvalidFrame, StorageFull, OSError.
    """
    with ExitStack() as files:
        file = files.enter_context(path.open("rb"))
        if file.read(len(MAGIC)) != MAGIC:
            raise InvalidFrame("this is not a snapshot of weights")
        schema = _schema(read_piece(file, HEADER_BYTES_MAX, LABEL), schema_sha256)
        if nbytes(schema) > most:  # a packed byte may become a thousand
            raise InvalidFrame(f"a snapshot is of more than the {most:,} bytes of its weights")
        writer = files.enter_context(FrameWriter(weights, schema, sync=False))
        for spec in schema:
            kind = NUMPY["BF16"] if _rounded(spec) else NUMPY[spec.dtype]
            for start, stop in grid(spec.count):
                values = read_array(file, kind, stop - start, LABEL)
                writer.write(spec.name, float_from_bf16(values) if _rounded(spec) else values)
        if file.read(1):
            raise InvalidFrame("a snapshot has bytes after its last tensor")
        return writer.close()


def _rounded(spec: TensorSpec) -> bool:
    """Return True if a snapshot stores the tensor as bfloat16."""
    return spec.is_encoded and spec.dtype == "F32"


def _packed(spec: TensorSpec, values: Array) -> Array:
    """Return the stored form of a piece of a tensor. Raises InvalidFrame for numbers that are not
    bfloat16.
    """
    if not _rounded(spec):
        return values
    bits = bf16_from_float(values)
    if not np.array_equal(float_from_bf16(bits).view(np.uint32), values.view(np.uint32)):
        raise InvalidFrame(f"{spec.name!r} holds numbers that are not bfloat16: no snapshot of it")
    return bits


def _schema(packed: bytes, sha256: str) -> Schema:
    header = unpack_bytes(packed, HEADER_BYTES_MAX)
    if digest(header) != sha256:
        raise InvalidFrame("a snapshot is of another model than the manifest says")
    try:
        return decode(header, Schema)
    except MALFORMED as error:
        raise InvalidFrame(f"the schema of a snapshot cannot be read: {error}") from error
