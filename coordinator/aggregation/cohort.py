"""Contributions of one merge, and the fixed grid of pieces for all walks over them.

Every pass of a merge goes piece by piece: a piece is at most `CHUNK_ELEMENTS` of one tensor, cut at
multiples of that (and so never within a quantised block). The grid depends only on the schema, not
on threads, shards or memory, so sums over it give the same bits everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidFrame
from shared.tensors.spec import Schema, TensorSpec, grid

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


class DeltaReader(Protocol):
    """One contribution, decoded to float32 slice by slice from its memory-mapped file."""

    def read(self, name: str, start: int, stop: int, room: Floats | None = None) -> Floats:
        """Return elements [start, stop) of the flattened tensor `name`; `room` is scratch."""


class NotFinite(InvalidFrame):
    """A contribution holds a NaN or an infinity, or is so large that the merge overflows."""

    def __init__(self, positions: Sequence[int], where: str) -> None:
        self.positions = tuple(positions)
        listed = ", ".join(str(position) for position in self.positions)
        super().__init__(
            f"{where} is not finite because of contribution {listed} (counted from 0 in task "
            "order): "
            "leave it out and merge again"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """Elements [start, stop) of one flattened tensor."""

    spec: TensorSpec
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        """Return True if the piece is all of its tensor."""
        return self.size == self.spec.count


def pieces(schema: Schema) -> tuple[TensorPiece, ...]:
    """Return the fixed grid over a schema, in canonical order; an empty tensor has no piece."""
    return tuple(
        TensorPiece(spec=spec, start=start, stop=stop)
        for spec in schema
        for start, stop in grid(spec.count)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohort:
    """Contributions of one merge in task order, with weights that sum to 1; `cohort` makes it."""

    readers: tuple[DeltaReader, ...]
    weights: tuple[float, ...]
    positions: tuple[int, ...]  # index of each contribution in the arguments of `cohort`

    def __len__(self) -> int:
        return len(self.readers)

    def read(
        self, index: int, piece: TensorPiece, start: int, stop: int, room: Floats | None = None
    ) -> Floats:
        """Read elements [start, stop) of a piece; `room` is optional scratch space.

        Raises InvalidFrame if the reader returns another length.
        """
        reader, first = self.readers[index], piece.start
        values = reader.read(piece.spec.name, first + start, first + stop, room)
        # numpy would silently broadcast a single element over the whole block.
        if values.shape != (stop - start,):
            raise InvalidFrame(
                f"contribution {self.positions[index]} gives {values.shape} elements of "
                f"{piece.spec.name} "
                f"where {stop - start} belong: submit it again"
            )
        return values

    def culprits(self, piece: TensorPiece) -> tuple[int, ...]:
        """Return the positions of the contributions that are not finite in a piece."""
        return tuple(
            position
            for index, position in enumerate(self.positions)
            if not np.isfinite(self.read(index, piece, 0, piece.size)).all()
        )


def cohort(readers: Sequence[DeltaReader], weights: Sequence[float]) -> Cohort:
    """Return the cohort of the contributions whose weight is above zero, in the given order. Raises
    ValueError if no weight is above zero.
    """
    if len(readers) != len(weights):
        raise ValueError(f"{len(readers)} contributions, but {len(weights)} weights")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError("a weight is negative or not finite")
    total = math.fsum(weights)
    if total <= 0 or not math.isfinite(total):
        raise ValueError("no contribution has a weight above zero")
    positions = [position for position, weight in enumerate(weights) if weight > 0]
    return Cohort(
        readers=tuple(readers[position] for position in positions),
        weights=tuple(weights[position] / total for position in positions),
        positions=tuple(positions),
    )
