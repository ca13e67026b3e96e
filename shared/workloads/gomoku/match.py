"""Matches between two versions.

Openings are fixed, each is played with both colours, and nothing is random, so that anyone with the
two networks can replay every game.
"""

from __future__ import annotations

from typing_extensions import override

from shared.errors import InvalidFrame
from shared.tensors.frame import torch_tensors
from shared.workloads.base import Data, Job, Sample, Weights
from shared.workloads.games import cell_name
from shared.workloads.gomoku.arena import Arena, FinishedGame, GamePlan
from shared.workloads.gomoku.config import GomokuConfig, GomokuOptions, schema
from shared.workloads.gomoku.network import NetEvaluator
from shared.workloads.gomoku.openings import fixed
from shared.workloads.gomoku.play import ADVANCE_S, PlayWork
from shared.workloads.gomoku.records import GameRecord, Manner, score
from shared.workloads.gomoku.rules import BoardRules, Position, drawing

OPPONENT = "opponent"  # asset of a match task with the weights of the other version

Held = Weights


def plan(rules: BoardRules, game: int, one: str, other: str) -> GamePlan:
    """Return the plan of game `game` of a match: `one` has the first stones in even games."""
    players = (one, other) if game % 2 == 0 else (other, one)
    return GamePlan(game=game, seed=0, players=players, opening=fixed(rules, game // 2))


class MatchWork(PlayWork):
    """Match between the job's version and the version in an asset; see `Work`."""

    def __init__(self, job: Job, weights: Held, data: Data, device: str) -> None:
        super().__init__(job, GomokuOptions.from_dict(job.options).match_manner(), device)
        other = data.manifest.assets.get(OPPONENT)
        if other is None or OPPONENT not in data.manifest.meta:
            raise InvalidFrame("a match needs the weights of another version")
        self._against = int(data.manifest.meta[OPPONENT])
        self._players["one"] = NetEvaluator(self._config, weights, device)
        self._players["other"] = NetEvaluator(
            self._config, torch_tensors(data.asset(OPPONENT), schema(self._config)), device
        )

    @override
    def _plan(self, game: int) -> GamePlan:
        return plan(self._config.rules, game, "one", "other")

    @override
    def _record(self, played: FinishedGame) -> GameRecord:
        return played.record(
            self._job.base_version, self._job.base_sha256, self._kind, self._against
        )

    @override
    def _metrics(self) -> dict[str, float]:
        match_score = score(self._records)
        return {
            "wins": float(match_score.wins),
            "draws": float(match_score.draws),
            "losses": float(match_score.losses),
            "positions": float(sum(player.positions for player in self._players.values())),
        }


def exhibition(config: GomokuConfig, weights: Held, seed: int) -> Sample:
    """Return a game of a version against itself."""
    manner = Manner(simulations=64, temperature_plies=0, noise=0.0)
    players = {"one": NetEvaluator(config, weights, "cpu")}
    plans = iter([plan(config.rules, 2 * (seed % 1000), "one", "one")])
    arena = Arena(config.rules, manner, 1, players, lambda: next(plans, None))
    played: list[FinishedGame] = []
    while not played:
        played += arena.advance(ADVANCE_S)
    return Sample(
        kind="text", title="a game against itself", text=_game_text(config.rules, played[0].moves)
    )


def _game_text(rules: BoardRules, moves: tuple[int, ...]) -> str:
    """Return a game as text: the moves and the last position."""
    position = Position(rules, moves)
    names = [cell_name(move, rules.size) for move in moves]
    pairs = [f"{n // 2 + 1}. {' '.join(names[n : n + 2])}" for n in range(0, len(names), 2)]
    ends = {1: "X wins", -1: "O wins", 0: "a draw"}[position.winner]
    text = f"{' '.join(pairs)}\n{ends} after {len(names)} moves\n\n"
    return text + drawing(rules, position.board[0], moves[-1])
