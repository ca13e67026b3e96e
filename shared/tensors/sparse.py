"""Top-k with four bits: of each 4,096 elements the 64 largest are sent, with their positions.

After SparseLoCo (chunked top-k, quantised values, error feedback). Without error feedback most of
an update is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.errors import InvalidFrame
from shared.tensors.blocks import (
    SCALE,
    SPAN,
    Decoded,
    pack_nibbles,
    read_scales,
    refuse_nonfinite,
    scale_blocks,
    unpack_nibbles,
)
from shared.tensors.slices import F32, U16, Array
from shared.tensors.spec import TensorSpec, grid

INDEX = "#index"
CHUNK = 4096
KEEP = 64
_SHARE = CHUNK // KEEP
_LIMIT = 7


@dataclass(frozen=True, slots=True)
class TopK(Decoded):
    """Codes in [-7, 7] with one scale a chunk, and increasing positions within the chunk."""

    def parts(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        kept = _kept(spec.count)
        return (
            TensorSpec(spec.name, (-(-kept // 2),), "U8"),
            TensorSpec(spec.name + SCALE, (-(-spec.count // CHUNK),), "BF16"),
            TensorSpec(spec.name + INDEX, (kept,), "U16"),
        )

    def encode(self, numbers: F32) -> tuple[Array, ...]:
        refuse_nonfinite(numbers)
        kept = _kept(numbers.size)
        codes, index = np.empty(kept, np.int8), np.empty(kept, np.uint16)
        scales = np.empty(-(-numbers.size // CHUNK), np.uint16)
        for start, stop in _runs(numbers.size):
            rows = numbers[start:stop].reshape(-1, min(CHUNK, stop - start))
            low, high = _kept(start), _kept(stop)
            chunks = slice(start // CHUNK, start // CHUNK + len(rows))
            codes[low:high], scales[chunks], index[low:high] = _select(rows)
        return pack_nibbles(codes), scales, index

    def decode(
        self, parts: Sequence[Array], count: int, start: int, stop: int, room: F32 | None = None
    ) -> F32:
        first = start // CHUNK
        begin, end = first * CHUNK, min(-(-stop // CHUNK) * CHUNK, count)
        scales = read_scales(parts[1][first : -(-end // CHUNK)])
        numbers = np.zeros(end - begin, np.float32)
        for low, high in _runs(end - begin):
            rows = numbers[low:high].reshape(-1, min(CHUNK, high - low))
            kept = slice(_kept(begin + low), _kept(begin + high))
            index = _positions(parts[2][kept].reshape(len(rows), -1), rows.shape[1])
            codes = unpack_nibbles(parts[0][kept.start // 2 : -(-kept.stop // 2)])[
                : kept.stop - kept.start
            ]
            here = scales[low // CHUNK : low // CHUNK + len(rows)]
            np.put_along_axis(rows, index, codes.reshape(len(rows), -1) * here[:, None], axis=1)
        return numbers[start - begin : stop - begin]


def _select(rows: F32) -> tuple[Array, Array, Array]:
    """Codes, scales and positions of the largest elements of each row."""
    keep = _kept(rows.shape[1])
    largest = np.argpartition(np.abs(rows), rows.shape[1] - keep, axis=1)[:, rows.shape[1] - keep :]
    index = np.sort(largest, axis=1)
    values = np.take_along_axis(rows, index, axis=1)
    scales, inverse = scale_blocks(np.abs(values).max(axis=1), _LIMIT)
    codes = np.rint(values * inverse[:, None]).astype(np.int8)
    return codes.reshape(-1), scales, index.astype(np.uint16).reshape(-1)


def _positions(index: U16, width: int) -> Array:
    wide = index.astype(np.int64)
    if wide.size and (wide[:, -1].max() >= width or (np.diff(wide, axis=1) <= 0).any()):
        raise InvalidFrame(
            "the positions of a sparse update are out of order or outside their chunk"
        )
    return wide


def _kept(count: int) -> int:
    """Return how many of the first `count` elements travel; a short last chunk keeps its share,
    rounded up.
    """
    return count // CHUNK * KEEP + -(-(count % CHUNK) // _SHARE)


def _runs(count: int) -> list[tuple[int, int]]:
    """Return spans of whole chunks, then the short last chunk alone."""
    whole = count // CHUNK * CHUNK
    return [*grid(whole, SPAN), *([(whole, count)] if whole < count else [])]
