"""Lossless compression of floats by zstd: all first bytes together, then all second bytes, etc.

Float32 and bfloat16 weights shrink to 0.68 - 0.84 of their size (measured); quantised codes gain
under 2 %.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shared.errors import InvalidFrame

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LEVEL = 1  # level 3 costs 1.2 - 3.3 times the time for no useful gain (measured)
WINDOW_LOG_MAX = 27  # 128 MiB: the largest window that a decoder accepts
LENGTH = struct.Struct("<I")  # precedes each piece of a packed file
SLACK_BYTES = 1 << 16  # most by which a packed piece may exceed its unpacked size


def byte_planes(array: npt.NDArray[Any]) -> list[bytes]:
    """Return all lowest bytes of the numbers, then all second ones, and so on."""
    flat = np.ascontiguousarray(array).reshape(-1)
    rows = flat.view(np.uint8).reshape(flat.size, flat.itemsize)
    return [rows[:, rank].tobytes() for rank in range(flat.itemsize)]


def from_planes(planes: Sequence[bytes], dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
    """Return the flat array from its planes. Raises InvalidFrame for planes of another length."""
    kind = np.dtype(dtype)
    if count and [len(plane) for plane in planes] != [count] * kind.itemsize:
        raise InvalidFrame(f"compressed tensor data does not hold exactly {count} elements")
    rows = np.empty((count, kind.itemsize), np.uint8)
    for rank, plane in enumerate(planes):
        rows[:, rank] = np.frombuffer(plane, np.uint8)
    return rows.reshape(-1).view(kind)


def pack_bytes(data: bytes) -> bytes:
    """Compress bytes without reordering."""
    return zstd.compress(data, LEVEL)


def unpack_bytes(data: bytes, size_max: int) -> bytes:
    """Return the unpacked bytes. Raises InvalidFrame for damaged data, and for data of more than
    `size_max` unpacked bytes, without unpacking more than `size_max` + 1.
    """
    decoder = zstd.ZstdDecompressor(
        options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG_MAX}
    )
    try:
        unpacked = decoder.decompress(data, max_length=size_max + 1)
        if not decoder.eof and len(unpacked) <= size_max:
            unpacked += decoder.decompress(b"", max_length=size_max + 1 - len(unpacked))
    except zstd.ZstdError as error:
        raise InvalidFrame(f"compressed tensor data cannot be read: {error}") from error
    if len(unpacked) > size_max or not decoder.eof or decoder.unused_data:
        raise InvalidFrame(f"compressed tensor data does not end after {size_max} bytes")
    return unpacked


def read_piece(file: BinaryIO, unpacked: int, label: str) -> bytes:
    """Return the next packed piece of a file, whose unpacked size is `unpacked` bytes; `label`
    names the file. Raises InvalidFrame for a piece that is too long or cut off.
    """
    head = file.read(LENGTH.size)
    if len(head) == LENGTH.size:
        (length,) = LENGTH.unpack(head)
        if length > unpacked + SLACK_BYTES:
            raise InvalidFrame(f"{label} holds a piece that is longer than its tensor")
        data = file.read(length)
        if len(data) == length:
            return data
    raise InvalidFrame(f"{label} ends too early")


def read_array(file: BinaryIO, kind: np.dtype[Any], count: int, label: str) -> npt.NDArray[Any]:
    """Return the next `count` numbers of a packed file, which errors call `label`. Raises
    InvalidFrame.
    """
    ranks = range(kind.itemsize)
    planes = [unpack_bytes(read_piece(file, count, label), count) for _ in ranks]
    return from_planes(planes, kind, count)
