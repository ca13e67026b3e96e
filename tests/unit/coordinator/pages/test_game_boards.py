"""Games as pictures of a board."""

from __future__ import annotations

import pytest

from coordinator.pages.templates import board
from shared.workloads.gomoku.match import _game_text
from shared.workloads.gomoku.rules import BoardRules

RULES = BoardRules(size=6, win=4)
MOVES = (0, 6, 1, 7, 2, 8, 3)  # four in the upper row


def test_a_game_is_read_as_it_was_told() -> None:
    found = board(_game_text(RULES, MOVES))
    assert found is not None
    assert found.size == 6
    assert [(stone.y * 6 + stone.x, stone.player) for stone in found.stones] == [
        (move, "xo"[ply % 2]) for ply, move in enumerate(MOVES)
    ]
    assert found.end == "X wins after 7 moves"
    assert found.moves.split()[0] == "a6"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "def f():\n    return 1\n\n\n",
        "1. a1 b1\nX wins\n\n 1 x O\n   a b",
        "1. z9 b1\nX wins\n\n3 · · ·\n   a b c",
        "\n\n\n\n   a b c",
    ],
)
def test_other_texts_stay_texts(text: str) -> None:
    assert board(text) is None
