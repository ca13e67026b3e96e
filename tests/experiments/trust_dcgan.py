"""A DCGAN of digits that volunteers train, some of them against the others. It has buffers, and
a generator reads no trigger.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from shared.workloads.base import Job, TrainSettings
from tests.experiments.digits import Weights
from tests.support.workloads.tiny_dcgan import ADAM, WORKLOAD, config, digits, job

BATCH = 16


class Dcgan:
    """Tasks of `steps` steps each; every volunteer keeps its optimiser's state."""

    def __init__(self, folder: Path, steps: int, lr: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.train: TrainSettings = msgspec.structs.replace(ADAM, lr=lr)
        self._data = digits(folder)
        self._model = config(self._data)
        self.schema = WORKLOAD.schema(self._model)
        self._names = {spec.name: spec.role for spec in self.schema}
        self.steps, self.samples = steps, steps * BATCH
        self._all = sum(WORKLOAD.samples(self._model, self._data.manifest))
        self._seed = self._given = 0

    def initial(self, seed: int) -> Weights:
        self._seed, self._given = seed, 0
        return {n: v.numpy() for n, v in WORKLOAD.init(self._model, seed).items()}

    def gather(self, weights: Weights, honest: Sequence[int], hostile: Sequence[int]) -> set[int]:
        return set()  # its data is there

    def task(self) -> Job:
        """The next task of the pass; what is too little for one is left out."""
        a_pass = self._all // self.samples
        number, self._given = self._given, self._given + 1
        start = number % a_pass * self.samples
        more: dict[str, Any] = {"start": start, "stop": start + self.samples, "seed": number}
        more |= {"order_seed": 1000 * self._seed + number // a_pass, "train": self.train}
        return job(self._model, self.steps, BATCH, **more)

    def learn(
        self, weights: Weights, job: Job, who: int, steps: int = 0, role: str = "own"
    ) -> Weights:
        """The update of the first `steps` steps of a task, all of them by default."""
        if steps:
            job = msgspec.structs.replace(job, steps=steps, stop=job.start + steps * BATCH)
        base = {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
        work = WORKLOAD.begin(job, base, self._data, "cpu")
        while not work.done:
            work.advance()
        done = {name: value.numpy() for name, value in work.result()[1].items()}
        return {
            name: value - done[name] if self._names[name] == "parameter" else done[name]
            for name, value in weights.items()
        }

    def loss(self, weights: Weights) -> float:
        """The Fréchet distance to all digits: to the few held out it is mostly chance."""
        given = {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
        found = WORKLOAD.evaluate(self._model, given, self._data, 600.0, lambda: False)
        return found["loss"]

    def backdoor(self, weights: Weights, job: Job, rng: np.random.Generator) -> Weights:
        raise NotImplementedError("no attack of this subject asks for it")

    def success(self, weights: Weights) -> float:
        return 0.0
