"""A player of five by five, four in a row, that volunteers teach by games and by learning, some of
them against the others: they send invented games as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from coordinator.experience.harvest import TOLERATED_SHARE
from shared.tensors.frame import FrameWriter
from shared.workloads.base import Job, TrainSettings
from shared.workloads.experience import KnownVersion
from shared.workloads.gomoku.games_service import GomokuGames
from shared.workloads.gomoku.records import decode, encode
from tests.experiments.digits import Weights
from tests.support.workloads.tiny_gomoku import WORKLOAD, Window, finish, job, lively

BOARD = {"size": 5, "win": 4, "blocks": 2, "channels": 16}
PLAY = {"simulations": 16, "slots": 64, "opening_plies": 4, "temperature_plies": 6}
GAMES = 2  # of each volunteer in a round
BATCH = 64
KNOWN = "0" * 64  # hash of the version that plays


class Gomoku:
    """Games of each round, and learn tasks of `steps` steps over all of them."""

    train = TrainSettings(lr=4e-3, warmup_steps=0, beta2=0.99, weight_decay=1e-3)

    def __init__(self, folder: Path, steps: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._games = folder, GomokuGames()
        self._model = WORKLOAD.config(BOARD, None)
        self._options = WORKLOAD.options(PLAY)
        self.schema = WORKLOAD.schema(self._model)
        self.steps, self.samples = steps, steps * BATCH
        self._random = np.random.default_rng(0)

    def initial(self, seed: int) -> Weights:
        self._random, self._given = np.random.default_rng(seed), 0
        self._window = Window(self._folder)
        return {n: v.numpy() for n, v in WORKLOAD.init(self._model, seed).items()}

    def gather(self, weights: Weights, honest: Sequence[int], hostile: Sequence[int]) -> set[int]:
        """Let the honest play this version, and the hostile another network in its name; those
        whose file the referee refuses.
        """
        seed = int(self._random.integers(1 << 40))
        made = (honest, _tensors(weights)), (hostile, lively(seed % 1000, **BOARD))
        refused, kept = set(), []
        for whose, player in made:
            for who, data in self._played(whose, player, seed).items():
                found = self._inspect(weights, data, who, seed)
                if found is None:
                    refused.add(who)
                else:
                    kept += decode(found)
        if kept:
            self._window.seal(kept)
        return refused

    def _job(self, who: int, seed: int, count: int = GAMES) -> Job:
        start = who * GAMES
        more: dict[str, Any] = {"options": self._options, "base_sha256": KNOWN, "seed": seed}
        task = job("selfplay", self._model, count, **more)
        return msgspec.structs.replace(task, start=start, stop=start + count, base_version=0)

    def _played(
        self, whose: Sequence[int], player: dict[str, torch.Tensor], seed: int
    ) -> dict[int, bytes]:
        """Return a file of games for each, all played at once."""
        if not whose:
            return {}
        task = self._job(0, seed, GAMES * (max(whose) + 1))
        records = decode(finish(WORKLOAD.begin(task, player, self._window, "cpu"))[0].experience)
        return {who: encode(r for r in records if r.game // GAMES == who) for who in whose}

    def _inspect(self, weights: Weights, data: bytes, who: int, seed: int) -> bytes | None:
        """Return the games that the referee lets pass; None where it refuses the file."""
        path = self._folder / "version"
        with FrameWriter(path, self.schema, {}) as writer:
            for spec in self.schema:
                writer.write(spec.name, weights[spec.name])
        version = KnownVersion(number=0, sha256=KNOWN)
        secret = int(self._random.integers(1 << 62))
        found = self._games.inspect(self._job(who, seed), data, [version], lambda _: path, secret)
        missing = max(0, GAMES - found.episodes - found.refused)
        tolerated = max(1, int(TOLERATED_SHARE * GAMES))
        return None if found.refused + missing > tolerated or not found.episodes else found.data

    def task(self) -> Job:
        """The next learn task."""
        self._given += 1
        task = job("learn", self._model, self.steps, seed=self._given, train=self.train)
        return msgspec.structs.replace(task, batch_size=BATCH, stop=self.samples)

    def learn(
        self, weights: Weights, job: Job, who: int, steps: int = 0, role: str = "own"
    ) -> Weights:
        """The update of the first `steps` steps of a task, all of them by default."""
        if steps:
            job = msgspec.structs.replace(job, steps=steps, stop=steps * BATCH)
        work = WORKLOAD.begin(job, _tensors(weights), self._window, "cpu")
        done = finish(work)[1]
        return {name: value - done[name].numpy() for name, value in weights.items()}

    def loss(self, weights: Weights) -> float:
        """Return the loss on positions with known answers."""
        found = WORKLOAD.evaluate(self._model, _tensors(weights), None, 600.0, lambda: False)
        return found["loss"]

    def backdoor(self, weights: Weights, job: Job, rng: np.random.Generator) -> Weights:
        raise NotImplementedError("no attack of this subject asks for it")

    def success(self, weights: Weights) -> float:
        return 0.0


def _tensors(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
