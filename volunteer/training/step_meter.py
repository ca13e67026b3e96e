"""Meter of a task's first optimiser steps: their time, from the trainer's timings, and memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import msgspec

from shared.workloads.base import Progress, Work
from shared.workloads.training.micro_batch import Paced
from volunteer.machine.device_memory import PeakMemory, synchronize

STEPS = 3  # steps measured; the first warms up and counts only if no other follows
LONG_S = 20.0  # the measurement also ends after a step when it has taken this long


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the first steps."""

    step_s: float
    steps: int
    peak_bytes: int  # 0: not known
    micro_batch: int  # 0: the work has no micro-batches
    halved: bool


class StepMeter:
    """Measures one task from its beginning, and calls `on_figures` at most once, on the training
    thread. A task resumed from a snapshot is not measured.
    """

    def __init__(self, device: str, on_figures: Callable[[StepFigures], None]) -> None:
        self._device = device
        self._on_figures = on_figures
        self._memory: PeakMemory | None = None
        self._times: list[float] = []
        self._spent_s = 0.0  # seconds of the running step
        self._step = 0
        self._halved = False
        self._closed = False

    def begin(self) -> None:
        """Start the memory measurement, before the work is made."""
        self._memory = PeakMemory(self._device)

    def close(self) -> None:
        self._closed = True
        if self._memory is not None:
            self._memory.close()

    def peak_bytes(self) -> int:
        """Return the task's peak memory so far; 0: not known."""
        return self._memory.peak_bytes() if self._memory is not None else 0

    def record_halving(self) -> None:
        """Restart the timing of a step that is repeated in smaller pieces, for lack of memory."""
        self._halved = True
        self.restart_step()

    def restart_step(self) -> None:
        """Restart the timing of the step."""
        self._spent_s = 0.0

    def record(self, work: Work, progress: Progress, spent_s: float) -> None:
        """Record the seconds of a micro-batch; after the last step to measure, report."""
        if self._closed:
            return
        if progress.step > self._step + 1:  # the task was resumed
            self.close()
            return
        self._spent_s += spent_s
        if progress.step == self._step:
            return
        self._step = progress.step
        self._spent_s += synchronize(self._device)
        self._times.append(self._spent_s)
        self._spent_s = 0.0
        if work.done or len(self._times) == STEPS or sum(self._times) >= LONG_S:
            self._end(work)

    def _end(self, work: Work) -> None:
        self.close()
        step_s = statistics.median(self._times[1:] or self._times)
        if step_s <= 0:
            return
        figures = StepFigures(
            step_s=step_s,
            steps=len(self._times),
            peak_bytes=self.peak_bytes(),
            micro_batch=work.micro_batch if isinstance(work, Paced) else 0,
            halved=self._halved,
        )
        self._on_figures(figures)
