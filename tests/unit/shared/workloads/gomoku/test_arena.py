"""Games that advance together: whoever plays them can stop between any two batches of the
network.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shared.workloads.gomoku.arena import Arena, FinishedGame, GamePlan
from shared.workloads.gomoku.records import Manner, flat
from shared.workloads.gomoku.rules import BoardRules, Boards
from shared.workloads.gomoku.search import Floats
from shared.workloads.gomoku.verification import Bench, Spot, search_again
from tests.support.workloads.tiny_gomoku import opinion, uniform


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


FACTORS = {"one": 6.0, "other": -6.0}  # opinions of two players, strong ones


class Recorder:
    """Evaluator with an opinion of its own, which keeps the positions that it was asked."""

    def __init__(self, factor: float) -> None:
        self.asked: list[bytes] = []
        self._factor = np.float32(factor)

    def __call__(self, boards: Boards) -> tuple[Floats, Floats]:
        self.asked += [board.tobytes() for board in boards]
        logits, values = opinion(boards)
        return logits * self._factor, values


@pytest.mark.parametrize("match", [False, True], ids=["self-play", "match"])
def test_games_are_those_of_searches_that_remember_nothing(*, match: bool) -> None:
    """A position below the last move is not evaluated again, and never by the other player."""
    rules = BoardRules(size=5, win=4)
    manner = Manner(simulations=24, temperature_plies=4, noise=0.0 if match else 0.25, match=match)
    players = {name: Recorder(factor) for name, factor in FACTORS.items()}
    names = ("one", "other") if match else ("one", "one")
    plans = iter([GamePlan(game=n, seed=n, players=names) for n in range(4)])
    arena = Arena(rules, manner, 4, players, lambda: next(plans, None))
    ended: list[FinishedGame] = []
    while arena.seats or not ended:
        ended += arena.advance(limit_s=0.0)
    asked_in_play = sum(len(player.asked) for player in players.values())

    again = [Recorder(FACTORS[name]) for name in names]
    bench = Bench(rules=rules, manner=manner, hashes={}, player=again.__getitem__, seed=0)
    shown = [
        (Spot(record=game.record(0, "", "cpu"), ply=ply, player=ply % 2), visits)
        for game in ended
        for ply, visits in enumerate(game.visits)
    ]
    for turn in (0, 1):
        of_player = [(spot, visits) for spot, visits in shown if spot.player == turn]
        searched = search_again([spot for spot, _ in of_player], bench, bench.player(turn))
        assert [flat(row) for row in searched] == [visits for _, visits in of_player]
    asked_again = sum(len(player.asked) for player in again)
    assert len(ended) == 4
    assert asked_in_play < asked_again * (1.0 if match else 0.9)
