"""Interface of a workload whose experience is games on a board.

This module loads without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from shared.workloads.base import Config, Weights
from shared.workloads.experience import Experience


class MoveReply(msgspec.Struct, frozen=True, kw_only=True):
    """Move that a version makes in a position, and how it evaluates the position."""

    move: int
    value: float  # value for the player to move, -1 ... 1


class BoardAnalysis(msgspec.Struct, frozen=True, kw_only=True):
    """Position after some moves."""

    # row by row from above: 1 = a stone of the first player, -1 = of the second, 0 = empty
    board: tuple[int, ...]
    over: bool
    winner: int = 0  # 1, -1, or 0 for nobody
    row: tuple[int, ...] = ()  # winning cells


LEVELS = ("easy", "middle", "hard")


class Opponent(Protocol):
    """Version that people play against."""

    def look(self, moves: Sequence[int]) -> BoardAnalysis:
        """Return the position after `moves`, without a search. Raises BadRequest for an illegal
        move.
        """

    def reply(self, moves: Sequence[int], level: int) -> MoveReply:
        """Compute the reply to `moves`; level 0, 1 or 2, see LEVELS.

        Raises BadRequest for an illegal move.
        """


COLUMNS = "abcdefghijklmnopqrstuvwxyz"


def cell_name(cell: int, size: int) -> str:
    """Return a cell of a square board as column letter and row number from below: h8."""
    row, column = divmod(cell, size)
    return f"{COLUMNS[column]}{size - row}"


@runtime_checkable
class Games(Experience, Protocol):
    """Interface of a workload that learns from games against itself."""

    def opponent(self, config: Config, weights: Weights) -> Opponent: ...

    def rules(self, config: Config) -> tuple[int, int]:
        """Return the side of the board, and the number of stones in a row that wins."""
