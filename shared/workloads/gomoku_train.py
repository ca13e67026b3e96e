"""Learning from games, one task on one device, advanced a micro-batch at a time.

A task draws its positions from a window of sealed chunks, each time turned or mirrored at random; nothing is taken out of the
window, so any number of learners may work at once. Shapes: B positions, A cells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared.errors import InvalidRunFile
from shared.workloads.base import Data, Job, Progress, Result
from shared.workloads.devices import autocast, release, to_device, to_host
from shared.workloads.gomoku_chance import words
from shared.workloads.gomoku_config import GomokuConfig, forward_flops, schema
from shared.workloads.gomoku_games import Positions, decode, positions
from shared.workloads.gomoku_net import GomokuNet, build
from shared.workloads.gomoku_rules import symmetries
from shared.workloads.inner import InnerOptimizer, learning_rate
from shared.workloads.pace import Pace

_COUNTERS = "counters"
_LOSSES = "losses"
_TERMS = ("policy_loss", "value_loss", "policy_accuracy", "value_error")
_WORD = (1 << 63) - 1
_READ_S = 0.2
_ILLEGAL = -1e9  # in place of minus infinity, which times a probability of zero is no number


def window(data: Data, config: GomokuConfig) -> Positions:
    """All positions of the chunks of a task. Raises InvalidRunFile for a chunk that cannot be used."""
    records = []
    for index, chunk in enumerate(data.manifest.chunks):
        games = decode(data.chunk(index).read_bytes())
        if len(games) != chunk.items:
            raise InvalidRunFile(
                f"chunk {index} of the replay window has {len(games)} games, but its manifest says"
                f" {chunk.items}"
            )
        records += games
    return positions(records, config.rules)


class Batches:
    """The positions that a task draws: the same for the same seed, whatever the micro-batches."""

    def __init__(self, found: Positions, size: int, job: Job) -> None:
        if len(found) < job.batch_size:
            raise InvalidRunFile(
                f"the replay window holds {len(found)} positions, fewer than a batch of"
                f" {job.batch_size}: play more games first, or make [task] batch_size smaller"
            )
        self._found = found
        self._turns = symmetries(size)
        self._job = job

    def read(self, step: int, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [start, stop) of a step's batch: boards (B, A), policies (B, A), results (B,)."""
        raw = words(self._job.seed, step, self._job.batch_size)[start:stop]
        rows = ((raw >> np.uint64(16)) % np.uint64(len(self._found))).astype(np.intp)
        turns = self._turns[(raw & np.uint64(7)).astype(np.intp)]  # (B, A)
        boards = np.take_along_axis(self._found.boards[rows], turns, axis=1)
        visits = np.take_along_axis(self._found.visits[rows], turns, axis=1).astype(np.float32)
        visits /= visits.sum(axis=1, keepdims=True)
        results = self._found.results[rows].astype(np.float32)
        return torch.from_numpy(boards), torch.from_numpy(visits), torch.from_numpy(results)


def losses(
    model: GomokuNet, boards: Tensor, policies: Tensor, results: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss to go down, and (detached) its terms in the order of `_TERMS`, (4,)."""
    logits, values = model(boards)
    logits = logits.float().masked_fill(boards != 0, _ILLEGAL)
    policy = F.cross_entropy(logits, policies)
    value = F.mse_loss(values.float(), results)
    with torch.no_grad():
        right = (logits.argmax(1) == policies.argmax(1)).float().mean()
        error = (values.float() - results).abs().mean()
    return policy + value, torch.stack([policy.detach(), value.detach(), right, error])


class LearnWork:
    """See `Work`. Hands in a delta."""

    def __init__(
        self,
        job: Job,
        weights: Mapping[str, Tensor],
        data: Data,
        device: str,
        inner: Mapping[str, Tensor] | None,
    ) -> None:
        config = GomokuConfig.from_dict(job.config)
        self._batches = Batches(window(data, config), config.size, job)
        self._job = job
        self._device = device
        self._order = [spec.name for spec in schema(config)]
        self._model = build(config, weights, device).train()
        self._parameters = dict(self._model.named_parameters())
        self._inner = InnerOptimizer(self._parameters, job.train)
        self._fresh = job.reset_inner or not inner or not self._inner.load(inner)
        self._autocast = autocast(job.train.precision, device)
        self._pace = Pace(job.batch_size, 3 * forward_flops(config), device)
        self._step = 0
        self._in_step = 0  # positions of the step in progress that are done
        self._terms = torch.zeros(len(_TERMS), device=device)  # of the step in progress
        self._losses = torch.zeros((job.steps, len(_TERMS)), device=device)
        self._read_at = 0.0
        self._unread = 0  # positions since the device was last waited for
        self._busy_s = 0.0  # spent on them

    @property
    def done(self) -> bool:
        return self._step == self._job.steps

    def advance(self) -> Progress:
        """Do one micro-batch. Raises InvalidRunFile when the loss stops being a number."""
        if self.done:
            raise RuntimeError("this task is done")
        began = perf_counter()
        size = self._job.batch_size
        micro = min(self._pace.micro, size - self._in_step)
        drawn = self._batches.read(self._step, self._in_step, self._in_step + micro)
        boards, policies, results = (to_device(value, self._device) for value in drawn)
        share = micro / size
        with self._autocast:
            loss, terms = losses(self._model, boards, policies, results)
        (loss if micro == size else loss * share).backward()  # type: ignore[no-untyped-call]
        self._terms.add_(terms, alpha=share)
        self._in_step += micro
        samples = self._step * size + self._in_step
        ended = self._in_step == size
        if ended:
            self._finish_step()
        found = self._read(began, micro, ended)
        return Progress(
            step=self._step,
            steps=self._job.steps,
            samples=samples,
            loss=found["policy_loss"] + found["value_loss"] if found else None,
            metrics=found,
        )

    def result(self) -> tuple[Result, dict[str, Tensor]]:
        terms = self._losses.cpu()
        tail = terms[-max(1, len(terms) // 10) :].mean(0).tolist()
        report = Result(
            steps=self._step,
            samples=self._step * self._job.batch_size,
            loss_first=float(terms[0, 0] + terms[0, 1]),
            loss_last=tail[0] + tail[1],
            metrics=dict(zip(_TERMS, tail, strict=True)),
        )
        return report, {name: to_host(self._parameters[name]) for name in self._order}

    def suspend(self) -> None:
        self._move("cpu")
        release(self._device)

    def resume(self) -> None:
        self._move(self._device)

    def halve(self) -> int:
        micro = self._pace.halve()
        self._start_over()
        release(self._device)
        return micro

    def state(self) -> dict[str, Tensor]:
        return self._inner.state()

    def snapshot(self) -> dict[str, Tensor]:
        """Weights, optimiser and counters. Raises RuntimeError in the middle of a step."""
        if self._in_step:
            raise RuntimeError("a snapshot is taken between steps")
        found = {f"weights/{name}": to_host(value) for name, value in self._parameters.items()}
        found |= {f"inner/{name}": value for name, value in self._inner.state().items()}
        found[_LOSSES] = to_host(self._losses)
        counters = [self._job.seed & _WORD, self._step, self._pace.micro, int(self._fresh)]
        found[_COUNTERS] = torch.tensor(counters, dtype=torch.int64)
        return found

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Go on where `snapshot` was taken. Raises InvalidRunFile when it is of another task."""
        own = {f"weights/{name}": value.data for name, value in self._parameters.items()}
        own[_LOSSES] = self._losses
        inner = {name[6:]: value for name, value in snapshot.items() if name.startswith("inner/")}
        counters = snapshot.get(_COUNTERS, torch.zeros(0)).flatten().tolist()
        fits = (
            len(counters) == 4
            and counters[0] == self._job.seed & _WORD
            and 0 <= counters[1] <= self._job.steps
            and all(n in snapshot and snapshot[n].shape == v.shape for n, v in own.items())
        )
        if not fits or not self._inner.load(inner):
            raise InvalidRunFile("this snapshot belongs to another task: start the task afresh")
        for name, value in own.items():
            value.copy_(snapshot[name])
        self._start_over()
        self._step = int(counters[1])
        self._pace.set(max(1, int(counters[2])))
        self._fresh = bool(counters[3])

    def _finish_step(self) -> None:
        job = self._job
        rate = learning_rate(job.train, job.global_step + self._step, job.total_steps)
        if self._fresh and self._step < job.train.rewarm_steps:
            rate *= (self._step + 1) / job.train.rewarm_steps
        self._inner.step(rate)
        self._losses[self._step] = self._terms
        self._terms.zero_()
        self._in_step = 0
        self._step += 1

    def _read(self, began: float, micro: int, ended: bool) -> dict[str, float]:
        """Wait for the device and read the terms of the step: on a CPU always, on a GPU rarely, and at the end."""
        self._unread += micro
        due = self.done or self._device == "cpu" or began - self._read_at >= _READ_S
        if not due:
            self._busy_s += perf_counter() - began
            return {}
        terms = self._losses[self._step - 1].tolist() if ended else self._terms.tolist()
        self._read_at = perf_counter()
        self._pace.record(self._unread, self._busy_s + self._read_at - began)
        self._unread, self._busy_s = 0, 0.0
        if not all(map(math.isfinite, terms)):
            raise InvalidRunFile(
                f"the loss is no longer a number (by step {self._step} of {self._job.steps});"
                " a lower [train] lr may help"
            )
        return dict(zip(_TERMS, terms, strict=True)) if ended else {}

    def _start_over(self) -> None:
        """The step in progress."""
        self._model.zero_grad(set_to_none=True)
        self._terms.zero_()
        self._in_step = 0
        self._unread, self._busy_s = 0, 0.0

    def _move(self, device: str) -> None:
        for value in self._parameters.values():
            gradient, value.grad = value.grad, None
            value.data = value.data.to(device)
            value.grad = gradient.to(device) if gradient is not None else None
        self._inner.move(device)
        self._terms = self._terms.to(device)
        self._losses = self._losses.to(device)
