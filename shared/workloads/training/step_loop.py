"""Step loop of a task: optimiser steps over batches; a workload provides the batch and its loss.

A step has `batch_size` samples whatever the size of a micro-batch: each adds its share to the
gradient. Only reading the figures waits for a GPU, at most five times a second.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from time import perf_counter
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shared.errors import InvalidRunFile
from shared.programs.machine_limits import free_memory_bytes
from shared.workloads.base import Job, Progress, Result, Weights
from shared.workloads.training.device_differences import (
    autocast,
    has_own_memory,
    to_host,
)
from shared.workloads.training.learner import Learner
from shared.workloads.training.memory_release import release_memory
from shared.workloads.training.micro_batch import MicroBatchPace
from shared.workloads.training.ranks import Begin, Part, RankLost, Ranks, broadcast, hand_over
from shared.workloads.training.streamed_weights import move, stream

_READ_S = 0.2  # least time between two waits for a GPU's figures
_COUNTERS = "counters"
_FIGURES = "figures"
_WORD = (1 << 63) - 1


_EVERY_S = 0.02  # least time between two pause checks within a micro-batch


class StepLoss(NamedTuple):
    """Loss and figures of some samples of one step."""

    loss: Tensor  # mean over the samples; its gradient is taken
    figures: Tensor | None = None  # figures besides the loss, detached (F,)
    # reports divide the mean of `loss` by the mean of `weight`; None = 1
    weight: Tensor | None = None


class StepWork(ABC):
    """Local training ("delta") or the mean gradient at the base weights ("gradient") of a model
    without buffers; see `Work`.

    The parameters of `model` that require a gradient have the names and the order of the workload's
    schema. `samples` is the task's number of samples, `flops` the FLOPs of one sample, forward and
    backward. `momenta`, by parameter, are those that the base version holds.
    """

    FIGURES: ClassVar[tuple[str, ...]] = ()  # names of the figures besides the loss

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        *,
        device: str,
        samples: int,
        flops: float,
        momenta: Weights | None = None,
    ) -> None:
        self.job = job
        self.model = model.train()
        self.device = device
        self._samples = samples
        self._flops = flops
        self._autocast = autocast(job.train.precision, device)
        self._pace = MicroBatchPace(min(job.batch_size, samples), flops, device)
        self._lookout: Lookout | None = None
        self._spares = False  # recomputes blocks in the backward pass
        self._streams = False  # copies weights to the device while they are used
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._learner = Learner(trainable, job, momenta)
        self._look: Callable[[], None] = _nothing
        self._ranks: Ranks | None = None
        self._assists = False  # computes parts for rank 0, which decides where the state is
        self._own = 0  # samples of the running step that this process computes
        self._step = 0
        self._in_step = 0  # finished samples of the running step
        # Loss, weight and figures of the present step.
        self._now = torch.zeros(2 + len(self.FIGURES), device=device)
        self._figures = torch.zeros((job.steps, len(self._now)), device=device)
        self._read_at = 0.0
        self._unread = 0  # samples since the last wait for the device
        self._busy_s = 0.0  # seconds spent on the unread samples

    @abstractmethod
    def measure(self, start: int, stop: int) -> StepLoss:
        """Measure samples [start, stop) of a task's step; the same samples give the same result."""

    @property
    def done(self) -> bool:
        return self._step == self.job.steps

    @property
    def micro_batch(self) -> int:
        """Return the number of samples of the next micro-batch."""
        return self._pace.micro

    def begin_with(self, micro_batch: int, *, most: bool, room: int) -> None:
        """Begin with the micro-batch size of earlier work; see `Paced`."""
        self._pace.begin_with(micro_batch, most=most, room=room)

    def stream(self, device: str) -> bool:
        """Compute on `device` with all state in the memory of the host; see `Streamable`."""
        if self._streams or not (self._spares or self._spare()):
            return False
        self._start_over()
        self._move("cpu")
        release_memory(self.device)
        self.device, self._streams = device, True
        self._lookout = Lookout(self._look, self.model.parameters(), device)
        stream(self.model, device, self._lookout.check)
        self._learner.compute_on(device)
        self._autocast = autocast(self.job.train.precision, device)
        # Each micro-batch copies all weights, so the largest micro-batch that fits is looked for.
        self._pace = MicroBatchPace(min(self.job.batch_size, self._samples), self._flops, device)
        self._move(device)
        return True

    def listen(self, look: Callable[[], None]) -> None:
        """Check for pauses within micro-batches; see `Listening`. Micro-batches on a GPU are short
        enough without checks, unless weights are copied for each.
        """
        # A weak reference: a cycle would keep models and states of finished tasks until a garbage
        # collection.
        self._look = partial(_hold_ranks, weakref.ref(self), look)
        if self._lookout is not None:
            self._lookout.look = self._look
        elif self.device == "cpu":
            self._lookout = Lookout(self._look, self.model.parameters(), self.device)

    def spread(self, ranks: Ranks, begin: Begin) -> None:
        """Compute each step with further ranks, which begin the same task by `begin`."""
        self._ranks = ranks
        ranks.begin(begin)

    def assist(self, part: Part) -> None:
        """Compute a part of a step for rank 0, with the weights of rank 0."""
        self._assists = True
        if part.streams:
            self.stream(self.device)
        broadcast(value.data for value in self._learner.parameters)
        self._start_over()
        at = part.start
        while at < part.stop:
            stop = min(at + min(part.micro, self._pace.micro), part.stop)
            try:
                self._compute(at, stop, part.size)
                at = stop
            except (MemoryError, torch.OutOfMemoryError):
                self.halve()
                at = part.start
        hand_over([*self._learner.gradients(), self._now])

    def advance(self) -> Progress:
        """Do a micro-batch. Raises InvalidRunFile for a nonfinite loss or a bad chunk."""
        if self.done:
            raise RuntimeError("this task is done")
        if self._ranks is None:
            return self._advance()
        self._ranks.hold(False)
        try:
            while True:
                try:
                    return self._advance(self._ranks)
                except RankLost:
                    self._start_over()
        finally:
            self._ranks.hold(True)

    def _advance(self, ranks: Ranks | None = None) -> Progress:
        began = perf_counter()
        first = self._step * self.job.batch_size
        size = min(self.job.batch_size, self._samples - first)
        if not self._in_step:
            self._own = size
            if ranks is not None:
                whole = Part(first, first + size, size, self._pace.micro, self._streams)
                weights = (value.data for value in self._learner.parameters)
                self._own = ranks.share(weights, whole) - first
        at = first + self._in_step
        micro = min(self._pace.micro, self._own - self._in_step)
        self._compute(at, at + micro, size)
        self._in_step += micro
        self._unread += micro
        ended = self._in_step == self._own
        if ended:
            if ranks is not None and ranks.computing:
                self._collect(ranks)
            self._finish_step(size)
        figures = self._read(began, ended)
        return Progress(
            step=self._step,
            steps=self.job.steps,
            samples=first + size if ended else at + micro,
            loss=_mean_loss(figures) if figures else None,
            metrics=dict(zip(self.FIGURES, figures[2:], strict=True)) if figures else {},
        )

    def _compute(self, at: int, stop: int, size: int) -> None:
        """Add the gradients and figures of samples [at, stop) of a step."""
        share = (stop - at) / size
        try:
            with self._lookout or nullcontext():
                with self._autocast:
                    loss, figures, weight = self.measure(at, stop)
                torch.autograd.backward(loss if stop - at == size else loss * share)
        except BaseException:
            self._start_over()  # a part of a micro-batch may be in the gradients
            raise
        self._now[0].add_(loss.detach(), alpha=share)
        self._now[1].add_(share if weight is None else weight * share)
        if figures is not None:
            self._now[2:].add_(figures, alpha=share)

    def _collect(self, ranks: Ranks) -> None:
        """Add the parts of the other ranks; the wait is not counted as a micro-batch's time."""
        began = perf_counter()
        try:
            ranks.collect([*self._learner.gradients(), self._now], self._look)
        except BaseException:
            self._start_over()
            raise
        self._busy_s -= perf_counter() - began

    def result(self) -> tuple[Result, dict[str, Tensor]]:
        figures = self._figures.cpu()
        self._refuse_nan(figures.flatten().tolist())
        rate = {"lr": self._learner.rate(self._step - 1)} if self.job.update == "delta" else {}
        tenth = max(1, len(figures) // 10)  # a tenth at both ends, so that the two can be compared
        head, tail = figures[:tenth].mean(0).tolist(), figures[-tenth:].mean(0).tolist()
        report = Result(
            steps=self._step,
            samples=self._samples,
            loss_first=_mean_loss(head),
            loss_last=_mean_loss(tail),
            metrics={
                **dict(zip(self.FIGURES, tail[2:], strict=True)),
                "micro_batch": float(self._pace.micro),
                **rate,
            },
        )
        return report, self._learner.result()

    def suspend(self) -> None:
        if self._ranks is not None:
            if self._ranks.computing:
                self._start_over()
            self._ranks.stop()
        self._move("cpu")
        release_memory(self.device)

    def resume(self) -> None:
        self._move(self.device)
        self._unread, self._busy_s = 0, 0.0

    def halve(self) -> int:
        try:
            self._pace.halve()
        except MemoryError:
            if not (self._spare() or (self._may_leave() and self.stream(self.device))):
                raise
        self._start_over()
        release_memory(self.device)
        return self._pace.micro

    def snapshot(self) -> dict[str, Tensor]:
        """Return weights, optimiser, sums and counters. Raises RuntimeError within a step."""
        if self._in_step:
            raise RuntimeError("a snapshot is taken between steps")
        counters = [self.job.seed & _WORD, self._step, self._pace.micro]
        return self._learner.snapshot() | {
            _FIGURES: to_host(self._figures),
            _COUNTERS: torch.tensor(counters, dtype=torch.int64),
        }

    def restore(self, snapshot: Weights) -> None:
        """Continue from a `snapshot`. Raises InvalidRunFile for the snapshot of another task."""
        counters = snapshot.get(_COUNTERS, torch.zeros(0)).flatten().tolist()
        figures = snapshot.get(_FIGURES)
        fits = (
            len(counters) == 3
            and counters[0] == self.job.seed & _WORD
            and 0 <= counters[1] <= self.job.steps
            and figures is not None
            and figures.shape == self._figures.shape
        )
        if figures is None or not fits or not self._learner.restore(snapshot):
            raise InvalidRunFile("this snapshot belongs to another task: start the task afresh")
        self._figures.copy_(figures)
        self._start_over()
        self._step = int(counters[1])
        self._pace.set(max(1, int(counters[2])))

    def _may_leave(self) -> bool:
        """Return True if the optimizer's state may leave the device for the host: the device has
        memory of its own, the host has room for weights, gradients and two moments, and this
        process assists no other process.
        """
        state_bytes = 4 * sum(value.nbytes for value in self.model.parameters())
        room = state_bytes < free_memory_bytes()
        return room and has_own_memory(self.device) and not self._assists

    def _spare(self) -> bool:
        """Recompute blocks in the backward pass, which saves memory; return False if the model does
        so already, or cannot.
        """
        recompute = getattr(self.model, "gradient_checkpointing_enable", None)
        if self._spares or recompute is None:
            return False
        recompute({"use_reentrant": False})
        self._spares = True
        return True

    def _finish_step(self, size: int) -> None:
        self._learner.finish(self._step, size / self._samples)
        self._figures[self._step] = self._now
        self._now.zero_()
        self._in_step = 0
        self._step += 1

    def _start_over(self) -> None:
        """Restart the running step."""
        if self._ranks is not None and self._ranks.computing:
            self._ranks.stop()
        self._learner.drop()
        self._now.zero_()
        self._in_step = 0
        self._unread, self._busy_s = 0, 0.0

    def _read(self, began: float, ended: bool) -> list[float]:
        """Wait for the device and read the figures: on a CPU always, on a GPU rarely and at the
        end.

        Return loss and figures of the finished step; [] within a step, or if they were not read.
        """
        waits = self.device == "cpu" or self._lookout is not None
        if not waits and not self.done and began - self._read_at < _READ_S:
            self._busy_s += perf_counter() - began
            return []
        values: list[float] = (self._figures[self._step - 1] if ended else self._now).tolist()
        self._refuse_nan(values)
        self._read_at = perf_counter()
        if self._lookout is None:
            self._pace.record(self._unread, self._busy_s + self._read_at - began)
        else:
            self._pace.record(self._unread, self._lookout.longest_s, self._lookout.kept_bytes)
        self._unread, self._busy_s = 0, 0.0
        return values if ended else []

    def _refuse_nan(self, values: Iterable[float]) -> None:
        if not all(map(math.isfinite, values)):
            raise InvalidRunFile(
                f"the loss is no longer a number (by step {self._step} of {self.job.steps});"
                " a lower [train] lr may help"
            )

    def _move(self, device: str) -> None:
        weights = "cpu" if self._streams else device
        self._learner.move(weights)
        move(self.model, weights=weights, tables=device)
        self._now = self._now.to(device)
        self._figures = self._figures.to(device)


def _nothing() -> None: ...


def _hold_ranks(work_ref: weakref.ref[StepWork], look: Callable[[], None]) -> None:
    """Pause the further ranks of a work while `look` runs."""
    work = work_ref()
    ranks = None if work is None else work._ranks
    if ranks is not None:
        ranks.hold(True)
    look()
    if ranks is not None:
        ranks.hold(False)


def _mean_loss(means: list[float]) -> float | None:
    """Return the loss of a batch; None for a batch without learnt tokens."""
    loss, weight = means[:2]
    return loss / weight if weight else None


class Lookout:
    """Context manager for a micro-batch: it checks for pauses, and counts the bytes kept for the
    backward pass.
    """

    def __init__(
        self, look: Callable[[], None], parameters: Iterable[nn.Parameter], device: str
    ) -> None:
        self.look = look
        self._kind = torch.device(device).type
        self._parameters = {_place(value) for value in parameters}
        self._kept: set[int] = set()
        self._at = self._looked_at = 0.0
        self.longest_s = 0.0  # longest time between two checks in the last micro-batch
        self.kept_bytes = 0  # bytes kept for the backward pass

    def __enter__(self) -> None:
        self._kept = set(self._parameters)
        self.longest_s, self.kept_bytes = 0.0, 0
        self._at = self._looked_at = perf_counter()
        self._hooks = saved_tensors_hooks(self._keep, self.check)
        self._hooks.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._hooks.__exit__(*raised)
        del self._hooks  # the hooks refer to this lookout
        self._kept.clear()
        self.longest_s = max(self.longest_s, perf_counter() - self._at)

    def _keep(self, value: Tensor) -> Tensor:
        place = _place(value)
        if place not in self._kept:
            self._kept.add(place)
            self.kept_bytes += value.untyped_storage().nbytes()
        return self.check(value)

    def check(self, value: Tensor) -> Tensor:
        """Check for a pause, if the last check was a while ago; return the value."""
        now = perf_counter()
        self.longest_s = max(self.longest_s, now - self._at)
        self._at = now
        if now - self._looked_at >= _EVERY_S:
            with torch.autocast(self._kind, enabled=False):
                self.look()
            self._at = self._looked_at = perf_counter()
        return value


def _place(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
