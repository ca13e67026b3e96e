"""Aggregation rules, and the walk over a model that merges many contributions into one update.

    factors = prepare(rule, cohort, pieces(schema))  # distance rules and clips read the files
    for merged in merge(rule, cohort, factors, pieces(schema)):
        ...                                                  # server optimiser, write

The same contributions in the same order give the same bytes, for any number of threads and any
division into shards: each shard surveys its own pieces, and `merge_factors` adds all surveys once,
in canonical order. Each thread needs memory for one piece and some scratch, never for a whole model
or for a piece of every contribution.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from coordinator.aggregation import kernels
from coordinator.aggregation.cohort import Cohort, Doubles, Floats, NotFinite, TensorPiece
from coordinator.aggregation.private_mean import NoiseTerms, PrivateMean
from coordinator.aggregation.robust import (
    MEDIAN,
    Aggregator,
    CentredClip,
    Krum,
    NormClip,
    TrimmedMean,
)
from shared.tensors.quantize import sum_squares
from shared.tensors.slices import aligned

if TYPE_CHECKING:
    from coordinator.plan.plan_tables import Plan

CLIP_EPSILON = 1e-6  # the same as torch's


@dataclass(frozen=True, slots=True)
class Mean(Aggregator):
    """Weighted mean: the sum of w_i x_i in task order, multiply then add."""


@dataclass(frozen=True, slots=True)
class ClippedRule(Aggregator):
    """Rule that scales the update of another rule down to a norm of at most `norm`, as torch's
    clipping does. Its factors are those of the other rule, followed by the scale.
    """

    rule: Aggregator
    norm: float
    surveys: ClassVar[bool] = True

    @override
    def survey(self, cohort: Cohort, piece: TensorPiece) -> Doubles | None:
        if self.rule.surveys:  # the inner products give the norm of a weighted sum
            return kernels.inner_products(cohort, piece)
        merged = aligned(piece.size)
        self.rule.fill(cohort, self.rule.factors(cohort, None), piece, merged)
        return np.array([sum_squares(merged)])

    @override
    def factors(self, cohort: Cohort, survey: Doubles | None) -> Floats:
        if survey is None:
            raise ValueError("a clipped update needs its survey")
        products = np.diag(survey) if isinstance(self.rule, NormClip) else survey
        factors = self.rule.factors(cohort, products if self.rule.surveys else None)
        square = survey[0]
        if self.rule.surveys:
            wide = factors.astype(np.float64)
            square = (wide[:, None] * wide * survey).sum()
        scale = min(1.0, self.norm / (math.sqrt(max(0.0, float(square))) + CLIP_EPSILON))
        return np.append(factors, np.float32(scale))

    @override
    def fill(self, cohort: Cohort, factors: Floats, piece: TensorPiece, out: Floats) -> None:
        self.rule.fill(cohort, factors[:-1], piece, out)
        out *= factors[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedPiece:
    """One merged piece. `values` (N,) may be written to; a later piece reuses their memory."""

    piece: TensorPiece
    values: Floats


def aggregator(
    plan: Plan, contributions: int, clip_norm: float = 0.0, noise: NoiseTerms | None = None
) -> Aggregator:
    """Return a plan's rule for this number of contributions, with clipping to `clip_norm` if that
    is not 0. Terms of noise replace the plan's rule by the private mean.
    """
    if noise is not None:
        return PrivateMean(noise)
    rule = _rule(plan, contributions)
    return ClippedRule(rule, clip_norm) if clip_norm else rule


def _rule(plan: Plan, contributions: int) -> Aggregator:
    if contributions < plan.aggregate_from:
        return Mean()
    match plan.aggregate:
        case "mean":
            return Mean()
        case "trimmed-mean":
            return TrimmedMean(plan.trim)
        case "median":
            return MEDIAN
        case "krum":
            return Krum(plan.byzantine, several=False)
        case "multi-krum":
            return Krum(plan.byzantine, several=True)
        case "centred-clip":
            return CentredClip(plan.clip_factor or 1.0)
        case "norm-clip":
            return NormClip(plan.clip_factor or 1.5)


def prepare(
    rule: Aggregator, cohort: Cohort, grid: Sequence[TensorPiece], threads: int = 1
) -> Floats:
    """Return the factors of a merge that is not divided into shards, (K,) or (K + 1,) with a clip.
    Raises NotFinite.
    """
    return merge_factors(rule, cohort, survey(rule, cohort, grid, threads))


def survey(
    rule: Aggregator, cohort: Cohort, grid: Sequence[TensorPiece], threads: int = 1
) -> Iterator[Doubles | None]:
    """Yield the rule's survey of each piece, None for pieces that the rule need not survey. Raises
    NotFinite for NaN and infinity.
    """

    def survey_piece(piece: TensorPiece) -> Doubles | None:
        if piece.spec.role != "parameter":
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            figures = rule.survey(cohort, piece)
        if figures is not None and not np.isfinite(figures).all():
            raise NotFinite(cohort.culprits(piece) or cohort.positions, _where(piece))
        return figures

    if not rule.surveys or threads <= 1:
        yield from map(survey_piece, grid)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(survey_piece, grid)


def merge_factors(rule: Aggregator, cohort: Cohort, parts: Iterable[Doubles | None]) -> Floats:
    """Return a merge's factors from the surveys of all pieces, which are in canonical order. Raises
    NotFinite.
    """
    total: Doubles | None = None
    for part in parts:
        if part is not None:
            total = part.copy() if total is None else np.add(total, part, out=total)
    return rule.factors(cohort, total)


def merge(
    rule: Aggregator, cohort: Cohort, factors: Floats, grid: Sequence[TensorPiece], threads: int = 1
) -> Iterator[MergedPiece]:
    """Yield the merged pieces, in the order of `grid`.

    The rule merges parameters. Buffers, which are absolute values, are merged by the median of each
    element (of two contributions by the weighted mean) whatever the rule, so that no minority
    changes a variance. Momenta are merged by the weighted mean where the rule is the mean, and else
    like buffers: a robust rule compares parameters, and a made-up momentum may come with honest
    ones. Counters are left to `merge_counters`. Raises NotFinite, which names the
    contributions to leave out. A counter in `grid` raises ValueError.
    """

    def work(piece: TensorPiece, out: Floats) -> MergedPiece:
        if piece.spec.role == "counter":
            raise ValueError(f"{piece.spec.name} is a counter: merge_counters takes it")
        combiner, piece_factors = (rule, factors) if piece.spec.role in by_rule else buffer_rule
        with np.errstate(over="ignore", invalid="ignore"):
            combiner.fill(cohort, piece_factors, piece, out)
            square = kernels.quick_square(out)
        # The norm doubles as the test for NaN; the piece is scanned only if its norm is not finite.
        if not math.isfinite(square) and not np.isfinite(out).all():
            raise NotFinite(cohort.culprits(piece) or cohort.positions, _where(piece))
        return MergedPiece(piece=piece, values=out)

    by_rule = ("parameter", "momentum") if isinstance(rule, Mean) else ("parameter",)
    middle: Aggregator = MEDIAN if len(cohort) > 2 else Mean()
    buffer_rule = middle, middle.factors(cohort, None)
    largest = max((piece.size for piece in grid), default=0)
    if threads <= 1:
        room = aligned(largest)
        for piece in grid:
            yield work(piece, room[: piece.size])
        return
    rooms = deque(aligned(largest) for _ in range(threads + 1))
    waiting: deque[Future[MergedPiece]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for piece in grid:
            if len(waiting) > threads - 1:
                yield waiting.popleft().result()
            room = rooms[0]
            rooms.rotate(-1)
            waiting.append(pool.submit(work, piece, room[: piece.size]))
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def merge_counters(base: NDArray[Any], values: Sequence[NDArray[Any]], most: int) -> NDArray[Any]:
    """Return each counter as the median of the contributions' values (of two middle ones the
    lower), at least the base's value and at most `most` above it.

    Raises ValueError if there are no values.
    """
    if not values:
        raise ValueError("no contribution carries the counter")
    claims = np.sort(np.stack(values), axis=0)[(len(values) - 1) // 2]
    room = min(most, int(np.iinfo(base.dtype).max) - int(base.max(initial=0)))
    counted: NDArray[Any] = np.clip(claims, base, base + room)
    return counted


def _where(piece: TensorPiece) -> str:
    return f"{piece.spec.name}[{piece.start}:{piece.stop}]"
