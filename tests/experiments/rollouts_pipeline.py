"""Rollouts of the product in one process: actors, intake, packing and learners in turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from shared.tensors.frame import FrameWriter
from shared.workloads.base import Job, TrainSettings
from shared.workloads.experience import KnownVersion
from shared.workloads.rollouts.answer_records import judged
from shared.workloads.rollouts.config import Problems, RolloutsConfig
from shared.workloads.rollouts.evaluate import answered
from shared.workloads.rollouts.problems import decoded, reward
from tests.support.workloads.tiny_rollouts import WORKLOAD, Window, finish, job

Weights = Mapping[str, Tensor]
HELD_OUT = 512  # problems of a measurement


class Pipeline(NamedTuple):
    """Sizes and rates of one run."""

    width: int = 64
    layers: int = 2
    size: int = 10
    warm_size: int = 4
    warm_steps: int = 300
    warm_batch: int = 64
    warm_lr: float = 2e-3
    problems: int = 32  # of a version
    group: int = 8
    versions: int = 400
    batch: int = 64  # answers with signal of a step
    steps: int = 1  # of a version
    lr: float = 4e-4
    warmup: int = 20  # steps
    lag: int = 0
    learners: int = 1  # machines that learn in turns, each with an optimiser of its own
    reset: bool = False
    beta1: float = 0.9


def solved(model: dict[str, Any], weights: Weights) -> float:
    """Share of held-out problems that the likeliest answer solves."""
    config = RolloutsConfig.from_dict(model)
    problems = Problems(config, heldout=True).first(HELD_OUT)
    answers = answered(config, weights, problems, lambda: False)
    pairs = zip(problems, answers, strict=True)
    return sum(reward(each, decoded(answer)) for each, answer in pairs) / HELD_OUT


class Run:
    """One run whose volunteers take turns."""

    def __init__(self, s: Pipeline, seed: int, folder: Path) -> None:
        self._s, self._seed, self._folder = s, seed, folder
        shape = {"n_layer": s.layers, "n_head": 4, "n_embd": s.width}
        raw = {"problems": "sorting", "size": s.size, "context": 32, "answer": 12, **shape}
        self.model = WORKLOAD.config(raw, None)
        self._options = WORKLOAD.options(
            {
                "group": s.group,
                "slots": min(1024, s.problems * s.group),
                "warm_lr": s.warm_lr,
                "warm_size": s.warm_size,
                "lag": s.lag,
            }
        )
        self.weights: Weights = WORKLOAD.init(self.model, seed)

    def _job(self, kind: str, steps: int, batch: int, number: int, **more: Any) -> Job:
        start = steps * batch * number + (self._seed << 24)
        values = {
            "config": self.model,
            "options": self._options,
            "seed": 1000 * self._seed + number,
        }
        made = job(kind, steps, **values, **more)
        stop = start + steps * batch
        return msgspec.structs.replace(made, batch_size=batch, start=start, stop=stop)

    def warm(self) -> None:
        """Learn from solved problems."""
        train = TrainSettings(lr=1.0, weight_decay=0.0)
        task = self._job("learn", self._s.warm_steps, self._s.warm_batch, 0, train=train)
        work = WORKLOAD.begin(task, self.weights, Window(self._folder), "cpu")
        self.weights = finish(work)[1]

    def taught(self) -> Iterator[tuple[int, float, float]]:
        """Learn by rewards; yields version, share of right answers, share of groups with signal."""
        s, old = self._s, [self.weights]
        train = TrainSettings(lr=s.lr, weight_decay=0.0, warmup_steps=s.warmup, beta1=s.beta1)
        for version in range(1, s.versions + 1):
            right, signal = self._answer(old[0], version)
            work = WORKLOAD.begin(
                self._job(
                    "learn",
                    s.steps,
                    s.batch,
                    version,
                    train=train,
                    global_step=s.steps * version,
                ),
                self.weights,
                self._window,
                "cpu",
            )
            made = finish(work)[1]
            self.weights = {
                name: value - (value - made[name]).bfloat16().float()
                for name, value in self.weights.items()
            }
            old = [*old, self.weights][-1 - s.lag :]
            yield version, right, signal

    def _answer(self, weights: Weights, version: int) -> tuple[float, float]:
        """Make the answers that a version learns from."""
        s, path = self._s, self._folder / "version"
        task = self._job("selfplay", s.problems, 1, version)
        work = WORKLOAD.begin(task, dict(weights), Window(self._folder), "cpu")
        data = finish(work)[0].experience
        schema = WORKLOAD.schema(self.model)
        with FrameWriter(path, schema, {}) as writer:
            for spec in schema:
                writer.write(spec.name, weights[spec.name].numpy())
        known = [KnownVersion(number=0, sha256=task.base_sha256)]
        found = WORKLOAD.experience.inspect(task, data, known, lambda _: path, version)
        assert found.episodes == s.problems, found.complaint
        records = judged(found.data)
        self._window = Window(self._folder)
        self._window.seal(records)
        signal = len(records) / s.problems
        right = sum(sum(r.rewards) for r in records) / (s.problems * s.group)
        return right, signal


def run(s: Pipeline, seed: int) -> Iterator[tuple[str, float, float, float]]:
    with TemporaryDirectory() as path, torch.random.fork_rng():
        one = Run(s, seed, Path(path))
        one.warm()
        yield "warm", solved(one.model, one.weights), 0.0, 0.0
        for version, right, signal in one.taught():
            if version % 25 == 0:
                yield str(version), solved(one.model, one.weights), right, signal
