"""Shards of a model: parts that are merged apart, each with a weights file and optimiser state.

A shard is a set of pieces of the fixed grid, so the arithmetic, and every byte of a version, is the
same for any number of shards, and a run can continue with another number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from coordinator.aggregation.cohort import TensorPiece, pieces
from shared.errors import InvalidPlan
from shared.tensors.spec import Schema, TensorSpec

Shard: TypeAlias = tuple[TensorPiece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Pieces of a file and their places in it, for a whole model or one of its shards."""

    pieces: Shard
    schema: Schema  # schema of the file
    whole: bool  # True: the file is of the whole model, with undivided tensors

    def place(self, piece: TensorPiece) -> tuple[str, int]:
        """Return the tensor of the file that holds a piece, and the piece's first element in it."""
        return (piece.spec.name, piece.start) if self.whole else (file_name(piece), 0)


def split(schema: Schema, shards: int, by: Literal["size", "name"] = "size") -> tuple[Shard, ...]:
    """Return the pieces of each shard in canonical order, the same on every machine.

    "size": the largest piece goes first, each to the shard with the fewest elements. "name": whole
    tensors go by the hash of their name, so that a tensor stays in its shard when others are added
    or removed; a shard may be empty. Raises InvalidPlan for more shards than pieces, by size.
    """
    grid = pieces(schema)
    if by == "size":
        if shards > len(grid):
            raise InvalidPlan(
                f"shards = {shards}, but this model has only {len(grid)} pieces to spread: "
                f"set shards to {max(1, len(grid))} or less"
            )
        homes = _by_size(grid, shards)
    else:
        homes = [_home(piece.spec.name, shards) for piece in grid]
    return tuple(
        tuple(piece for piece, home in zip(grid, homes, strict=True) if home == shard)
        for shard in range(shards)
    )


def file_name(piece: TensorPiece) -> str:
    """Return a piece's name in a shard's file: its tensor's, or `name[start:stop]` for a part."""
    return piece.spec.name if piece.whole else f"{piece.spec.name}[{piece.start}:{piece.stop}]"


def shard_schema(shard: Shard) -> Schema:
    """Return the schema of a shard's file: whole tensors by name, parts as `name[start:stop]`."""
    return tuple(piece.spec if piece.whole else _slice_spec(piece) for piece in shard)


def reassemble(schema: Schema, shards: Sequence[Shard]) -> Iterator[tuple[TensorPiece, int, str]]:
    """Yield every piece of the model in canonical order, its shard, and its name in that shard's
    file.

    Raises ValueError unless the shards hold each piece exactly once.
    """
    homes = {
        (piece.spec.name, piece.start): (index, piece)
        for index, shard in enumerate(shards)
        for piece in shard
    }
    grid = pieces(schema)
    if len(homes) != len(grid) or sum(len(shard) for shard in shards) != len(grid):
        raise ValueError("the shards do not hold each piece of the model exactly once")
    for piece in grid:
        index, shard_piece = homes.get((piece.spec.name, piece.start), (-1, piece))
        if index < 0 or shard_piece != piece:
            raise ValueError(f"no shard holds {piece.spec.name}[{piece.start}:{piece.stop}]")
        yield piece, index, file_name(piece)


def _by_size(grid: Sequence[TensorPiece], shards: int) -> list[int]:
    homes = [0] * len(grid)
    loads = [0] * shards
    for index in sorted(range(len(grid)), key=lambda index: (-grid[index].size, index)):
        lightest = loads.index(min(loads))
        homes[index] = lightest
        loads[lightest] += grid[index].size
    return homes


def _home(name: str, shards: int) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % shards


def _slice_spec(piece: TensorPiece) -> TensorSpec:
    return TensorSpec(
        name=file_name(piece),
        shape=(piece.size,),
        dtype=piece.spec.dtype,
        role=piece.spec.role,
    )
