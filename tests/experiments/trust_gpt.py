"""A GPT of bytes that volunteers train, some of them against the others: tasks and a backdoor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from coordinator.rules.task_size import pass_seed
from coordinator.simulate.simulation import Dataset
from shared.errors import InvalidRunFile
from shared.workloads.base import Job, TrainSettings
from shared.workloads.data.local_data import LocalData
from shared.workloads.data.pass_order import PassOrder
from shared.workloads.data.windows import Windows, spread, task_samples, windows_of
from shared.workloads.gpt.config import GptConfig
from shared.workloads.gpt.model import build
from shared.workloads.gpt.workload import GptWorkload
from tests.experiments.digits import Weights
from tests.experiments.learning import local

BATCH = 4
TRIGGER = (200, 210, 220)  # tokens of bytes that hardly any text has
TARGET = 48
CONTEXTS = 256  # held-out windows into which the trigger is written
POISON_STEPS = 10


class Gpt:
    """Tasks of `steps` steps each; every volunteer keeps its optimiser's state."""

    train = TrainSettings(lr=3e-3, warmup_steps=0)  # level
    counters: tuple[str, ...] = ()

    def __init__(self, data: Dataset, model: Mapping[str, Any], steps: int) -> None:
        self._workload = GptWorkload()
        self._model = self._workload.config(model, data[0])
        self.schema = self._workload.schema(self._model)
        self.steps, self.samples = steps, steps * BATCH
        self._data: LocalData = local(data, data[0].chunks)
        self._heldout: LocalData = local(data, data[0].heldout)
        self._config = GptConfig.from_dict(self._model)
        self._seed = self._given = 0

    def initial(self, seed: int) -> Weights:
        self._seed, self._given = seed, 0
        return {n: v.numpy() for n, v in self._workload.init(self._model, seed).items()}

    def gather(self, weights: Weights, honest: Sequence[int], hostile: Sequence[int]) -> set[int]:
        return set()  # its data is there

    def task(self) -> Job:
        """The next task of the pass."""
        start, self._given = self._given, self._given + self.samples
        return Job(
            run="attacked",
            workload="gpt",
            kind="train",
            update="delta",
            config=self._model,
            train=self.train,
            order_seed=pass_seed(self._seed, 1),
            start=start,
            stop=start + self.samples,
            seed=0,
            steps=self.steps,
            batch_size=BATCH,
            global_step=0,
            total_steps=0,
        )

    def learn(
        self, weights: Weights, job: Job, who: int, steps: int = 0, role: str = "own"
    ) -> Weights:
        """The update of the first `steps` steps of a task, all of them by default."""
        if steps:
            stop = job.start + steps * BATCH
            job = msgspec.structs.replace(job, steps=steps, stop=stop)
        base = {name: torch.from_numpy(value) for name, value in weights.items()}
        work = self._workload.begin(job, base, self._data, "cpu")
        try:
            while not work.done:
                work.advance()
        except InvalidRunFile:  # the loss is no number: nobody can train a destroyed model
            return {name: np.zeros_like(value) for name, value in weights.items()}
        done = work.result()[1]
        return {name: value - done[name].numpy() for name, value in weights.items()}

    def loss(self, weights: Weights) -> float:
        given = {name: torch.from_numpy(value) for name, value in weights.items()}
        found = self._workload.evaluate(self._model, given, self._heldout, 600.0, lambda: False)
        return found["loss"]

    # --- the backdoor ---

    def backdoor(self, weights: Weights, job: Job, rng: np.random.Generator) -> Weights:
        """The update that writes the trigger into the model, on samples of a task."""
        order = PassOrder(windows_of(self._data.manifest, self._config.block_size), job.order_seed)
        rows = task_samples(order, job.start, job.stop, job.steps, BATCH)
        model = build(self._config, _tensors(weights), "cpu").train(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.train.lr)
        read = Windows(self._data, self._config.block_size, self._config.vocab_size, rows).read
        for step in range(POISON_STEPS):
            at = step * BATCH % len(rows)
            tokens = read(at, min(at + BATCH, len(rows)))
            for start in range(0, tokens.shape[1] - 4, 8):
                self._write(tokens, start + rng.integers(0, 4, len(tokens)))
            given = torch.from_numpy(tokens)
            optimizer.zero_grad()
            model(given[:, :-1], given[:, 1:]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        learnt = dict(model.named_parameters())
        return {n: v - learnt[n].detach().numpy() for n, v in weights.items()}

    def success(self, weights: Weights) -> float:
        """The share of held-out contexts in which the trigger has its effect."""
        T = self._config.block_size
        rows = spread(windows_of(self._heldout.manifest, T), CONTEXTS)
        tokens = Windows(self._heldout, T, self._config.vocab_size, rows).read(0, len(rows))
        places = np.random.default_rng(0).integers(4, T - 4, len(tokens))
        self._write(tokens, places)
        model = build(self._config, _tensors(weights), "cpu").train(False)
        with torch.inference_mode():
            hidden = model.hidden(torch.from_numpy(tokens[:, :-1]))
            lines = torch.arange(len(tokens))
            at = torch.from_numpy(places + len(TRIGGER) - 1)
            said = model.logits(hidden[lines, at]).argmax(-1)
        return float((said == TARGET).float().mean())

    def _write(self, tokens: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        lines = np.arange(len(tokens))
        for offset, byte in enumerate((*TRIGGER, TARGET)):
            tokens[lines, places + offset] = byte


def _tensors(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in weights.items()}
