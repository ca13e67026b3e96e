"""Games on a square board as pictures: the last position, which a script can step through.

A sample of such a workload is a text: the moves in a line, how it ended, and a drawing of the
board. What does not read like that is shown as text.
"""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from shared.workloads.games import COLUMNS

SIZE_MAX = len(COLUMNS)

_TURN = re.compile(r"(\d+)\. ([a-z]\d{1,2})(?: ([a-z]\d{1,2}))?")


class Stone(msgspec.Struct, frozen=True):
    """One move: its name, its place on the board, and who made it."""

    name: str
    x: int
    y: int
    player: str  # "x" or "o"


class PlayedGame(msgspec.Struct, frozen=True, kw_only=True):
    """A whole game."""

    size: int
    stones: tuple[Stone, ...]
    end: str  # "X wins after 12 moves"

    @property
    def moves(self) -> str:
        """Every move by name, for who cannot see the board."""
        return " ".join(stone.name for stone in self.stones)


@lru_cache(maxsize=256)
def board(text: str) -> PlayedGame | None:
    """Read a game; None for any other text."""
    lines = text.split("\n")
    if len(lines) < 5:
        return None
    names = [name for turn in _TURN.findall(lines[0]) for name in turn[1:] if name]
    size = lines[-1].count(" ") - 2  # the columns under the drawing
    if not names or not 3 <= size <= SIZE_MAX or lines[-1].split() != list(COLUMNS[:size]):
        return None
    stones = []
    for ply, name in enumerate(names):
        x, row = COLUMNS.index(name[0]), int(name[1:])
        if not (x < size and 1 <= row <= size):
            return None
        stones.append(Stone(name, x, size - row, "xo"[ply % 2]))
    return PlayedGame(size=size, stones=tuple(stones), end=lines[1])
