"""Private mean: clipped updates over a fixed divisor, with Gaussian noise."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from typing_extensions import override

from coordinator.aggregation import kernels
from coordinator.aggregation.cohort import Cohort, Doubles, Floats, TensorPiece
from coordinator.aggregation.robust import Aggregator

ROUNDING = 1e-6  # relative reduction of the factors, whose rounded sum must not exceed the clip


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseTerms:
    """Terms of a private mean, fixed when the merge begins."""

    clip: float  # largest norm with which a member's updates count
    sigma: float  # standard deviation of the noise in each element of the update
    # p_i: portion of each contribution in the sum; the portions of a member sum to 1 / divisor
    portions: tuple[float, ...]
    key: bytes = field(repr=False)  # secret seed of the noise


@dataclass(frozen=True, slots=True)
class PrivateMean(Aggregator):
    """Private mean: the sum of p_i x_i min(1, clip / |x_i|), plus noise (McMahan et al. 2018).

    The divisor is fixed before the merge, so one member moves the sum by at most clip / divisor,
    whatever it submits. The noise of a piece follows from the key and the place of the piece, so it
    is the same on every replica. It is drawn in float32.
    """

    terms: NoiseTerms
    surveys: ClassVar[bool] = True

    @override
    def survey(self, cohort: Cohort, piece: TensorPiece) -> Doubles | None:
        return kernels.squared_norms(cohort, piece)

    @override
    def factors(self, cohort: Cohort, survey: Doubles | None) -> Floats:
        if survey is None:
            raise ValueError("a private mean needs its survey")
        portions = np.asarray(self.terms.portions)[list(cohort.positions)]
        norms = np.sqrt(survey)
        scales = np.minimum(1, self.terms.clip / np.maximum(norms, 1e-300))
        return (portions * scales * (1 - ROUNDING)).astype(np.float32)

    @override
    def fill(self, cohort: Cohort, factors: Floats, piece: TensorPiece, out: Floats) -> None:
        kernels.weighted_sum(cohort, factors, piece, out)
        noise = _generator(self.terms.key, piece).standard_normal(piece.size, np.float32)
        noise *= np.float32(self.terms.sigma)
        out += noise


def _generator(key: bytes, piece: TensorPiece) -> np.random.Generator:
    place = f"{piece.spec.name} {piece.start}".encode()
    seed = hashlib.blake2b(place, key=key, digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(seed)))
