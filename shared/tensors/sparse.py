"""Top-k: of each 4,096 elements the largest are sent, with their positions.

After SparseLoCo, an upload sends 64 of 4,096 in two bits, with error feedback, without which most of
it is lost. A link of the downlink sends 256 of 4,096 in eight bits: as many as four uploads name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.errors import InvalidFrame
from shared.tensors.blocks import (
    SCALE,
    SPAN,
    U8,
    Decoded,
    read_scales,
    refuse_nonfinite,
    scale_blocks,
)
from shared.tensors.slices import F32, U16, Array
from shared.tensors.spec import TensorSpec, grid

INDEX = "#index"
CHUNK = 4096
_LIMIT = 127
_MOST = 3.38e38  # largest magnitude that rounds to a finite bfloat16


@dataclass(frozen=True, slots=True)
class TopK(Decoded):
    """Codes with one scale a chunk (eight bits), or two: a sign and which of two magnitudes (two
    bits); and increasing positions within the chunk.
    """

    keep: int  # elements kept of a chunk: a divisor of its size and a multiple of four
    coarse: bool

    def parts(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        kept, scales = self._kept(spec.count), -(-spec.count // CHUNK) * (1 + self.coarse)
        codes = TensorSpec(spec.name, (kept,), "I8")
        if self.coarse:
            codes = TensorSpec(spec.name, (-(-kept // 4),), "U8")
        return (
            codes,
            TensorSpec(spec.name + SCALE, (scales,), "BF16"),
            TensorSpec(spec.name + INDEX, (kept,), "U16"),
        )

    def encode(self, numbers: F32) -> tuple[Array, ...]:
        refuse_nonfinite(numbers)
        codes: list[Array] = [np.empty(0, np.uint8 if self.coarse else np.int8)]
        scales, index = [np.empty(0, np.uint16)], [np.empty(0, np.uint16)]
        for start, stop in _runs(numbers.size):
            rows = numbers[start:stop].reshape(-1, min(CHUNK, stop - start))
            places = _largest(rows, self._kept(rows.shape[1]))
            values = np.take_along_axis(rows, places, axis=1)
            found, sizes = _two_bits(values) if self.coarse else _eight_bits(values)
            codes.append(found)
            scales.append(sizes)
            index.append(places.astype(np.uint16).reshape(-1))
        return np.concatenate(codes), np.concatenate(scales), np.concatenate(index)

    def decode(
        self, parts: Sequence[Array], count: int, start: int, stop: int, room: F32 | None = None
    ) -> F32:
        first = start // CHUNK
        begin, end = first * CHUNK, min(-(-stop // CHUNK) * CHUNK, count)
        each = 1 + self.coarse
        scales = read_scales(parts[1][first * each : -(-end // CHUNK) * each]).reshape(-1, each)
        numbers = np.zeros(end - begin, np.float32)
        for low, high in _runs(end - begin):
            rows = numbers[low:high].reshape(-1, min(CHUNK, high - low))
            kept = slice(self._kept(begin + low), self._kept(begin + high))
            index = _positions(parts[2][kept].reshape(len(rows), -1), rows.shape[1])
            values = self._values(parts[0], kept, scales[low // CHUNK :][: len(rows)])
            np.put_along_axis(rows, index, values, axis=1)
        return numbers[start - begin : stop - begin]

    def _values(self, codes: Array, kept: slice, scales: F32) -> F32:
        """Return the numbers of some rows."""
        if not self.coarse:
            whole: F32 = codes[kept].reshape(len(scales), -1) * scales
            return whole
        packed = codes[kept.start // 4 : -(-kept.stop // 4)]
        four = (packed[:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
        told = four.reshape(-1)[: kept.stop - kept.start].reshape(len(scales), -1)
        large = np.where(told & 2, scales[:, 1:], scales[:, :1])
        return np.where(told & 1, -large, large)

    def _kept(self, count: int) -> int:
        """Return how many of the first `count` elements travel; a short last chunk rounds up."""
        return count // CHUNK * self.keep + -(-(count % CHUNK) * self.keep // CHUNK)


def _largest(rows: F32, keep: int) -> Array:
    """Return the positions of the largest elements of each row, in order."""
    cut = rows.shape[1] - keep
    found: Array = np.sort(np.argpartition(np.abs(rows), cut, axis=1)[:, cut:], axis=1)
    return found


def _eight_bits(values: F32) -> tuple[Array, U16]:
    scales, inverse = scale_blocks(np.abs(values).max(axis=1), _LIMIT)
    return np.rint(values * inverse[:, None]).astype(np.int8).reshape(-1), scales


def _two_bits(values: F32) -> tuple[U8, U16]:
    """Return signs and sizes, four a byte, and the mean magnitude of the smaller and of the larger
    ones of each row; those above the mean of all are the larger ones.
    """
    sizes = np.abs(values, dtype=np.float64)
    larger = sizes > sizes.mean(axis=1, keepdims=True)
    counts = [(~larger).sum(axis=1), larger.sum(axis=1)]
    means = [
        (sizes * part).sum(axis=1) / np.maximum(1, count)
        for part, count in zip((~larger, larger), counts, strict=True)
    ]
    both = np.minimum(np.stack(means, axis=1), _MOST).astype(np.float32)
    scales, _ = scale_blocks(both.reshape(-1), 1)
    told = ((values < 0) + 2 * larger).astype(np.uint8).reshape(-1)
    four = np.concatenate([told, np.zeros(-told.size % 4, np.uint8)]).reshape(-1, 4)
    packed: U8 = np.bitwise_or.reduce(four << np.array([0, 2, 4, 6], np.uint8), axis=1)
    return packed, scales


def _positions(index: U16, width: int) -> Array:
    wide = index.astype(np.int64)
    if wide.size and (wide[:, -1].max() >= width or (np.diff(wide, axis=1) <= 0).any()):
        raise InvalidFrame(
            "the positions of a sparse update are out of order or outside their chunk"
        )
    return wide


def _runs(count: int) -> list[tuple[int, int]]:
    """Return spans of whole chunks, then the short last chunk alone."""
    whole = count // CHUNK * CHUNK
    return [*grid(whole, SPAN), *([(whole, count)] if whole < count else [])]
