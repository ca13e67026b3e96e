"""The loops of a merge over one piece: weighted sum, rank mean, squared norms, inner products.

All of them work in blocks that fit the cache, on one thread, with a result that does not depend on threads or on the
machine's vector width: elementwise arithmetic is rounded the same everywhere as long as multiply and add stay two steps
(a fused one differs in 4 % of elements), and sums over elements run in float64 along fixed lanes. The one exception is
`inner_products`, which goes through BLAS and may differ in the last bit of a double; what is made of it is rounded to float32.

Legend: K contributions, N elements of a piece, B elements of a block.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from coordinator.merge.cohort import Cohort, Doubles, Floats, Piece
from shared.tensors.spec import grid

BLOCK = (
    128 * 1024
)  # sum and product of a block (512 KiB each) stay in the cache; 64-256 Ki elements run alike
RANK_BLOCK = (
    16 * 1024
)  # 64 KiB rows: K of them share the cache; smaller ones pay more calls, measured
LANES = 1024
ROW = 8192  # numpy's BLAS takes a second thread above 10,000 elements
GEMM_LIMIT = 262_144  # multiplications below which OpenBLAS stays on one thread
SCRATCH_BYTES = 2 * 1024 * 1024  # of doubles; half of it costs a third more time, measured
ROOM_BYTES = 8 * 1024 * 1024  # that scratch may grow to when contributions are many


def weighted_sum(
    cohort: Cohort,
    factors: Floats,
    piece: Piece,
    out: Floats,
    *,
    accumulate: bool = False,
    squares: Doubles | None = None,
) -> None:
    """out (N,) = sum of factors[i] * x_i in task order, each product rounded before it is added.

    `squares` (K,) receives each contribution's squared norm on the way: good for checks, not for coefficients.
    """
    product = np.empty(min(BLOCK, piece.size), np.float32)
    chosen = [(index, factors[index]) for index in range(len(cohort)) if factors[index] != 0]
    for start, stop in grid(piece.size, BLOCK):
        into = out[start:stop]
        if not chosen and not accumulate:
            into.fill(0)
        fresh = not accumulate
        for index, factor in chosen:
            x = cohort.read(index, piece, start, stop)
            if fresh:
                np.multiply(x, factor, out=into)
                fresh = False
            else:
                scaled = np.multiply(x, factor, out=product[: stop - start])
                np.add(into, scaled, out=into)
            if squares is not None:
                squares[index] += quick_square(x)


def quick_square(x: Floats) -> float:
    """Squared norm from float32 rows summed in float64; a value beyond 1e19 overflows it, as a NaN does."""
    edge = len(x) // ROW * ROW
    rows = x[:edge].reshape(-1, ROW)
    total = float(np.vecdot(rows, rows).sum(dtype=np.float64))
    return total + float(np.vecdot(x[edge:], x[edge:]))


def squared_norms(cohort: Cohort, piece: Piece) -> Doubles:
    """(K,) squared norms, exact products summed in float64 along fixed lanes."""
    found = np.zeros(len(cohort))
    wide = np.empty(min(SCRATCH_BYTES // 8, piece.size))
    for index in range(len(cohort)):
        lanes = np.zeros(LANES)
        for start, stop in grid(piece.size, len(wide)):
            square = wide[: stop - start]
            np.copyto(square, cohort.read(index, piece, start, stop))
            np.multiply(square, square, out=square)
            edge = len(square) // LANES * LANES
            lanes += square[:edge].reshape(-1, LANES).sum(axis=0)
            lanes[: len(square) - edge] += square[edge:]
        # fsum refuses opposite infinities but squares have none; a NaN passes through.
        found[index] = math.fsum(lanes.tolist())
    return found


def inner_products(cohort: Cohort, piece: Piece, *, centred: bool) -> Doubles:
    """(K, K) float64 inner products of the contributions, or of their differences from the coordinate median."""
    count = len(cohort)
    tile = max(8, min(256, GEMM_LIMIT // (count * count)))
    tiles_max = max(1, min(SCRATCH_BYTES // (8 * count * tile), ROOM_BYTES // (8 * count * count)))
    block = tile * tiles_max
    wide = np.zeros((count, block))
    middle = np.empty(block, np.float32)
    found = np.zeros((count, count))
    for start, stop in grid(piece.size, block):
        size = stop - start
        padded = -(-size // tile) * tile
        for index in range(count):
            np.copyto(wide[index, :size], cohort.read(index, piece, start, stop))
        wide[:, size:padded] = 0
        if centred:
            part = Piece(spec=piece.spec, start=piece.start + start, stop=piece.start + stop)
            median(cohort, part, middle[:size])
            np.subtract(wide[:, :size], middle[:size], out=wide[:, :size])
        tiles = wide[:, :padded].reshape(count, -1, tile).transpose(1, 0, 2)  # (tiles, K, tile)
        found += np.matmul(tiles, tiles.transpose(0, 2, 1)).sum(axis=0)
    return found


def median(cohort: Cohort, piece: Piece, out: Floats) -> None:
    """out (N,) = coordinate median; the mean of the two middle ones when K is even."""
    rank_mean(cohort, piece, out, low=(len(cohort) - 1) // 2, high=len(cohort) // 2 + 1)


def rank_mean(cohort: Cohort, piece: Piece, out: Floats, *, low: int, high: int) -> None:
    """out (N,) = mean of the values that stand at [low, high) when each coordinate is sorted. A NaN stays a NaN.

    Sorting coordinate by coordinate costs 10-30 times the mean; a network of whole-row minima and maxima, cut down to what
    the wanted ranks depend on, 2-5 times.
    """
    count = len(cohort)
    steps = rank_network(count, low, high)
    size = min(RANK_BLOCK, max(512, ROOM_BYTES // (4 * count)), piece.size)
    scratch = np.empty((count + 1, size), np.float32)
    divisor = np.float32(high - low)
    for start, stop in grid(piece.size, size):
        rows = [scratch[index, : stop - start] for index in range(count)]
        spare = scratch[count, : stop - start]
        for index, row in enumerate(rows):
            np.copyto(row, cohort.read(index, piece, start, stop))
        for left, right, smaller, larger in steps:
            if smaller and larger:
                np.minimum(rows[left], rows[right], out=spare)
                np.maximum(rows[left], rows[right], out=rows[right])
                rows[left], spare = spare, rows[left]
            elif smaller:
                np.minimum(rows[left], rows[right], out=rows[left])
            else:
                np.maximum(rows[left], rows[right], out=rows[right])
        into = out[start:stop]
        # Adding to zero also makes one zero of -0.0 and 0.0, whose order a minimum does not promise.
        into.fill(0)
        for row in rows[low:high]:
            np.add(into, row, out=into)
        if high - low > 1:
            np.divide(into, divisor, out=into)


@functools.lru_cache(maxsize=256)
def rank_network(count: int, low: int, high: int) -> tuple[tuple[int, int, bool, bool], ...]:
    """Batcher's odd-even merge sort over `count` rows without what ranks [low, high) do not need.

    Each step is (left, right, write the minimum to left, write the maximum to right).
    """
    needed = set(range(low, high))
    kept: list[tuple[int, int, bool, bool]] = []
    for left, right in reversed(_comparators(count)):
        smaller, larger = left in needed, right in needed
        if smaller or larger:
            kept.append((left, right, smaller, larger))
            needed |= {left, right}
    return tuple(reversed(kept))


def _comparators(count: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    run = 1  # length of the sorted runs that are being merged
    while run < count:
        gap = run
        while gap >= 1:
            for first in range(gap % run, count - gap, 2 * gap):
                found += [
                    (left, left + gap)
                    for left in range(first, min(first + gap, count - gap))
                    if left // (2 * run) == (left + gap) // (2 * run)
                ]
            gap //= 2
        run *= 2
    return found
