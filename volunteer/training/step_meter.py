"""Meter of a task's first steps on its training thread, from the trainer's timings."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import msgspec

from shared.workloads.base import Progress, Work
from shared.workloads.training.micro_batch import Paced
from volunteer.machine.device_memory import PeakMemory, synchronize

STEPS = 3  # the first one warms up and counts only if it is the only one
LONG_S = 20.0  # the measurement also ends after a step when it has taken this long


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the first steps."""

    step_s: float
    steps: int
    peak_bytes: int  # 0: not known
    micro_batch: int  # 0: the work has no micro-batches
    halved: bool


class StepMeter:
    """Measures one task from its beginning; `tell` is called at most once, on the training thread.

    A task resumed from a snapshot is not measured.
    """

    def __init__(self, device: str, tell: Callable[[StepFigures], None]) -> None:
        self._device = device
        self._tell = tell
        self._memory: PeakMemory | None = None
        self._times: list[float] = []
        self._spent_s = 0.0  # seconds of the running step
        self._step = 0
        self._halved = False
        self._over = False

    def begin(self) -> None:
        """Start the memory measurement, before the work is made."""
        self._memory = PeakMemory(self._device)

    def close(self) -> None:
        self._over = True
        if self._memory is not None:
            self._memory.close()

    def most(self) -> int:
        """Return the task's peak memory so far; 0: not known."""
        return self._memory.most() if self._memory is not None else 0

    def halved(self) -> None:
        """Restart the timing of a step that out-of-memory repeats in smaller pieces."""
        self._halved = True
        self.started_over()

    def started_over(self) -> None:
        """Restart the timing of the step."""
        self._spent_s = 0.0

    def advanced(self, work: Work, progress: Progress, spent_s: float) -> None:
        """Record a micro-batch and its seconds."""
        if self._over:
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
        measured = StepFigures(
            step_s=step_s,
            steps=len(self._times),
            peak_bytes=self.most(),
            micro_batch=work.micro_batch if isinstance(work, Paced) else 0,
            halved=self._halved,
        )
        self._tell(measured)
