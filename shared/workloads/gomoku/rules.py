"""Rules of Gomoku on any board: legal moves, the winner, and the board's symmetries.

One array holds many boards. A board is int8 of shape (cells + 1,): +1 the first player, -1 the
second, 0 empty, and a last cell OUTSIDE, which stands for every cell beyond the border. Legend: B
boards, A cells, D = 8 directions, L = win - 1 cells of a ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import BadRequest
from shared.workloads.games import COLUMNS, cell_name

SIZE_MAX = 25
OUTSIDE = 2
# Opposite directions are neighbours, so that a pair of them is a line.
_DIRECTIONS = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, -1), (1, -1), (-1, 1))

Boards = NDArray[np.int8]


class BoardRules(msgspec.Struct, frozen=True):
    """Square board of `size`, and how many stones in a row win (more win too)."""

    size: int = 15
    win: int = 5

    @property
    def cells(self) -> int:
        return self.size * self.size


class IllegalMove(BadRequest):
    """Raised for an illegal move."""


@lru_cache(maxsize=16)
def rays(rules: BoardRules) -> NDArray[np.intp]:
    """Return for each cell and direction the next win - 1 cells, or the outside cell: (A, D, L)."""
    size, outside = rules.size, rules.cells
    places = np.full((rules.cells, len(_DIRECTIONS), rules.win - 1), outside, np.intp)
    for cell in range(rules.cells):
        row, column = divmod(cell, size)
        for direction, (down, right) in enumerate(_DIRECTIONS):
            for step in range(1, rules.win):
                y, x = row + step * down, column + step * right
                if 0 <= y < size and 0 <= x < size:
                    places[cell, direction, step - 1] = y * size + x
    places.setflags(write=False)
    return places


@lru_cache(maxsize=16)
def symmetries(size: int) -> NDArray[np.intp]:
    """Return the eight symmetries of a board, (8, A): the old cell of each new cell."""
    grid = np.arange(size * size).reshape(size, size)
    turned = [np.rot90(grid, quarter) for quarter in range(4)]
    permutations = np.stack(
        [board.reshape(-1) for one in turned for board in (one, np.fliplr(one))]
    )
    permutations.setflags(write=False)
    return permutations


def empty(rules: BoardRules, boards: int) -> Boards:
    """Return boards without stones, (B, A + 1)."""
    boards_made = np.zeros((boards, rules.cells + 1), np.int8)
    boards_made[:, -1] = OUTSIDE
    return boards_made


def wins(rules: BoardRules, boards: Boards, moves: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Return True for each board (B,) whose stone just placed, at `moves`, completes a row."""
    rows = np.arange(len(boards))
    stones = boards[rows, moves]
    lines = boards[rows[:, None, None], rays(rules)[moves]]  # (B, D, L)
    same = np.logical_and.accumulate(lines == stones[:, None, None], axis=2)
    run = same.sum(axis=2, dtype=np.int8)  # (B, D)
    won: NDArray[np.bool_] = (run[:, 0::2] + run[:, 1::2] >= rules.win - 1).any(axis=1)
    return won


def completes(rules: BoardRules, board: Boards, move: int, player: int) -> bool:
    """Return True if a stone of `player` on an empty cell of a board (1, A + 1) completes a row."""
    after = board.copy()
    after[0, move] = player
    return bool(wins(rules, after, np.array([move]))[0])


class Position:
    """One game, move by move, for display and for checking records."""

    def __init__(self, rules: BoardRules, moves: Sequence[int] = ()) -> None:
        self.rules = rules
        self.moves: list[int] = []
        self.board = empty(rules, 1)
        self.winner = 0  # +1 the first player, -1 the second; 0 none yet, or a draw when over
        for move in moves:
            self.play(move)

    @property
    def player(self) -> int:
        """Return the player to move: 1 is the first player, -1 the second."""
        return 1 if len(self.moves) % 2 == 0 else -1

    @property
    def over(self) -> bool:
        return self.winner != 0 or len(self.moves) == self.rules.cells

    def play(self, move: int) -> None:
        """Place a stone. Raises IllegalMove with the number of the move."""
        number = len(self.moves) + 1
        if self.over:
            raise IllegalMove(f"move {number} comes after the end of the game")
        if not 0 <= move < self.rules.cells:
            raise IllegalMove(f"move {number} lies outside the board")
        if self.board[0, move]:
            raise IllegalMove(
                f"move {number} goes to {cell_name(move, self.rules.size)}, where a stone lies"
            )
        player = self.player
        self.board[0, move] = player
        self.moves.append(move)
        if wins(self.rules, self.board, np.array([move]))[0]:
            self.winner = player

    def row(self) -> tuple[int, ...]:
        """Return the winning cells, ascending; () before the end or after a draw."""
        if not self.winner:
            return ()
        last = self.moves[-1]
        line_cells = {last}
        along = rays(self.rules)[last].tolist()
        for pair in zip(along[0::2], along[1::2], strict=True):
            line = [
                cell
                for ray in pair
                for cell in takewhile(lambda c: self.board[0, c] == self.winner, ray)
            ]
            if len(line) >= self.rules.win - 1:
                line_cells.update(line)
        return tuple(sorted(line_cells))


def drawing(rules: BoardRules, board: NDArray[np.int8], last: int = -1) -> str:
    """Return the board as text: X first player, O second, the last stone in lower case."""
    lines = []
    for row in range(rules.size):
        signs = []
        for column in range(rules.size):
            at = row * rules.size + column
            sign = {1: "X", -1: "O"}.get(int(board[at]), "·")
            signs.append(sign.lower() if at == last else sign)
        lines.append(f"{rules.size - row:2d} " + " ".join(signs))
    lines.append("   " + " ".join(COLUMNS[: rules.size]))
    return "\n".join(lines)
