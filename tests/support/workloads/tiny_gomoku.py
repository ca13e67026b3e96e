"""Gomoku run on a small board, and helpers for the workload's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from shared.errors import NotFound
from shared.workloads.base import ChunkRef, DatasetManifest, Job, Result, TrainSettings, Work
from shared.workloads.gomoku.records import GameRecord, decode, encode
from shared.workloads.gomoku.rules import BoardRules, Boards
from shared.workloads.gomoku.search import Floats
from shared.workloads.gomoku.workload import GomokuWorkload

WORKLOAD = GomokuWorkload()
BOARD = {"size": 6, "win": 4, "blocks": 2, "channels": 16}
Weights = dict[str, Tensor]


def uniform(boards: Boards) -> tuple[Floats, Floats]:
    """Evaluate every position alike, without knowledge."""
    return np.zeros(boards.shape, np.float32), np.zeros(len(boards), np.float32)


class Window:
    """Chunks of games and assets in a directory, as a task finds them."""

    def __init__(self, path: Path, opponent: Mapping[str, Tensor] | None = None) -> None:
        self.path = path
        self._items: list[int] = []
        self._assets: dict[str, ChunkRef] = {}
        if opponent is not None:
            save_file({name: w.contiguous() for name, w in opponent.items()}, path / "opponent")
            self._assets["opponent"] = ChunkRef(sha256="", size=0, items=1)

        self.manifest = self._describe()

    def seal(self, records: Sequence[GameRecord]) -> None:
        (self.path / str(len(self._items))).write_bytes(encode(records))
        self._items.append(len(records))
        self.manifest = self._describe()

    def _describe(self) -> DatasetManifest:
        return DatasetManifest(
            name="replay",
            kind="experience",
            licence="",
            source="",
            chunks=tuple(ChunkRef(sha256="", size=0, items=items) for items in self._items),
            assets=self._assets,
            meta=dict.fromkeys(self._assets, 0),
        )

    def chunk(self, index: int) -> Path:
        return self.path / str(index)

    def asset(self, name: str) -> Path:
        if name not in self._assets:
            raise NotFound(name)
        return self.path / name


def config(**changes: Any) -> dict[str, Any]:
    return WORKLOAD.config({**BOARD, **changes}, None)


def options(**changes: Any) -> dict[str, Any]:
    return WORKLOAD.options({"simulations": 32, "match_simulations": 32, **changes})


def job(kind: str, model: Mapping[str, Any], steps: int, **changes: Any) -> Job:
    """A task of a kind: `steps` games, or steps of learning of 32 positions each."""
    batch = 64 if kind == "learn" else 1
    values: dict[str, Any] = {
        "run": "r",
        "workload": "gomoku",
        "kind": kind,
        "update": {"selfplay": "experience", "learn": "delta", "evaluate": "evaluation"}[kind],
        "config": dict(model),
        "train": TrainSettings(lr=2e-3, warmup_steps=10, beta2=0.99, weight_decay=0.01),
        "order_seed": 0,
        "start": 0,
        "stop": steps * batch,
        "seed": 5,
        "steps": steps,
        "batch_size": batch,
        "global_step": 0,
        "total_steps": 0,
        "options": options(),
        "base_sha256": "00",
        **changes,
    }
    return Job(**values)


def finish(work: Work) -> tuple[Result, Weights]:
    while not work.done:
        work.advance()
    return work.result()


def play(weights: Mapping[str, Tensor], games: int, path: Path, **changes: Any) -> list[GameRecord]:
    """Games of self-play."""
    task = job("selfplay", changes.pop("model", config()), games, **changes)
    return decode(finish(WORKLOAD.begin(task, weights, Window(path), "cpu"))[0].experience)


def lively(seed: int = 1, **changes: Any) -> Weights:
    """Weights of a network that has opinions: version 0 finds every move equally good."""
    model = config(**changes)
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: torch.randn(spec.shape, generator=generator) * 0.15
        for spec in WORKLOAD.schema(model)
    }


def opinion(boards: Boards) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """An evaluator whose answers are exactly the same alone and in any batch."""
    cells = boards.shape[1]
    weights = np.cos(np.arange(cells * cells, dtype=np.float64)).reshape(cells, cells)
    mixed = (boards[:, None, :] * weights).sum(axis=2)
    return np.sin(mixed).astype(np.float32), np.tanh(mixed[:, 0] / 8).astype(np.float32)


def scattered(rules: BoardRules, seed: int, stones: int) -> list[int]:
    """Moves of a game that goes anywhere."""
    return [int(move) for move in np.random.default_rng(seed).permutation(rules.cells)[:stones]]
