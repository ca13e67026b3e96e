"""Rollouts of a small model, and helpers for the workload's tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from shared.errors import NotFound
from shared.workloads.base import ChunkRef, DatasetManifest, Job, Result, TrainSettings, Work
from shared.workloads.rollouts.answer_records import GroupRecord, JudgedGroup, decode, encode
from shared.workloads.rollouts.workload import RolloutsWorkload

WORKLOAD = RolloutsWorkload()
MODEL = {
    "problems": "sorting",
    "size": 3,
    "context": 20,
    "answer": 7,
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 32,
}
SHA256 = "00"


class Window:
    """Chunks in a directory, as a task finds them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = self._describe(0)

    def seal(self, records: list[JudgedGroup]) -> None:
        count = len(self.manifest.chunks)
        (self.path / f"chunk-{count}").write_bytes(encode(records))
        self.manifest = self._describe(count + 1)

    def _describe(self, count: int) -> DatasetManifest:
        chunk = ChunkRef(sha256="", size=0, items=1)
        return DatasetManifest(
            name="replay", kind="experience", licence="", source="", chunks=(chunk,) * count
        )

    def chunk(self, index: int) -> Path:
        return self.path / f"chunk-{index}"

    def asset(self, name: str) -> Path:
        raise NotFound(name)


def config(**changes: Any) -> dict[str, Any]:
    return WORKLOAD.config({**MODEL, **changes}, None)


def lively(seed: int = 1, **changes: Any) -> dict[str, Tensor]:
    """Weights of a model that has opinions."""
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: torch.randn(spec.shape, generator=generator) * 0.15
        for spec in WORKLOAD.schema(config(**changes))
    }


def job(kind: str, steps: int, **changes: Any) -> Job:
    """A task of a kind: `steps` problems, or steps of learning of 16 answers each."""
    batch = 16 if kind == "learn" else 1
    values: dict[str, Any] = {
        "run": "r",
        "workload": "rollouts",
        "kind": kind,
        "update": "delta" if kind == "learn" else "experience",
        "config": config(),
        "train": TrainSettings(),
        "order_seed": 0,
        "start": 0,
        "stop": steps * batch,
        "seed": 5,
        "steps": steps,
        "batch_size": batch,
        "global_step": 0,
        "total_steps": 0,
        "options": WORKLOAD.options({"group": 4, "slots": 8}),
        "base_sha256": SHA256,
        **changes,
    }
    return Job(**values)


def finish(work: Work) -> tuple[Result, dict[str, Tensor]]:
    while not work.done:
        work.advance()
    return work.result()


def answers(weights: Mapping[str, Tensor], path: Path, **changes: Any) -> list[GroupRecord]:
    """Answers to some problems."""
    task = job("selfplay", changes.pop("steps", 8), **changes)
    return decode(finish(WORKLOAD.begin(task, weights, Window(path), "cpu"))[0].experience)


def rewarded(record: GroupRecord) -> JudgedGroup:
    """A group of which every second answer is right."""
    rewards = tuple(float(number % 2) for number in range(len(record.lengths)))
    return JudgedGroup(**msgspec.structs.asdict(record), rewards=rewards)


def window(path: Path) -> Window:
    """A window with signal."""
    found = Window(path)
    found.seal([rewarded(record) for record in answers(lively(), path)])
    return found
