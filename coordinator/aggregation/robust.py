"""Robust aggregation rules, which limit a hostile minority, and the base of all rules.

Coordinate rules (trimmed mean, median) count every contribution once, whatever its weight. Distance
rules (Krum, multi-Krum, centred clip, norm clip) first survey the whole model piece by piece, then
compute a weighted sum with other factors; they never hold more than one piece.

Legend: K contributions, x_i the i-th, w_i its weight; the weights sum to 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from coordinator.aggregation import kernels
from coordinator.aggregation.cohort import Cohort, Doubles, Floats, NotFinite, TensorPiece

CLIP_ROUNDS = 20  # most rounds of a centred clip
CLIP_TOLERANCE = 1e-6  # movement of the centre, relative to the radius, that ends the rounds
# Least number of equally weighted contributions that can show a common direction. Among fewer, two
# fifths that are hostile copies of one honest contribution are, together with it, a majority.
DIRECTION_COUNT_MIN = 8
AGREEMENT_MIN = 0.6  # least median cosine to the others of contributions with a common direction
ASTRAY = 0.25  # share of that cosine below which a contribution points elsewhere
HALF = 1e-9  # tolerance for the rounding error of a sum of weights
ROUNDING = 1e-6  # difference, relative to the norms, up to which contributions count as equal


class Aggregator:
    """Stateless rule that combines contributions into one update; this base computes their weighted
    sum.
    """

    surveys: ClassVar[bool] = False  # True: needs a survey of the whole model before any merge

    def survey(self, cohort: Cohort, piece: TensorPiece) -> Doubles | None:
        """Return the rule's statistics of a piece, float64, whose sum over all pieces is the survey
        of the model; None if the rule needs no statistics.
        """
        return None

    def factors(self, cohort: Cohort, survey: Doubles | None) -> Floats:
        """Return the factor of each contribution, (K,), from the survey of the model. Raises
        NotFinite.
        """
        return np.asarray(cohort.weights, np.float32)

    def fill(self, cohort: Cohort, factors: Floats, piece: TensorPiece, out: Floats) -> None:
        """Write the merged piece, (N,) float32, into `out`."""
        kernels.weighted_sum(cohort, factors, piece, out)


@dataclass(frozen=True, slots=True)
class TrimmedMean(Aggregator):
    """Mean of each coordinate without the `trim` share of largest and of smallest values (Yin et
    al. 2018).
    """

    trim: float

    @override
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

    @override
    def survey(self, cohort: Cohort, piece: TensorPiece) -> Doubles | None:
        return kernels.inner_products(cohort, piece) if len(cohort) > 2 else None

    @override
    def factors(self, cohort: Cohort, survey: Doubles | None) -> Floats:
        weights = np.asarray(cohort.weights)
        count = len(cohort)
        if survey is None or count < 3:
            return weights.astype(np.float32)
        hostile = min(int(self.byzantine * count), (count - 3) // 2)
        distances = _squared_distances(survey)
        # the contribution itself is then first in its sorted row, even before an equal one
        np.fill_diagonal(distances, -1.0)
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
    """Centred clip, v <- v + sum w_i (x_i - v) min(1, r / |x_i - v|), in at most 20 rounds
    (Karimireddy et al. 2021).

    All medians are weighted, so that many contributions of little weight have no power. The centre
    v begins at the contribution with the smallest median distance to all: more than half lie near
    it. In each round the radius r is `factor` x the median distance from v. v is represented by the
    factors of the contributions, and the rounds use their inner products, so that the data is read
    twice instead of twenty times. Each merge computes its own start, since a stored centre that
    once became NaN would spoil every later merge.

    Contributions that are noise shorten the step even when they are clipped. If most contributions
    agree on a direction, the others are therefore left out and v is computed again. If honest
    contributions point in different directions, as with games, none is left out.
    """

    factor: float
    surveys: ClassVar[bool] = True

    @override
    def survey(self, cohort: Cohort, piece: TensorPiece) -> Doubles | None:
        return kernels.inner_products(cohort, piece)

    @override
    def factors(self, cohort: Cohort, survey: Doubles | None) -> Floats:
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

    @override
    def survey(self, cohort: Cohort, piece: TensorPiece) -> Doubles | None:
        return kernels.squared_norms(cohort, piece)

    @override
    def factors(self, cohort: Cohort, survey: Doubles | None) -> Floats:
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
    """Return True for each contribution that points in the direction of most others, by its cosine
    to the centre of the others. The bound is lower for a small weight, which means more noise.
    """
    norms, cross = np.diag(survey), _dot(survey, place)
    distances = np.maximum(_dot(place, cross) - 2 * place * cross + place**2 * norms, 1e-300)
    cosines = (cross - place * norms) / np.sqrt(np.maximum(norms, 1e-300) * distances)
    usual = _middle(cosines, weights)
    equal_count = math.fsum(weights.tolist()) ** 2 / math.fsum((weights**2).tolist())
    if equal_count < DIRECTION_COUNT_MIN or not usual >= AGREEMENT_MIN:  # also True for NaN
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
    """Return the products summed along the last axis, without BLAS, so that every machine gets the
    same factors.
    """
    product: Doubles = np.asarray((left * right).sum(axis=-1))
    return product
