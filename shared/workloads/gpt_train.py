"""One GPT task on one device, advanced a micro-batch at a time.

A step is `batch_size` samples whatever the size of a micro-batch: each adds its share to the gradient. On a GPU nothing waits
for the device but reading the loss, five times a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from time import perf_counter

import torch
from torch import Tensor

from shared.errors import InvalidRunFile
from shared.workloads.base import Data, Job, Progress, Result
from shared.workloads.devices import autocast, release, seed_device, to_device, to_host
from shared.workloads.gpt_config import GptConfig, flops_per_sample, schema
from shared.workloads.gpt_model import build
from shared.workloads.learner import Learner
from shared.workloads.order import PassOrder
from shared.workloads.pace import Pace
from shared.workloads.windows import Windows, of_pass, windows_of

_READ_LOSS_S = 0.2
_COUNTERS = "counters"
_LOSSES = "losses"


class GptWork:
    """Local training ("delta") or the mean gradient at the base weights ("gradient"); see `Work`."""

    def __init__(
        self,
        job: Job,
        weights: Mapping[str, Tensor],
        data: Data,
        device: str,
        inner: Mapping[str, Tensor] | None,
    ) -> None:
        config = GptConfig.from_dict(job.config)
        order = PassOrder(windows_of(data.manifest, config.block_size), job.order_seed)
        rows = of_pass(order, job.start, job.stop, job.steps, job.batch_size)
        self._windows = Windows(data, config.block_size, config.vocab_size, rows)
        self._job = job
        self._device = device
        self._order = [spec.name for spec in schema(config)]
        self._model = build(config, weights, device).train()
        self._dropout = config.dropout > 0
        self._autocast = autocast(job.train.precision, device)
        self._pace = Pace(job.batch_size, flops_per_sample(config), device)
        self._learner = Learner(dict(self._model.named_parameters()), job, inner)
        self._step = 0
        self._in_step = 0  # samples of the step in progress that are done
        self._loss_sum = torch.zeros((), device=device)
        self._losses = torch.zeros(job.steps, device=device)
        self._read_at = 0.0
        self._unread = 0  # samples since the device was last waited for
        self._busy_s = 0.0  # spent on them

    @property
    def done(self) -> bool:
        return self._step == self._job.steps

    def advance(self) -> Progress:
        """Do one micro-batch. Raises InvalidRunFile when the loss stops being a number or a chunk cannot be used."""
        if self.done:
            raise RuntimeError("this task is done")
        began = perf_counter()
        first = self._step * self._job.batch_size
        size = min(self._job.batch_size, len(self._windows) - first)
        micro = min(self._pace.micro, size - self._in_step)
        at = first + self._in_step
        tokens = self._load(at, at + micro)  # (B, T + 1)
        if self._dropout:
            seed_device(self._device, self._job.seed, self._step, self._in_step)
        with self._autocast:
            loss = self._model(tokens[:, :-1], tokens[:, 1:])
        share = micro / size
        (loss if micro == size else loss * share).backward()
        self._loss_sum.add_(loss.detach(), alpha=share)
        self._in_step += micro
        self._unread += micro
        ended = self._in_step == size
        if ended:
            self._finish_step(size)
        loss_nats = self._read_loss(began, ended)
        return Progress(step=self._step, steps=self._job.steps, samples=at + micro, loss=loss_nats)

    def result(self) -> tuple[Result, dict[str, Tensor]]:
        losses = self._losses.tolist()
        self._refuse_nan(losses)
        tail = losses[-max(1, len(losses) // 10) :]
        found = self._learner.result()
        report = Result(
            steps=self._step,
            samples=len(self._windows),
            loss_first=losses[0],
            loss_last=sum(tail) / len(tail),
            metrics={
                "micro_batch": float(self._pace.micro),
                "lr": self._learner.rate(self._step - 1),
            },
        )
        return report, {name: found[name] for name in self._order}

    def suspend(self) -> None:
        self._move("cpu")
        release(self._device)

    def resume(self) -> None:
        self._move(self._device)
        self._unread, self._busy_s = 0, 0.0

    def halve(self) -> int:
        micro = self._pace.halve()
        self._learner.drop()
        self._loss_sum.zero_()
        self._in_step = 0
        release(self._device)
        self._unread, self._busy_s = 0, 0.0
        return micro

    def state(self) -> dict[str, Tensor]:
        return self._learner.state()

    def snapshot(self) -> dict[str, Tensor]:
        """Weights, optimiser, sums and counters. Raises RuntimeError in the middle of a step."""
        if self._in_step:
            raise RuntimeError("a snapshot is taken between steps")
        counters = torch.tensor([self._step, self._pace.micro], dtype=torch.int64)
        return self._learner.snapshot() | {_LOSSES: to_host(self._losses), _COUNTERS: counters}

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Go on where `snapshot` was taken. Raises InvalidRunFile when it is of another task."""
        counters = snapshot.get(_COUNTERS, torch.zeros(0)).flatten().tolist()
        losses = snapshot.get(_LOSSES)
        fits = (
            len(counters) == 2
            and 0 <= counters[0] <= self._job.steps
            and losses is not None
            and losses.shape == self._losses.shape
        )
        if losses is None or not fits or not self._learner.restore(snapshot):
            raise InvalidRunFile("this snapshot belongs to another task: start the task afresh")
        self._losses.copy_(losses)
        self._loss_sum.zero_()
        self._in_step = 0
        self._step = int(counters[0])
        self._pace.set(max(1, int(counters[1])))

    def _load(self, start: int, stop: int) -> Tensor:
        return to_device(torch.from_numpy(self._windows.read(start, stop)), self._device)

    def _finish_step(self, size: int) -> None:
        self._learner.finish(self._step, size / len(self._windows))
        self._losses[self._step] = self._loss_sum
        self._loss_sum.zero_()
        self._in_step = 0
        self._step += 1

    def _read_loss(self, began: float, ended: bool) -> float | None:
        """Wait for the device and read the loss: on a CPU always, on a GPU rarely, and at the end.

        The mean of the step that has ended, None in the middle of a step or when nothing was read.
        """
        due = began - self._read_at >= _READ_LOSS_S
        loss: float | None = None
        if self._device == "cpu" or self.done or due:
            loss = float(self._losses[self._step - 1] if ended else self._loss_sum)
            self._refuse_nan([loss])
            self._read_at = perf_counter()
            self._pace.record(self._unread, self._busy_s + self._read_at - began)
            self._unread, self._busy_s = 0, 0.0
        else:
            self._busy_s += perf_counter() - began
        return loss if ended else None

    def _refuse_nan(self, losses: Iterable[float]) -> None:
        if not all(map(math.isfinite, losses)):
            raise InvalidRunFile(
                f"the loss is no longer a number (by step {self._step} of {self._job.steps});"
                " a lower [train] lr may help"
            )

    def _move(self, device: str) -> None:
        self._learner.move(device)
        self._loss_sum = self._loss_sum.to(device)
        self._losses = self._losses.to(device)
