"""Task of an author's model on one device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from shared.errors import InvalidRunFile
from shared.workloads.base import Data, Job, Result, Weights
from shared.workloads.data.pass_order import PassOrder
from shared.workloads.data.windows import task_samples
from shared.workloads.derived.built_model import BuiltModel, SampleBatches
from shared.workloads.derived.derived_facts import CodePlace, derived_of, sample_counts
from shared.workloads.derived.seeded_draws import AttentionDropout, SampleDraws, SeededDraws
from shared.workloads.training.device_differences import to_host
from shared.workloads.training.micro_batch import MicroBatchPace
from shared.workloads.training.ranks import Begin, Ranks
from shared.workloads.training.step_loop import StepLoss, StepWork

_PORTION_FLOPS = 9e9  # a third of a second on a slow core, which bounds the delay of a pause
_PORTION_MIN = 16  # least samples of a portion, since statistics of fewer are poor
_BUFFER = "buffer/"


class EvenPace(MicroBatchPace):
    """Even portions of a batch, the same on every machine, since the result depends on them."""

    def __init__(self, batch: int, flops_per_sample: float) -> None:
        super().__init__(batch, flops_per_sample, "cuda")
        quick = max(_PORTION_MIN, int(_PORTION_FLOPS / max(1.0, flops_per_sample)))
        self.micro = -(-batch // -(-batch // quick))
        self.frugal = False  # True: the backward pass's tensors stay on the host

    @override
    def record(self, samples: int, seconds: float, kept_bytes: int = 0) -> None:
        """Keep the size."""

    @override
    def set(self, micro: int) -> None:
        """Keep the size."""

    @override
    def begin_with(self, micro: int, *, most: bool, room: int) -> None:
        self.frugal = most

    @override
    def halve(self) -> int:
        if self.frugal:
            raise MemoryError(
                f"{self.micro} samples at once do not fit into the memory of this device, and"
                " smaller portions would change the result"
            )
        self.frugal = True
        return self.micro


class DerivedWork(StepWork):
    """Training of an author's model; see `StepWork`."""

    def __init__(
        self, place: CodePlace, job: Job, weights: Weights, data: Data, device: str
    ) -> None:
        counts = sample_counts(place.data, job.config, data.manifest)
        order = PassOrder(counts, job.order_seed)
        rows = task_samples(order, job.start, job.stop, job.steps, job.batch_size)
        self._built = BuiltModel(place.code, job.config, weights=weights, device=device)
        self._batches = SampleBatches(self._built, place.data, job.config, data, rows)
        derived = derived_of(job.config)
        self._names = [name for name, _, _ in derived.tensors]
        super().__init__(
            job, self._built.model, device=device, samples=len(rows), flops=derived.flops
        )
        self._even: EvenPace | None = None
        if not derived.additive:
            self._pace = self._even = EvenPace(min(job.batch_size, len(rows)), derived.flops)
        self._plain = False  # True: attention without the fused operator
        self._before = self._buffers()

    @override
    def spread(self, ranks: Ranks, begin: Begin) -> None:
        """Compute each step with further ranks, unless its result depends on the division."""
        if self._even is None and not self._before:
            super().spread(ranks, begin)

    @override
    def measure(self, start: int, stop: int) -> StepLoss:
        batch = self._batches.read(start, stop, self.device)
        if not self._plain:
            try:
                return StepLoss(self._loss(batch, start, stop))
            except AttentionDropout:
                self._plain = True
                self._restore_buffers(self._before)
        return StepLoss(self._loss(batch, start, stop))

    def _loss(self, batch: object, start: int, stop: int) -> Tensor:
        step, first = divmod(start, self.job.batch_size)
        with ExitStack() as stack:
            stack.enter_context(SeededDraws(SampleDraws(self.job.seed, step, first, stop - start)))
            if self._even is not None and self._even.frugal:
                stack.enter_context(save_on_cpu())
            if self._plain:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            return self._built.loss(batch)

    @override
    def result(self) -> tuple[Result, dict[str, Tensor]]:
        report, tensors = super().result()
        tensors |= {name: to_host(value) for name, value in self._built.buffers().items()}
        return report, {name: tensors[name] for name in self._names}

    @override
    def snapshot(self) -> dict[str, Tensor]:
        buffers = {f"{_BUFFER}{name}": to_host(value) for name, value in self._before.items()}
        return super().snapshot() | buffers

    @override
    def restore(self, snapshot: Weights) -> None:
        buffers = {
            name: snapshot[f"{_BUFFER}{name}"]
            for name in self._before
            if f"{_BUFFER}{name}" in snapshot
        }
        super().restore(snapshot)
        if buffers.keys() != self._before.keys():
            raise InvalidRunFile("this snapshot belongs to another task: start the task afresh")
        self._restore_buffers(buffers)
        self._before = self._buffers()

    def _buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers, as they are before a step."""
        return {name: value.detach().clone() for name, value in self._built.buffers().items()}

    @torch.no_grad()
    def _restore_buffers(self, values: Mapping[str, Tensor]) -> None:
        for name, value in self._built.buffers().items():
            value.copy_(values[name])

    @override
    def _spare(self) -> bool:
        return False  # a second forward pass would draw other random numbers

    @override
    def _finish_step(self, size: int) -> None:
        super()._finish_step(size)
        self._before = self._buffers()

    @override
    def _start_over(self) -> None:
        super()._start_over()
        self._restore_buffers(self._before)

    @override
    def _move(self, device: str) -> None:
        super()._move(device)
        self._before = {name: value.to(device) for name, value in self._before.items()}
