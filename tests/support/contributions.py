"""Contributions in memory that aggregation rules are tried with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from coordinator.aggregation.aggregate import Mean, merge, prepare
from coordinator.aggregation.cohort import Cohort, Floats, pieces
from coordinator.aggregation.robust import (
    MEDIAN,
    Aggregator,
    CentredClip,
    Krum,
    NormClip,
    TrimmedMean,
)
from shared.tensors.spec import Schema, TensorSpec

RULES: dict[str, Aggregator] = {
    "mean": Mean(),
    "trimmed-mean": TrimmedMean(0.2),
    "median": MEDIAN,
    "krum": Krum(0.2, several=False),
    "multi-krum": Krum(0.2, several=True),
    "centred-clip": CentredClip(1.0),
    "norm-clip": NormClip(1.5),
}

SCHEMA: Schema = (
    TensorSpec("embedding", (31, 40)),
    TensorSpec("block.weight", (16, 33)),
    TensorSpec("block.bias", (7,)),
)


@dataclass
class Arrays:
    """A contribution held in memory; it notes the longest slice that was asked for."""

    tensors: dict[str, Floats]
    longest: int = field(default=0)

    def read(self, name: str, start: int, stop: int, room: Floats | None = None) -> Floats:
        self.longest = max(self.longest, stop - start)
        return self.tensors[name].reshape(-1)[start:stop]


def contributions(count: int, schema: Schema = SCHEMA, seed: int = 0) -> list[Arrays]:
    rng = np.random.default_rng(seed)
    return [
        Arrays({spec.name: rng.standard_normal(spec.shape, dtype=np.float32) for spec in schema})
        for _ in range(count)
    ]


def flat(contribution: Arrays) -> Floats:
    return np.concatenate([values.reshape(-1) for values in contribution.tensors.values()])


def merged(rule: Aggregator, group: Cohort, schema: Schema = SCHEMA, threads: int = 1) -> Floats:
    grid = pieces(schema)
    factors = prepare(rule, group, grid, threads)
    return np.concatenate(
        [part.values.copy() for part in merge(rule, group, factors, grid, threads)]
    )


def stack(crowd: Sequence[Arrays]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.stack([flat(contribution).astype(np.float64) for contribution in crowd])
