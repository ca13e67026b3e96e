"""Aggregation rules: their base, and those that limit a hostile minority in place of the mean.

Coordinate rules (trimmed mean, median) count every contribution once, whatever its weight. Distance
rules (Krum, multi-Krum, centred clip, norm clip) first survey the whole model piece by piece, then
use a weighted sum with other factors: they never hold more than one piece. Legend: K contributions,
x_i the i-th, w_i its weight (they sum to 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation import kernels
from coordinator.aggregation.cohort import Cohort, Doubles, Floats, NotFinite, TensorPiece

CLIP_ROUNDS = 20
CLIP_TOLERANCE = 1e-6  # relative to the radius
# Fewer equal voices than this show no common direction: if two fifths are hostile copies of one
# honest contribution, they are a majority together with it.
VOICES = 8
AGREED = 0.6  # median cosine to the others from which on contributions have a common direction
ASTRAY = 0.25  # share of that cosine below which a contribution points elsewhere
HALF = 1e-9  # tolerance for the rounding error of a sum of weights
ROUNDING = 1e-6  # relative to the norms: contributions that differ by less are the same


class Aggregator:
    """Stateless rule that combines contributions into one update; this base takes their weighted
    sum.
    """

    surveys: ClassVar[bool] = False  # True: needs a survey of the whole model before any merge

    def survey(self, cohort: Cohort, piece: TensorPiece) -> Doubles | None:
        """Return the rule's statistics of a piece, additive over pieces; None if it needs none."""
        return None

    def settle(self, cohort: Cohort, survey: Doubles | None) -> Floats:
        """Return each contribution's factor, (K,), from the model's survey. Raises NotFinite."""
        return np.asarray(cohort.weights, np.float32)

    def fill(
        self, cohort: Cohort, factors: Floats, piece: TensorPiece, out: Floats
    ) -> Doubles | None:
        """Write the merged piece, (N,) float32; return the contributions' squared norms, (K,), if
        the rule computes them.
        """
        kernels.weighted_sum(cohort, factors, piece, out)
        return None


@dataclass(frozen=True, slots=True)
class TrimmedMean(Aggregator):
    """Mean of each coordinate without its largest and smallest `trim` share (Yin et al. 2018)."""

    trim: float

    def fill(self, cohort: Cohort, factors: Floats, piece: TensorPiece, out: Floats) -> None:
        cut = min(int(self.trim * len(cohort)), (len(cohort) - 1) // 2)
        kernels.rank_mean(cohort, piece, out, low=cut, high=len(cohort) - cut)


MEDIAN = TrimmedMean(0.5)  # coordinate median; the mean of the two middle values for even K


@dataclass(frozen=True, slots=True)
class Krum(Aggregator):
    """Contribution nearest to its neighbours (Blanchard et al. 2017); with `several`, the weighted
    mean of the best K - f.

    f is `byzantine` x K, at most (K - 3) / 2. Fewer than three contributions cannot be compared and
    are averaged.
    """

    byzantine: float
    several: bool
    surveys: ClassVar[bool] = True

    def survey(self, cohort: Cohort, piece: TensorPiece) -> Doubles | None:
        return kernels.inner_products(cohort, piece) if len(cohort) > 2 else None

    def settle(self, cohort: Cohort, survey: Doubles | None) -> Floats:
        weights = np.asarray(cohort.weights)
        count = len(cohort)
        if survey is None or count < 3:
            return weights.astype(np.float32)
        hostile = min(int(self.byzantine * count), (count - 3) // 2)
        distances = _squared_distances(survey)
        np.fill_diagonal(
            distances, -1.0
        )  # the contribution itself comes first in the sorted row, even before a twin
        nearest = np.sort(distances, axis=1)[:, 1 : count - hostile - 1]  # K - f - 2 neighbours
        # Compared in float32, so that the last bit of a double never decides; of equal scores the
        # first wins.
        order = np.argsort(nearest.sum(axis=1).astype(np.float32), kind="stable")
        best = order[: count - hostile] if self.several else order[:1]
        factors = np.zeros(count)
        factors[best] = weights[best] / math.fsum(weights[best].tolist())
        return factors.astype(np.float32)


@dataclass(frozen=True, slots=True)
class CentredClip(Aggregator):
    """v <- v + sum w_i (x_i - v) min(1, r / |x_i - v|), at most 20 rounds (Karimireddy et al.
    2021).

    Medians count by weight, so that many contributions of little weight move nothing. v begins at
    the contribution with the smallest median distance to all (more than half lie near it). In each
    round the radius r is `factor` x the median distance from v. The coordinate median is not
    needed. v is kept as factors of the contributions, and all rounds use their inner products, so
    that the data is read twice instead of twenty times. Each merge computes its own start: a stored
    one that once became NaN would spoil every later round.

    Clipped noise still shortens the step. If most contributions agree on a direction, the others
    are therefore left out and v is computed again. If honest contributions point in different
    directions, as with games, none is left out.
    """

    factor: float
    surveys: ClassVar[bool] = True

    def survey(self, cohort: Cohort, piece: TensorPiece) -> Doubles | None:
        return kernels.inner_products(cohort, piece)

    def settle(self, cohort: Cohort, survey: Doubles | None) -> Floats:
        if survey is None:
            raise ValueError("centred clip needs its survey")
        weights = np.asarray(cohort.weights)
        place = self._centre(survey, weights)
        agreeing = _agreeing(survey, weights, place)
        if not agreeing.all():
            place = np.zeros(len(cohort))
            shares = weights[agreeing] / math.fsum(weights[agreeing].tolist())
            place[agreeing] = self._centre(survey[np.ix_(agreeing, agreeing)], shares)
        if not np.isfinite(place).all():
            raise NotFinite(cohort.positions, "the centre of the contributions")
        return place.astype(np.float32)

    def _centre(self, survey: Doubles, weights: Doubles) -> Doubles:
        """Return v as the factors of the contributions in a weighted sum; the factors sum to 1."""
        norms = np.diag(survey)
        apart = np.sqrt(_squared_distances(survey))
        place = np.zeros(len(weights))
        middles = [_middle(row, weights) for row in apart]
        place[np.argmin(np.asarray(middles, np.float32))] = 1
        for _ in range(CLIP_ROUNDS):
            cross = _dot(survey, place)
            distances = np.sqrt(np.maximum(norms - 2 * cross + _dot(place, cross), 0))
            radius = self.factor * _middle(distances, weights)
            if radius <= ROUNDING * math.sqrt(_middle(norms, weights)):
                break
            pull = weights * np.minimum(1, radius / np.maximum(distances, 1e-300))
            move = pull - place * pull.sum()
            place = place + move
            if _dot(_dot(survey, move), move) <= (CLIP_TOLERANCE * radius) ** 2:
                break
        return place


@dataclass(frozen=True, slots=True)
class NormClip(Aggregator):
    """Weighted mean of contributions clipped to `factor` x the cohort's weighted median norm."""

    factor: float
    surveys: ClassVar[bool] = True

    def survey(self, cohort: Cohort, piece: TensorPiece) -> Doubles | None:
        return kernels.squared_norms(cohort, piece)

    def settle(self, cohort: Cohort, survey: Doubles | None) -> Floats:
        if survey is None:
            raise ValueError("norm clip needs its survey")
        norms = np.sqrt(survey)
        limit = self.factor * _middle(norms, np.asarray(cohort.weights))
        scales = np.minimum(1, limit / np.maximum(norms, 1e-300))
        return (np.asarray(cohort.weights) * scales).astype(np.float32)


def _middle(values: Doubles, weights: Doubles) -> float:
    """Return the weighted median; the mean of the two middle values if exactly half the weight lies
    on each side, as with an even number of equal weights.
    """
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[order]) / np.sum(weights)
    low = order[min(int(np.searchsorted(below, 0.5 - HALF)), len(values) - 1)]
    high = order[min(int(np.searchsorted(below, 0.5 + HALF)), len(values) - 1)]
    return float(values[low] + values[high]) / 2


def _agreeing(survey: Doubles, weights: Doubles, place: Doubles) -> NDArray[np.bool_]:
    """Return which contributions point in the direction of most others, by the cosine of each to
    the centre of the rest. The bound is lower for a contribution of small weight, which is noisier.
    """
    norms, cross = np.diag(survey), _dot(survey, place)
    distances = np.maximum(_dot(place, cross) - 2 * place * cross + place**2 * norms, 1e-300)
    cosines = (cross - place * norms) / np.sqrt(np.maximum(norms, 1e-300) * distances)
    usual = _middle(cosines, weights)
    voices = math.fsum(weights.tolist()) ** 2 / math.fsum((weights**2).tolist())
    if voices < VOICES or not usual >= AGREED:  # also True for NaN
        return np.ones(len(weights), bool)
    short = np.sqrt(np.minimum(1, weights / _middle(weights, weights)))
    agreeing: NDArray[np.bool_] = cosines >= ASTRAY * usual * short
    return agreeing


def _squared_distances(products: Doubles) -> Doubles:
    """Return (K, K) squared distances from inner products."""
    norms = np.diag(products)
    distances: Doubles = np.maximum(norms[:, None] + norms[None, :] - 2 * products, 0)
    return distances


def _dot(left: Doubles, right: Doubles) -> Doubles:
    """Return products summed along the last axis without BLAS, so that all replicas get equal
    factors.
    """
    product: Doubles = np.asarray((left * right).sum(axis=-1))
    return product
