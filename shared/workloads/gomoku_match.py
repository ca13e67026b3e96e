"""Matches between two versions.

Openings are fixed, each is played with both colours, and nothing is left to chance: whoever has the two networks can play
every game again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shared.errors import BadRequest, InvalidFrame
from shared.tensors.frame import open_frame
from shared.workloads.base import Data, Job, Progress, Result, Sample
from shared.workloads.devices import release
from shared.workloads.gomoku_arena import Arena, GamePlan, Played
from shared.workloads.gomoku_config import GomokuConfig, GomokuOptions, schema
from shared.workloads.gomoku_games import GameRecord, Manner, encode
from shared.workloads.gomoku_judge import score
from shared.workloads.gomoku_net import NetEvaluator
from shared.workloads.gomoku_openings import fixed
from shared.workloads.gomoku_rules import Position, Rules, cell_name, drawing

OPPONENT = "opponent"  # the asset of a match task with the weights of the other version
_ADVANCE_S = 0.25


def plan(rules: Rules, game: int, one: str, other: str) -> GamePlan:
    """Game `game` of a match: `one` has the first stones in even games."""
    players = (one, other) if game % 2 == 0 else (other, one)
    return GamePlan(game=game, seed=0, players=players, opening=fixed(rules, game // 2))


class MatchWork:
    """See `Work`. The version of the job against the one that comes as an asset; a step is a game."""

    def __init__(self, job: Job, weights: Mapping[str, Tensor], data: Data, device: str) -> None:
        self._config = GomokuConfig.from_dict(job.config)
        options = GomokuOptions.from_dict(job.options)
        if job.steps != job.stop - job.start:
            raise BadRequest(f"a match of {job.stop - job.start} games does not make {job.steps}")
        other = data.manifest.assets.get(OPPONENT)
        if other is None or OPPONENT not in data.manifest.meta:
            raise InvalidFrame("a match needs the weights of another version")
        self._job = job
        self._device = device
        self._against = int(data.manifest.meta[OPPONENT])
        self._players = {
            "one": NetEvaluator(self._config, weights, device),
            "other": NetEvaluator(self._config, read_weights(data, self._config), device),
        }
        self._following = job.start
        self._records: list[GameRecord] = []
        self._arena = Arena(
            self._config.rules,
            options.match_manner(),
            min(options.slots, job.steps),
            self._players,
            self._next_plan,
        )

    @property
    def done(self) -> bool:
        return len(self._records) == self._job.steps

    def advance(self) -> Progress:
        """Play for a quarter of a second."""
        if self.done:
            raise RuntimeError("this task is done")
        self._records += [self._record(played) for played in self._arena.advance(_ADVANCE_S)]
        return Progress(
            step=len(self._records),
            steps=self._job.steps,
            samples=len(self._records),
            metrics=self._metrics(),
            preview=self._preview(),
        )

    def result(self) -> tuple[Result, dict[str, Tensor]]:
        records = sorted(self._records, key=lambda record: record.game)
        report = Result(
            steps=len(records),
            samples=len(records),
            loss_first=0.0,
            loss_last=0.0,
            metrics=self._metrics(),
            games=encode(records),
        )
        return report, {}

    def suspend(self) -> None:
        for player in self._players.values():
            player.move("cpu")
        release(self._device)

    def resume(self) -> None:
        for player in self._players.values():
            player.move(self._device)

    def halve(self) -> int:
        """Evaluate in smaller batches; the search in progress starts over."""
        self._arena.again()
        release(self._device)
        return min(player.halve() for player in self._players.values())

    def state(self) -> dict[str, Tensor]:
        return {}

    def snapshot(self) -> dict[str, Tensor]:
        """Nothing: a match is short, and a restart plays it again with the same result."""
        return {}

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """See `snapshot`."""

    def _record(self, played: Played) -> GameRecord:
        job, kind = self._job, self._device.partition(":")[0]
        return played.record(job.base_version, job.base_sha256, kind, self._against)

    def _next_plan(self) -> GamePlan | None:
        if self._following >= self._job.stop:
            return None
        self._following += 1
        return plan(self._config.rules, self._following - 1, "one", "other")

    def _metrics(self) -> dict[str, float]:
        found = score(self._records)
        return {
            "wins": float(found.wins),
            "draws": float(found.draws),
            "losses": float(found.losses),
            "positions": float(sum(player.positions for player in self._players.values())),
        }

    def _preview(self) -> str:
        if not self._arena.seats:
            return ""
        position = self._arena.seats[0].position
        return drawing(self._config.rules, position.board[0], position.moves[-1])


def read_weights(data: Data, config: GomokuConfig) -> dict[str, Tensor]:
    """The weights of the other version. Raises InvalidFrame when they are of another network."""
    frame = open_frame(data.asset(OPPONENT), schema(config), copy_on_write=True)
    return {name: torch.from_numpy(frame.array(name)) for name in frame}


def exhibition(config: GomokuConfig, weights: Mapping[str, Tensor], seed: int) -> Sample:
    """A game of a version against itself, as a person reads it: the moves and the last position."""
    rules, manner = config.rules, Manner(simulations=64, temperature_plies=0, noise=0.0)
    plans = iter([plan(rules, 2 * (seed % 1000), "one", "one")])
    players = {"one": NetEvaluator(config, weights, "cpu")}
    arena = Arena(rules, manner, 1, players, lambda: next(plans, None))
    played: list[Played] = []
    while not played:
        played = arena.advance(_ADVANCE_S)
    position = Position(rules, played[0].moves)
    names = [cell_name(move, rules.size) for move in position.moves]
    pairs = [f"{n // 2 + 1}. {' '.join(names[n : n + 2])}" for n in range(0, len(names), 2)]
    ends = {1: "X wins", -1: "O wins", 0: "a draw"}[position.winner]
    text = f"{' '.join(pairs)}\n{ends} after {len(names)} moves\n\n"
    return Sample(
        kind="text",
        title="a game against itself",
        text=text + drawing(rules, position.board[0], position.moves[-1]),
    )
