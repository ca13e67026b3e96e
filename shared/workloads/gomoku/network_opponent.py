"""Version of the network as an opponent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.errors import BadRequest
from shared.workloads.base import Weights
from shared.workloads.games import BoardAnalysis, MoveReply
from shared.workloads.gomoku.config import GomokuConfig
from shared.workloads.gomoku.network import NetEvaluator
from shared.workloads.gomoku.randomness import fractions, words
from shared.workloads.gomoku.rules import Position
from shared.workloads.gomoku.search import Search, SearchSettings

SIMULATIONS = (16, 200, 1600)  # simulations of the three levels
_LEAVES = 8
_SLOPPY = 0.35  # probability that the easiest level plays the second-best move


class GomokuOpponent:
    """Reproducible opponent: the same game and level give the same answer; see `Opponent`."""

    def __init__(self, config: GomokuConfig, weights: Weights) -> None:
        self._rules = config.rules
        self._player = NetEvaluator(config, weights, "cpu")

    def look(self, moves: Sequence[int]) -> BoardAnalysis:
        """Analyse a position; see `Opponent.look`."""
        position = Position(self._rules, moves)
        return BoardAnalysis(
            board=tuple(position.board[0, :-1].tolist()),
            over=position.over,
            winner=position.winner,
            row=position.row(),
        )

    def reply(self, moves: Sequence[int], level: int) -> MoveReply:
        """Compute the reply. Level 0 searches little and sometimes errs on purpose; level 2
        searches far.

        Raises BadRequest for an illegal move, or when the game is over.
        """
        position = Position(self._rules, moves)
        if position.over:
            raise BadRequest("the game is over")
        simulations = SIMULATIONS[max(0, min(level, len(SIMULATIONS) - 1))]
        search = Search(
            self._rules,
            SearchSettings(simulations=simulations, leaves=min(_LEAVES, simulations // 4)),
            1,
        )
        search.start(position.board, np.array([position.player], np.int8))
        search.run(self._player)
        visits = search.visits()[0]
        order = np.argsort(-visits, kind="stable")
        chance = float(fractions(words(len(moves), sum(moves) + 1, 1))[0])
        second = level <= 0 and chance < _SLOPPY and visits[order[1]] > 0
        return MoveReply(
            move=int(order[1 if second else 0]),
            value=float(search.values()[0]),
        )
