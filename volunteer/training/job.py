"""Messages to and from a training thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from shared.workloads.base import Progress, Work
from volunteer.training.step_meter import StepMeter

T = TypeVar("T")


class TrainingReport(Progress, frozen=True, kw_only=True):
    """Training progress, with the loss of the last finished step, and rate."""

    samples_per_s: float
    steps_per_s: float
    eta_s: float | None
    train_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSeconds:
    """Seconds that a task has spent on this device."""

    train_s: float
    paused_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob(Generic[T]):
    """Task for the training thread, which calls its functions; `report` and `halved` must not
    block.
    """

    device: str  # device of the work, such as "cuda:0"
    begin: Callable[[], Work]
    finish: Callable[[Work, TaskSeconds], T]
    samples: int  # samples of the whole job
    report: Callable[[TrainingReport], None]
    halved: Callable[[int], None]
    save: Callable[[Work], None] | None = None
    save_every_s: float = 30.0
    meter: StepMeter | None = None  # measures the task's first steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Generic[T]):
    """Result of a finished task, and the seconds that it took."""

    value: T
    spent: TaskSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """Task stopped before its end, on request."""

    reason: str
