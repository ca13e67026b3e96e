"""Loops of a merge over one piece: weighted sum, rank mean, squared norms, inner products.

Each loop works in blocks that fit the cache, on one thread, with a result independent of threads
and of the machine's vector width: elementwise arithmetic rounds the same everywhere as long as
multiply and add stay two steps (a fused one differs in 4 % of elements), and sums over elements run
in float64 along fixed lanes. The exception is `inner_products`, which uses BLAS: its doubles may
differ in the last bit between machines, and callers round to float32 before they compare.

Legend: K contributions, N elements of a piece, B elements of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from coordinator.aggregation.cohort import Cohort, Doubles, Floats, TensorPiece
from coordinator.aggregation.sorting_networks import rank_network
from shared.tensors.slices import LINE, aligned
from shared.tensors.spec import grid

# Elements of a block: its sum and its product, 512 KiB each, stay in the cache. 64 to 256 Ki are
# equally fast.
BLOCK = 128 * 1024
RANK_BLOCK = 16 * 1024  # elements of a row: shorter rows cost more calls, longer leave the cache
LANES = 1024  # partial sums of a squared norm
ROW = 8192  # elements of a row: numpy's BLAS stays on one thread up to 10,000
GEMM_LIMIT = 262_144  # multiplications below which OpenBLAS stays on one thread
GEMM_COLUMNS = 8  # columns of inner products that one panel computes
GEMM_TILE = 512  # elements over which one matrix product sums
SCRATCH_BYTES = 1024 * 1024  # scratch of doubles: half of the second-level cache
ROOM_BYTES = 8 << 20  # most scratch for many contributions, and most bytes of one read
RANK_BYTES = 2 << 20  # bytes of all contributions that ranks read at once, to stay in the cache


def weighted_sum(cohort: Cohort, factors: Floats, piece: TensorPiece, out: Floats) -> None:
    """Set out (N,) to the sum of factors[i] * x_i in task order, each product rounded before it is
    added.
    """
    product = aligned(min(BLOCK, piece.size))
    weighted = [(index, factors[index]) for index in range(len(cohort)) if factors[index] != 0]
    for start, stop in grid(piece.size, BLOCK):
        into = out[start:stop]
        if not weighted:
            into.fill(0)
        fresh = True
        for index, factor in weighted:
            x = cohort.read(index, piece, start, stop, product)
            if fresh:
                np.multiply(x, factor, out=into)
                fresh = False
            else:
                scaled = np.multiply(x, factor, out=product[: stop - start])
                np.add(into, scaled, out=into)


def quick_square(x: Floats) -> float:
    """Return the squared norm, good to six digits: float32 rows are summed in float64. It is not
    finite for a NaN or a value beyond 1e19.
    """
    edge = len(x) // ROW * ROW
    rows = x[:edge].reshape(-1, ROW)
    total = float(np.vecdot(rows, rows).sum(dtype=np.float64))
    return total + float(np.vecdot(x[edge:], x[edge:]))


def squared_norms(cohort: Cohort, piece: TensorPiece) -> Doubles:
    """Return the contributions' squared norms (K,): exact products, summed in float64 along fixed
    lanes.
    """
    norms_squared = np.zeros(len(cohort))
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
        # fsum raises for opposite infinities, which squares cannot have, and returns a NaN.
        norms_squared[index] = math.fsum(lanes.tolist())
    return norms_squared


def inner_products(cohort: Cohort, piece: TensorPiece) -> Doubles:
    """Return (K, K) float64 inner products of the contributions."""
    count = len(cohort)
    columns = GEMM_COLUMNS if count > GEMM_COLUMNS else count + 1
    tile = 8
    while tile < GEMM_TILE and 2 * tile * count * columns <= GEMM_LIMIT:
        tile *= 2
    most = max(1, min(SCRATCH_BYTES // (8 * count * tile), ROOM_BYTES // (8 * count * count)))
    block = tile * min(most, -(-piece.size // tile))
    wide = aligned(count + 1, block, dtype=np.float64)
    wide[count] = 0
    panels = list(_panels(wide, tile))
    for start, stop, rows in blocks(cohort, piece, block, ROOM_BYTES):
        for index, row in enumerate(rows):
            np.copyto(wide[index, : stop - start], row)
        wide[:, stop - start :] = 0
        for left, right, products, total in panels:
            np.add(total, np.matmul(left, right, out=products), out=total)
    gram = np.zeros((count, count))
    for first, (_, _, _, total) in zip(range(0, count, GEMM_COLUMNS), panels, strict=True):
        lower = np.tril(total.sum(axis=0)[:, : count - first])
        gram[first:, first : first + lower.shape[1]] = lower
    return gram + np.tril(gram, -1).T


def _panels(wide: Doubles, tile: int) -> Iterator[tuple[Doubles, Doubles, Doubles, Doubles]]:
    """Yield for each group of columns of the inner products: the left and the right factor, as
    tiled views of `wide` (K + 1, B), and arrays for the products and their totals.

    Blocks above the diagonal are left out. The last panel has an extra column of zeros, since numpy
    multiplies two equal factors by a routine half as fast (measured).
    """
    count = len(wide) - 1
    tiles = wide.reshape(count + 1, -1, tile).transpose(1, 0, 2)  # (tiles, K + 1, T)
    for first in range(0, count, GEMM_COLUMNS):
        last = first + GEMM_COLUMNS
        left = tiles[:, first:count]
        right = tiles[:, first : last if last < count else count + 1].transpose(0, 2, 1)
        shape = (len(tiles), left.shape[1], right.shape[2])
        yield left, right, np.empty(shape), np.zeros(shape)


def rank_mean(cohort: Cohort, piece: TensorPiece, out: Floats, *, low: int, high: int) -> None:
    """Set out (N,) to the mean of the ranks [low, high) of each coordinate's K sorted values. A NaN
    among them gives a NaN.

    Sorting coordinate by coordinate takes 10 to 30 times as long as the mean; a network of minima
    and maxima of whole rows, reduced to the wanted ranks, takes 2 to 4 times as long.
    """
    count = len(cohort)
    network = rank_network(count, low, high)
    size = RANK_BLOCK
    while size > 512 and 4 * size * network.rows > ROOM_BYTES:
        size //= 2
    size = min(size, piece.size)
    width = -(-size * 4 // LINE) * LINE // 4
    scratch = aligned(network.rows - count, width)
    divisor = np.float32(high - low)
    for start, stop, cohort_rows in blocks(cohort, piece, size, RANK_BYTES):
        merged = out[start:stop]
        # Adding to zero turns -0.0 into 0.0, since a minimum may return either of the two.
        merged.fill(0)
        rows = [*cohort_rows, *scratch[:, : stop - start], merged]
        for combine, left, right, into in network.steps:
            combine(rows[left], rows[right], out=rows[into])
        if high - low > 1:
            np.divide(merged, divisor, out=merged)


def blocks(
    cohort: Cohort, piece: TensorPiece, size: int, room: int
) -> Iterator[tuple[int, int, list[Floats]]]:
    """Yield blocks of `size` elements of a piece, each with the values of every contribution in it.

    Blocks are cut from longer reads of `room` bytes over all contributions, since a read takes 4 us
    before its first element, as long as the conversion of 8,000 elements.
    """
    count = len(cohort)
    span = max(1, min(BLOCK, room // (4 * count)) // size) * size
    for first, last in grid(piece.size, span):
        rows = [cohort.read(index, piece, first, last) for index in range(count)]
        for start, stop in grid(last - first, size):
            yield first + start, first + stop, [row[start:stop] for row in rows]
