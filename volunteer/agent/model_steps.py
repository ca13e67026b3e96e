"""Measured optimiser steps of the runs' own models: their time and memory in the first task on each
device, stored until the model, the device or the software changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shared.clock import Clock
from shared.workloads.base import Job
from volunteer.account.profile_directory import Home
from volunteer.control import events
from volunteer.control.event_bus import EventBus
from volunteer.control.model_step import ModelStep, key_of, newest
from volunteer.machine.devices import default_threads, hardware
from volunteer.settings.settings import Settings
from volunteer.training.step_meter import StepFigures, StepMeter

LEARNS = ("train", "learn")  # kinds of tasks with optimiser steps


@dataclass(eq=False, kw_only=True)
class ModelSteps:
    """Stores and announces the measured steps, and makes the meters of tasks."""

    home: Home
    bus: EventBus
    clock: Clock
    settings: Settings
    _torch: str = field(default_factory=lambda: hardware().torch, init=False)
    _threads: int = field(default_factory=default_threads, init=False)

    def announce(self) -> None:
        """Announce the steps that earlier starts measured."""
        for step in newest(self.home.memory.steps, self.clock.now()):
            self.bus.emit(events.StepMeasured(step=step, known=True))

    def recent_step(self, job: Job, version: int, device: str) -> ModelStep | None:
        """Return the measured step of this model's job on a device; None without a recent step."""
        key = self._key(job, version, device)
        steps = newest(self.home.memory.steps, self.clock.now())
        return next((step for step in steps if step.key == key and step.run == job.run), None)

    def meter(
        self,
        job: Job,
        version: int,
        device: str,
        call_on_loop: Callable[[Callable[[], None]], None],
    ) -> StepMeter | None:
        """Return a meter for a task; None if the task has no optimiser steps, or a recent
        measurement of them is stored. `call_on_loop` runs a call on the event loop.
        """
        if job.kind not in LEARNS or self.recent_step(job, version, device) is not None:
            return None
        key = self._key(job, version, device)

        def store_figures(figures: StepFigures) -> None:
            call_on_loop(lambda: self.keep(step_of(figures, job, device, key, self.clock.now())))

        return StepMeter(device, store_figures)

    def keep(self, step: ModelStep) -> None:
        """Store a step and announce it."""
        self.home.remember(steps=newest((*self.home.memory.steps, step), self.clock.now()))
        self.bus.emit(events.StepMeasured(step=step))

    def _key(self, job: Job, version: int, device: str) -> str:
        threads = self.settings.threads or self._threads
        on = (device, str(threads if device == "cpu" else 0), str(self.settings.memory_gb))
        return key_of(job, version, (*on, self._torch))


def step_of(figures: StepFigures, job: Job, device: str, key: str, now: float) -> ModelStep:
    """Return a measured step with its run and device."""
    return ModelStep(
        step_s=figures.step_s,
        steps=figures.steps,
        peak_bytes=figures.peak_bytes,
        micro_batch=figures.micro_batch,
        halved=figures.halved,
        run=job.run,
        device=device,
        key=key,
        batch_size=job.batch_size,
        at=now,
    )
