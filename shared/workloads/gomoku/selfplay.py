"""Self-play of one task on one device: many games, each played by the version that was the newest
when it began.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from shared.decoding import MALFORMED, decode
from shared.errors import InvalidRunFile
from shared.workloads.base import Job, Progress, Weights
from shared.workloads.gomoku.arena import FinishedGame, GamePlan, Seat
from shared.workloads.gomoku.config import GomokuConfig, GomokuOptions
from shared.workloads.gomoku.network import NetEvaluator
from shared.workloads.gomoku.openings import drawn
from shared.workloads.gomoku.play import PlayWork
from shared.workloads.gomoku.randomness import game_seed
from shared.workloads.gomoku.records import GameRecord


class Version(NamedTuple):
    """Version of a player: its number, and the hash of its weights."""

    number: int
    sha256: str

    @property
    def key(self) -> str:
        return f"{self.number}:{self.sha256}"


class Half(msgspec.Struct, frozen=True, kw_only=True):
    """Game in progress, as a snapshot stores it."""

    plan: GamePlan
    moves: tuple[int, ...]
    visits: tuple[tuple[int, ...], ...]


class SavedGames(msgspec.Struct, frozen=True, kw_only=True):
    """Games of a task so far, finished and in progress, and their versions."""

    seed: int
    following: int
    versions: tuple[Version, ...]
    records: tuple[GameRecord, ...]
    halves: tuple[Half, ...]
    elapsed_s: float


class SelfPlayWork(PlayWork):
    """Self-play on one device; see `Work` and `Actor`."""

    def __init__(self, job: Job, weights: Weights, device: str) -> None:
        self._options = GomokuOptions.from_dict(job.options)
        super().__init__(job, self._options.manner(), device)
        self._versions: dict[str, Version] = {}
        self._newest = self._join(weights, Version(job.base_version, job.base_sha256))
        self._evaluated = 0  # positions evaluated by removed players

    @override
    def advance(self) -> Progress:
        """Play for a quarter of a second."""
        progress = super().advance()
        self._dismiss()
        return progress

    def swap(self, weights: Weights, version: int, sha256: str) -> None:
        """Use this version in games that begin from now on."""
        if version > self._versions[self._newest].number:
            self._newest = self._join(weights, Version(version, sha256))
            self._dismiss()

    @override
    def snapshot(self) -> dict[str, Tensor]:
        """Return the games so far, and the weights that play the games in progress."""
        saved = SavedGames(
            seed=self._job.seed,
            following=self._following,
            versions=tuple(self._versions[key] for key in self._players),
            records=tuple(self._records),
            halves=tuple(
                Half(plan=seat.plan, moves=tuple(seat.position.moves), visits=tuple(seat.visits))
                for seat in self._arena.seats
            ),
            elapsed_s=self._elapsed_s,
        )
        text = np.frombuffer(msgspec.json.encode(saved), np.uint8).copy()
        tensors = {"games": torch.from_numpy(text)}
        for number, player in enumerate(self._players.values()):
            tensors |= {f"player{number}/{name}": w for name, w in player.weights().items()}
        return tensors

    @override
    def restore(self, snapshot: Weights) -> None:
        """Continue from a `snapshot`. Raises InvalidRunFile for the snapshot of another task."""
        try:
            saved = decode(snapshot["games"].numpy().tobytes(), SavedGames)
        except (KeyError, *MALFORMED) as error:
            raise InvalidRunFile("this snapshot belongs to another task") from error
        if saved.seed != self._job.seed or not saved.versions:
            raise InvalidRunFile("this snapshot belongs to another task: start the task afresh")
        self._players.clear()
        for number, about in enumerate(saved.versions):
            prefix = f"player{number}/"
            weights = {
                n.removeprefix(prefix): w for n, w in snapshot.items() if n.startswith(prefix)
            }
            self._newest = self._join(weights, about)
        self._following = saved.following
        self._records = list(saved.records)
        self._elapsed_s = saved.elapsed_s
        self._arena.seats = [_seat(self._config, half) for half in saved.halves]
        self._arena.again()

    def _join(self, weights: Weights, version: Version) -> str:
        self._versions[version.key] = version
        self._players[version.key] = NetEvaluator(self._config, weights, self._device)
        return version.key

    def _dismiss(self) -> None:
        """Drop the networks that no game in progress uses, except the newest."""
        for key in set(self._players) - self._arena.keys() - {self._newest}:
            self._evaluated += self._players.pop(key).positions

    @override
    def _plan(self, game: int) -> GamePlan:
        seed = game_seed(self._job.seed, game)
        return GamePlan(
            game=game,
            seed=seed,
            players=(self._newest, self._newest),
            opening=drawn(self._config.rules, seed, self._options.opening_plies),
        )

    @override
    def _record(self, played: FinishedGame) -> GameRecord:
        version = self._versions[played.plan.players[0]]
        return played.record(version.number, version.sha256, self._kind)

    @override
    def _metrics(self) -> dict[str, float]:
        positions = self._evaluated + sum(p.positions for p in self._players.values())
        took = max(self._elapsed_s, 1e-6)
        return {
            "positions": float(positions),
            "positions_per_s": positions / took,
            "moves": float(self._arena.plies),
            "games_per_hour": 3600 * len(self._records) / took,
        }


def _seat(config: GomokuConfig, half: Half) -> Seat:
    seat = Seat(config.rules, half.plan)
    for move in half.moves[len(half.plan.opening) :]:
        seat.position.play(move)
    seat.visits = list(half.visits)
    return seat
