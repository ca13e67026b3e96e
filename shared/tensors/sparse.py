"""Top-k: of each 4,096 elements the 256 largest are sent in eight bits, with their positions.

It serves links of the downlink, which lose nothing: the next link sends what this one left out.

Positions use the Elias-Fano code. The lowest four bits of each position are stored as they are. A
row of bits has a one for each position; the number of zeros before it is the position's upper bits.
A position takes 6 bits.
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
    Dither,
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


@dataclass(frozen=True, slots=True)
class TopK(Decoded):
    """The largest elements of each chunk: their increasing positions, their codes of eight bits,
    and one scale a chunk.
    """

    keep: int  # elements kept of each chunk: a divisor of its size and a multiple of eight

    def parts(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec(spec.name, (self._kept(spec.count),), "I8"),
            TensorSpec(spec.name + SCALE, (-(-spec.count // CHUNK),), "BF16"),
            TensorSpec(spec.name + INDEX, (self._index_bytes(spec.count),), "U8"),
        )

    def encode(self, numbers: F32, dither: Dither | None = None) -> tuple[Array, ...]:
        """Encode a slice, rounded to the nearest."""
        refuse_nonfinite(numbers)
        pieces: list[tuple[Array, ...]] = []
        for start, stop in _runs(numbers.size):
            rows = numbers[start:stop].reshape(-1, min(CHUNK, stop - start))
            places = _largest(rows, self._kept(rows.shape[1]))
            values = np.take_along_axis(rows, places, axis=1)
            pieces.append((*_eight_bits(values), _index(places, rows.shape[1])))
        kinds = (np.int8, np.uint16, np.uint8)
        empty = [np.empty(0, kind) for kind in kinds]
        return tuple(map(np.concatenate, zip(empty, *pieces, strict=True)))

    def decode(
        self, parts: Sequence[Array], count: int, start: int, stop: int, room: F32 | None = None
    ) -> F32:
        begin, end = start // CHUNK * CHUNK, min(-(-stop // CHUNK) * CHUNK, count)
        magnitudes = read_scales(parts[1][begin // CHUNK : -(-end // CHUNK)]).reshape(-1, 1)
        numbers = np.zeros(end - begin, np.float32)
        for low, high in _runs(end - begin):
            rows = numbers[low:high].reshape(-1, min(CHUNK, high - low))
            span = slice(self._kept(begin + low), self._kept(begin + high))
            index = parts[2][self._index_bytes(begin + low) : self._index_bytes(begin + high)]
            scales = magnitudes[low // CHUNK :][: len(rows)]
            values: F32 = parts[0][span].reshape(len(rows), -1) * scales
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
    largest: Array = np.sort(np.argpartition(-np.abs(rows), keep - 1, axis=1)[:, :keep], axis=1)
    return largest


def _eight_bits(values: F32) -> tuple[Array, U16]:
    scales, inverse = scale_blocks(np.abs(values).max(axis=1), _LIMIT)
    return np.rint(values * inverse[:, None]).astype(np.int8).reshape(-1), scales


def _sizes(count: int, width: int) -> tuple[int, int]:
    """Return the bytes of the row of bits, and of the lowest bits, for this many positions."""
    return -(-(count + -(-width // PART)) // 8), -(-count // 2)


def _index(places: Array, width: int) -> U8:
    """Return the encoded positions in rows of `width`."""
    count, keep = places.shape
    bits = np.zeros((count, 8 * _sizes(keep, width)[0]), np.uint8)
    np.put_along_axis(bits, places // PART + np.arange(keep), 1, axis=1)
    lowest = np.zeros((count, keep + keep % 2), np.uint8)
    lowest[:, :keep] = places % PART
    packed = lowest[:, ::2] << 4 | lowest[:, 1::2]
    return np.concatenate([np.packbits(bits, axis=1), packed], axis=1).reshape(-1)


def _places(index: Array, keep: int, width: int) -> Array:
    """Return the positions from their code. Raises InvalidFrame."""
    edge, _ = _sizes(keep, width)
    bits, packed = np.unpackbits(index[:, :edge], axis=1), index[:, edge:]
    if (bits.sum(axis=1) == keep).all():
        lowest = np.stack([packed >> 4, packed & 15], axis=2).reshape(len(index), -1)[:, :keep]
        parts = np.nonzero(bits)[1].reshape(len(index), keep) - np.arange(keep)
        positions: Array = parts * PART + lowest
        if not positions.size or (
            positions[:, -1].max() < width and (np.diff(positions, axis=1) > 0).all()
        ):
            return positions
    raise InvalidFrame("the positions of a sparse update are out of order or outside their chunk")


def _runs(count: int) -> list[tuple[int, int]]:
    """Return spans of whole chunks, then the short last chunk alone."""
    whole = count // CHUNK * CHUNK
    return [*grid(whole, SPAN), *([(whole, count)] if whole < count else [])]
