"""What hostile volunteers do to a GPT of 0.1 M parameters: two rules against three attacks, with
the same control.

make experiments EXPERIMENT=attacks_gpt                        a rerun goes on
make experiments EXPERIMENT=attacks_gpt EXPERIMENT_ARGS='--quick'
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from coordinator.rules.task_size import pass_seed
from coordinator.simulate.simulation import Dataset
from shared.errors import InvalidRunFile
from shared.workloads.base import Job, TrainSettings
from shared.workloads.data.local_data import LocalData
from shared.workloads.gpt.workload import GptWorkload
from tests.experiments.cells import arguments, results, work_off
from tests.experiments.digits import Weights
from tests.experiments.exp_attacks import CONTROL, STEPS, Cell, play, table
from tests.experiments.exp_learning import SMALL, TINY
from tests.experiments.learning import corpus, local

BATCH = 4
HOSTILE = (("nan", 0.1), ("inflated weight", 0.1), ("sign flip", 0.3))
WAYS = ((CONTROL, False), ("mean", True), ("multi-krum", True))


class Gpt:
    """A GPT over bytes; every volunteer keeps its optimiser's state."""

    train = TrainSettings(lr=3e-3, warmup_steps=0)  # level
    samples = STEPS * BATCH

    def __init__(self, data: Dataset, model: Mapping[str, Any]) -> None:
        self._workload = GptWorkload()
        self._model = self._workload.config(model, data[0])
        self.schema = self._workload.schema(self._model)
        self._data: LocalData = local(data, data[0].chunks)
        self._heldout: LocalData = local(data, data[0].heldout)
        self._seed = self._read = 0

    def initial(self, seed: int) -> Weights:
        self._seed, self._read = seed, 0
        return {name: value.numpy() for name, value in self._torch(seed).items()}

    def _torch(self, seed: int) -> dict[str, torch.Tensor]:
        return self._workload.init(self._model, seed)

    def learn(self, weights: Weights, rng: np.random.Generator, who: int) -> Weights:
        start, self._read = self._read, self._read + self.samples
        job = Job(
            run="attacked",
            workload="gpt",
            kind="train",
            update="delta",
            config=self._model,
            train=self.train,
            order_seed=pass_seed(self._seed, 1),
            start=start,
            stop=self._read,
            seed=0,
            steps=STEPS,
            batch_size=BATCH,
            global_step=0,
            total_steps=0,
        )
        base = {name: torch.from_numpy(value) for name, value in weights.items()}
        work = self._workload.begin(job, base, self._data, "cpu")
        try:
            while not work.done:
                work.advance()
        except InvalidRunFile:  # the loss is no number: nobody can train a model that was destroyed
            return weights
        return {name: value.numpy() for name, value in work.result()[1].items()}

    def loss(self, weights: Weights) -> float:
        given = {name: torch.from_numpy(value) for name, value in weights.items()}
        found = self._workload.evaluate(self._model, given, self._heldout, 600.0, lambda: False)
        return found["loss"]


def cells(seeds: int) -> Iterator[Cell]:
    for seed in range(seeds):
        for rule, checked in WAYS:
            yield Cell(rule=rule, checked=checked, seed=seed)
            for attack, share in HOSTILE:
                yield Cell(rule=rule, checked=checked, attack=attack, share=share, seed=seed)


def main() -> None:
    options = arguments(__doc__ or "")
    data = corpus(options.out.parent, 12 if options.quick else 0)
    subject = Gpt(data, TINY if options.quick else SMALL)
    listed = {cell.name: cell for cell in cells(1 if options.quick else 2)}
    rounds = 2 if options.quick else 20
    done = work_off(options, listed, lambda cell: play(cell, subject, rounds))
    lines = table(list(done.values()), [attack for attack, _ in HOSTILE])
    results(options).with_name("table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
