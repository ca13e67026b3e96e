"""Openings of games: random moves in self-play, fixed ones in matches."""

from __future__ import annotations

from shared.workloads.gomoku.randomness import words
from shared.workloads.gomoku.rules import BoardRules, Position, completes

_MATCH_SEED = 0x0_9E_41
_MATCH_PLIES = 2  # one stone of each player
_STREAM = 1 << 32  # far from the streams of the plies


def drawn(rules: BoardRules, seed: int, plies: int) -> tuple[int, ...]:
    """Return up to `plies` random moves, none of which ends the game."""
    if plies <= 0:
        return ()
    first, *rest = words(seed, _STREAM, 64).tolist()
    many = first % (min(plies, rules.cells - 1) + 1)
    position, cells = Position(rules), list(range(rules.cells))
    for word in rest:
        if len(position.moves) == many or not cells:
            break
        move = cells.pop(word % len(cells))
        if not completes(rules, position.board, move, position.player):
            position.play(move)
    return tuple(position.moves)


def fixed(rules: BoardRules, number: int) -> tuple[int, ...]:
    """Return the opening, near the centre, of games 2 `number` and 2 `number` + 1 of every
    match.
    """
    side = min(rules.size, rules.size // 2 + 2)
    margin = (rules.size - side) // 2
    middle = [
        (row + margin) * rules.size + column + margin
        for row in range(side)
        for column in range(side)
    ]
    return _distinct(words(_MATCH_SEED, number, 64).tolist(), middle, _MATCH_PLIES)


def _distinct(raw: list[int], cells: list[int], count: int) -> tuple[int, ...]:
    return tuple(cells.pop(word % len(cells)) for word in raw[:count])
