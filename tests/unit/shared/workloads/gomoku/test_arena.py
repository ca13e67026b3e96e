"""Games that advance together: whoever plays them can stop between any two batches of the
network.
"""

from __future__ import annotations

import itertools

from shared.workloads.gomoku.arena import Arena, GamePlan
from shared.workloads.gomoku.records import Manner
from shared.workloads.gomoku.rules import BoardRules, Boards
from shared.workloads.gomoku.search import Floats
from tests.support.workloads.tiny_gomoku import uniform


def test_it_comes_back_after_every_batch_when_asked_to() -> None:
    """A pause, a swap of the weights or a key on the screen never waits for a move, let alone for a
    game.
    """
    asked: list[int] = []

    def evaluator(boards: Boards) -> tuple[Floats, Floats]:
        asked.append(len(boards))
        return uniform(boards)

    plans = (GamePlan(game=n, seed=n, players=("one", "one")) for n in itertools.count())
    manner = Manner(simulations=8, temperature_plies=4, noise=0.25)
    arena = Arena(BoardRules(size=4, win=3), manner, 3, {"one": evaluator}, lambda: next(plans))
    ended = []
    for turn in range(1, 200):
        ended += arena.advance(limit_s=0.0)
        assert len(asked) <= turn  # none where every leaf ends its game
    assert max(asked) == 3  # all seats share a batch
    assert ended
