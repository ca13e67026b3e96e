"""Top-k: of each 4,096 elements the largest are sent, with their positions.

An upload, as in SparseLoCo, sends 64 of 4,096 in two bits, with error feedback, without which most
of the update is lost. A link of the downlink sends 256 of 4,096 in eight bits: as many as four
uploads.

Positions use the Elias-Fano code. The lowest four bits of each position are stored as they are. A
row of bits has a one for each position; the number of zeros before it is the position's upper bits.
A position takes 9 bits in an upload, 6 in a link.
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
PART = 16  # elements that the lowest four bits of a position distinguish
_LIMIT = 127
_MOST = 3.38e38  # largest magnitude that rounds to a finite bfloat16


@dataclass(frozen=True, slots=True)
class TopK(Decoded):
    """The largest elements of each chunk: their increasing positions, and their codes. A code has
    eight bits, with one scale a chunk; or two bits, a sign and which of the chunk's two scales.
    """

    keep: int  # elements kept of each chunk: a divisor of its size and a multiple of eight
    coarse: bool

    def parts(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        kept, scales = self._kept(spec.count), -(-spec.count // CHUNK) * (1 + self.coarse)
        codes = TensorSpec(spec.name, (kept,), "I8")
        if self.coarse:
            codes = TensorSpec(spec.name, (-(-kept // 4),), "U8")
        return (
            codes,
            TensorSpec(spec.name + SCALE, (scales,), "BF16"),
            TensorSpec(spec.name + INDEX, (self._index_bytes(spec.count),), "U8"),
        )

    def encode(self, numbers: F32) -> tuple[Array, ...]:
        refuse_nonfinite(numbers)
        pieces: list[tuple[Array, ...]] = []
        for start, stop in _runs(numbers.size):
            rows = numbers[start:stop].reshape(-1, min(CHUNK, stop - start))
            places = _largest(rows, self._kept(rows.shape[1]))
            values = np.take_along_axis(rows, places, axis=1)
            found = _two_bits(values) if self.coarse else _eight_bits(values)
            pieces.append((*found, _index(places, rows.shape[1])))
        kinds = (np.uint8 if self.coarse else np.int8, np.uint16, np.uint8)
        empty = [np.empty(0, kind) for kind in kinds]
        return tuple(map(np.concatenate, zip(empty, *pieces, strict=True)))

    def decode(
        self, parts: Sequence[Array], count: int, start: int, stop: int, room: F32 | None = None
    ) -> F32:
        begin, end = start // CHUNK * CHUNK, min(-(-stop // CHUNK) * CHUNK, count)
        each = 1 + self.coarse
        scales = parts[1][begin // CHUNK * each : -(-end // CHUNK) * each]
        magnitudes = read_scales(scales).reshape(-1, each)
        numbers = np.zeros(end - begin, np.float32)
        for low, high in _runs(end - begin):
            rows = numbers[low:high].reshape(-1, min(CHUNK, high - low))
            kept = slice(self._kept(begin + low), self._kept(begin + high))
            index = parts[2][self._index_bytes(begin + low) : self._index_bytes(begin + high)]
            values = _values(parts[0], kept, magnitudes[low // CHUNK :][: len(rows)])
            places = _places(index.reshape(len(rows), -1), values.shape[1], rows.shape[1])
            np.put_along_axis(rows, places, values, axis=1)
        return numbers[start - begin : stop - begin]

    def _kept(self, count: int) -> int:
        """Return how many of the first `count` elements are sent, rounded up for a short last
        chunk.
        """
        return count // CHUNK * self.keep + -(-(count % CHUNK) * self.keep // CHUNK)

    def _index_bytes(self, count: int) -> int:
        """Return the bytes of the positions of the first `count` elements."""
        whole, rest = divmod(count, CHUNK)
        return whole * sum(_sizes(self.keep, CHUNK)) + sum(_sizes(self._kept(rest), rest))


def _largest(rows: F32, keep: int) -> Array:
    """Return the positions, ascending, of the largest magnitudes of each row.

    Magnitudes are negated: among many zeros, as in a link, NumPy finds the smallest numbers 20
    times faster than the largest.
    """
    found: Array = np.sort(np.argpartition(-np.abs(rows), keep - 1, axis=1)[:, :keep], axis=1)
    return found


def _eight_bits(values: F32) -> tuple[Array, U16]:
    scales, inverse = scale_blocks(np.abs(values).max(axis=1), _LIMIT)
    return np.rint(values * inverse[:, None]).astype(np.int8).reshape(-1), scales


def _two_bits(values: F32) -> tuple[U8, U16]:
    """Return the two-bit codes, four a byte, and each row's two scales: the mean magnitudes of the
    smaller and of the larger elements; an element above the mean of all counts as larger.
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


def _values(codes: Array, kept: slice, scales: F32) -> F32:
    """Return the numbers of some rows; `kept` begins at a multiple of four."""
    if scales.shape[1] == 1:
        whole: F32 = codes[kept].reshape(len(scales), -1) * scales
        return whole
    packed = codes[kept.start // 4 : -(-kept.stop // 4)]
    four = (packed[:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    told = four.reshape(-1)[: kept.stop - kept.start].reshape(len(scales), -1)
    large = np.where(told & 2, scales[:, 1:], scales[:, :1])
    return np.where(told & 1, -large, large)


def _sizes(kept: int, width: int) -> tuple[int, int]:
    """Return the bytes of the row of bits, and of the lowest bits, for this many positions."""
    return -(-(kept + -(-width // PART)) // 8), -(-kept // 2)


def _index(places: Array, width: int) -> U8:
    """Return the encoded positions in rows of `width`."""
    count, kept = places.shape
    bits = np.zeros((count, 8 * _sizes(kept, width)[0]), np.uint8)
    np.put_along_axis(bits, places // PART + np.arange(kept), 1, axis=1)
    lowest = np.zeros((count, kept + kept % 2), np.uint8)
    lowest[:, :kept] = places % PART
    packed = lowest[:, ::2] << 4 | lowest[:, 1::2]
    return np.concatenate([np.packbits(bits, axis=1), packed], axis=1).reshape(-1)


def _places(index: Array, kept: int, width: int) -> Array:
    """Return the positions from their code. Raises InvalidFrame."""
    edge, _ = _sizes(kept, width)
    bits, packed = np.unpackbits(index[:, :edge], axis=1), index[:, edge:]
    if (bits.sum(axis=1) == kept).all():
        lowest = np.stack([packed >> 4, packed & 15], axis=2).reshape(len(index), -1)[:, :kept]
        parts = np.nonzero(bits)[1].reshape(len(index), kept) - np.arange(kept)
        found: Array = parts * PART + lowest
        if not found.size or (found[:, -1].max() < width and (np.diff(found, axis=1) > 0).all()):
            return found
    raise InvalidFrame("the positions of a sparse update are out of order or outside their chunk")


def _runs(count: int) -> list[tuple[int, int]]:
    """Return spans of whole chunks, then the short last chunk alone."""
    whole = count // CHUNK * CHUNK
    return [*grid(whole, SPAN), *([(whole, count)] if whole < count else [])]
