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
from typing import NamedTuple

import numpy as np

from coordinator.merge.cohort import Cohort, Doubles, Floats, Piece
from shared.tensors.slices import LINE, aligned
from shared.tensors.spec import grid

BLOCK = (
    128 * 1024
)  # sum and product of a block (512 KiB each) stay in the cache; 64-256 Ki elements run alike
RANK_BLOCK = (
    16 * 1024
)  # 64 KiB rows where the scratch of a network leaves the cache room for them; smaller ones pay more calls
RANK_BYTES = 5 << 18  # 1.25 MiB of scratch: beyond it a network of 32 rows takes a sixth longer
LANES = 1024
ROW = 8192  # numpy's BLAS takes a second thread above 10,000 elements
GEMM_LIMIT = 262_144  # multiplications below which OpenBLAS stays on one thread
GEMM_COLUMNS = 8  # of the products taken at once; the halves above the diagonal are left out
GEMM_MANY = 16  # contributions above which twice as many columns are faster, by a fifth with 32
GEMM_TILE = 512  # elements along which one of them sums
SCRATCH_BYTES = 1024 * 1024  # of doubles: what the second-level cache holds twice
ROOM_BYTES = 8 * 1024 * 1024  # that scratch may grow to when contributions are many


def weighted_sum(
    cohort: Cohort,
    factors: Floats,
    piece: Piece,
    out: Floats,
    *,
    squares: Doubles | None = None,
) -> None:
    """out (N,) = sum of factors[i] * x_i in task order, each product rounded before it is added.

    `squares` (K,) receives each contribution's squared norm on the way: good for checks, not for coefficients.
    """
    product = aligned(min(BLOCK, piece.size))
    chosen = [(index, factors[index]) for index in range(len(cohort)) if factors[index] != 0]
    for start, stop in grid(piece.size, BLOCK):
        into = out[start:stop]
        if not chosen:
            into.fill(0)
        fresh = True
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


def inner_products(cohort: Cohort, piece: Piece) -> Doubles:
    """(K, K) float64 inner products of the contributions."""
    count = len(cohort)
    width, tile = GEMM_COLUMNS if count <= GEMM_MANY else 2 * GEMM_COLUMNS, 8
    while tile < GEMM_TILE and 2 * tile * count * (width + 1) <= GEMM_LIMIT:
        tile *= 2
    tiles_max = max(1, min(SCRATCH_BYTES // (8 * count * tile), ROOM_BYTES // (8 * count * count)))
    block = tile * tiles_max
    wide = aligned(count + 1, block, dtype=np.float64)
    wide.fill(0)  # the last row stays zero
    found = np.zeros((count, count))
    for start, stop in grid(piece.size, block):
        size = stop - start
        padded = -(-size // tile) * tile
        for index in range(count):
            np.copyto(wide[index, :size], cohort.read(index, piece, start, stop))
        wide[:, size:padded] = 0
        tiles = wide[:, :padded].reshape(count + 1, -1, tile).transpose(1, 0, 2)  # (tiles, K+1, T)
        for first in range(0, count, width):
            last = first + width
            # One column more than wanted: of two equal factors numpy takes a routine half as fast, measured.
            columns = tiles[:, first : last + 1].transpose(0, 2, 1)
            products = np.matmul(tiles[:, first:count], columns).sum(axis=0)
            found[first:, first:last] += products[:, : min(last, count) - first]
    lower = np.tril(found)
    return lower + np.tril(lower, -1).T


def median(cohort: Cohort, piece: Piece, out: Floats) -> None:
    """out (N,) = coordinate median; the mean of the two middle ones when K is even."""
    rank_mean(cohort, piece, out, low=(len(cohort) - 1) // 2, high=len(cohort) // 2 + 1)


def rank_mean(cohort: Cohort, piece: Piece, out: Floats, *, low: int, high: int) -> None:
    """out (N,) = mean of the values that stand at [low, high) when each coordinate is sorted. A NaN stays a NaN.

    Sorting coordinate by coordinate costs 10-30 times the mean; a network of whole-row minima and maxima, cut down to what
    the wanted ranks depend on, 2-5 times.
    """
    count = len(cohort)
    network = rank_network(count, low, high)
    size = RANK_BLOCK
    while size > 512 and 4 * size * (network.rows - count) > RANK_BYTES:
        size //= 2
    size = min(size, piece.size)
    width = -(-size * 4 // LINE) * LINE // 4
    scratch = aligned(max(1, network.rows - count), width)
    divisor = np.float32(high - low)
    for start, stop in grid(piece.size, size):
        rows = [cohort.read(index, piece, start, stop) for index in range(count)]
        rows += list(scratch[:, : stop - start])
        for compare, left, right, into in network.steps:
            compare(rows[left], rows[right], out=rows[into])
        merged = out[start:stop]
        # Adding to zero also makes one zero of -0.0 and 0.0, whose order a minimum does not promise.
        merged.fill(0)
        for row in network.wanted:
            np.add(merged, rows[row], out=merged)
        if high - low > 1:
            np.divide(merged, divisor, out=merged)


class Network(NamedTuple):
    """Minima and maxima between rows. The first K rows are the contributions, which are read only; the others are scratch."""

    rows: int
    steps: tuple[
        tuple[np.ufunc, int, int, int], ...
    ]  # minimum or maximum of two rows, and where to
    wanted: tuple[int, ...]  # rows that hold the wanted ranks in the end, in no order


@functools.lru_cache(maxsize=256)
def rank_network(count: int, low: int, high: int) -> Network:
    """A sorting network over `count` rows without what the sum of ranks [low, high) does not need."""
    steps: list[tuple[np.ufunc, int, int, int]] = []
    place = list(range(count))  # the row in which each wire's value is
    free: list[int] = []
    rows = count

    def fresh() -> int:
        nonlocal rows
        rows += not free
        return free.pop() if free else rows - 1

    for left, right, smaller, larger in _needed(count, low, high):
        one, other = place[left], place[right]
        own = [row for row in (one, other) if row >= count]  # may be written over by the last step
        if smaller and larger:
            place[left] = fresh()
            steps.append((np.minimum, one, other, place[left]))
        into = own.pop() if own else fresh()
        if larger:
            place[right] = into
            steps.append((np.maximum, one, other, into))
        else:
            place[left] = into
            steps.append((np.minimum, one, other, into))
        free += own
    return Network(rows, tuple(steps), tuple(place[low:high]))


def _needed(count: int, low: int, high: int) -> list[tuple[int, int, bool, bool]]:
    """The comparisons that the sum of ranks [low, high) depends on: (left, right, minimum needed, maximum needed)."""
    used, summed = (
        set[int](),
        set(range(low, high)),
    )  # wires that are read later; wires of which only the sum counts
    kept: list[tuple[int, int, bool, bool]] = []
    for left, right in reversed(_comparators(count)):
        if left in summed and right in summed:
            continue  # their sum is the same either way
        needs = used | summed
        if left in needs or right in needs:
            kept.append((left, right, left in needs, right in needs))
            used |= {left, right}
            summed -= {left, right}
    return kept[::-1]


def _comparators(count: int) -> list[tuple[int, int]]:
    """The pairwise sorting network (Parberry 1992): it leaves less than Batcher's when only some ranks are wanted."""
    found: list[tuple[int, int]] = []
    gap = 1
    while gap < count:
        found += [(right - gap, right) for right in range(count) if right & gap]
        gap *= 2
    gap, reach = gap // 4, 1
    while gap:
        far = reach
        while far:
            first = (far + 1) * gap
            found += [
                (right - far * gap, right) for right in range(first, count) if not right & gap
            ]
            far //= 2
        gap, reach = gap // 2, 2 * reach + 1
    return found
