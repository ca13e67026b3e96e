"""Copy of a version that is trained further on own data, for its owner alone.

Each pass over the data is computed like a task of the run, with the same optimiser, batch and
learning rate; it begins from the weights of the previous pass. Nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shared.errors import Unavailable, VolunteerError
from shared.protocol.members import MembersData
from shared.protocol.versions import VersionManifest
from shared.tensors.frame import torch_tensors
from shared.workloads.base import Job, Weights, Work, Workload
from shared.workloads.data.local_data import LocalData
from volunteer.training.job import Finished, TaskSeconds, TrainingJob, TrainingReport
from volunteer.training.local_task import checked_schema, refuse_diverged
from volunteer.training.trainer import Trainer

MEASURE_S = 60.0  # longest measurement on the held-out part of the data

OnSteps = Callable[[int, int], None]  # finished steps, steps in all


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySource:
    """Version, and the own data that its copy learns from."""

    manifest: VersionManifest
    workload: Workload
    weights: Path
    form: MembersData
    data: LocalData
    samples: int  # samples of a pass
    device: str = "cpu"

    @property
    def steps(self) -> int:
        """Return the steps of a pass."""
        return math.ceil(self.samples / self.form.batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCopy:
    """Trained copy, and the losses on the held-out part before and after training."""

    weights: Weights
    steps: int = 0
    before: float | None = None  # None: the part is too small to measure, or nothing was trained
    after: float | None = None


def read_weights(source: CopySource) -> Weights:
    """Return the weights of the version, unchanged. Raises NotFound, InvalidFrame."""
    manifest = source.manifest
    schema = checked_schema(manifest, source.workload, manifest.config)
    return torch_tensors(source.weights, schema)


def train_copy(trainer: Trainer, source: CopySource, passes: int, on_steps: OnSteps) -> OwnCopy:
    """Train a copy for some passes over the data. Raises OutOfMemory, InvalidFrame and the errors
    of the workload.
    """
    weights = trainer.call(lambda: read_weights(source)).result()
    before = trainer.call(partial(_loss, source, weights)).result()
    steps = source.steps
    for number in range(passes):

        def on_step(step: int, first: int = number * steps) -> None:
            on_steps(first + step, passes * steps)

        weights = _train_pass(trainer, _job(source, number, steps), source, weights, on_step)
    after = trainer.call(partial(_loss, source, weights)).result()
    return OwnCopy(weights=weights, steps=passes * steps, before=before, after=after)


def _job(source: CopySource, number: int, steps: int) -> Job:
    """Return a pass over the data as a task of the run."""
    manifest = source.manifest
    job = Job(
        run=manifest.run,
        workload=manifest.workload,
        kind="train",
        update="delta",
        config=dict(manifest.config),
        train=source.form.train,
        order_seed=number,
        start=0,
        stop=source.samples,
        seed=number,
        steps=steps,
        batch_size=source.form.batch_size,
        global_step=manifest.global_step,
        total_steps=0,
    )
    return manifest.bound(job)


def _train_pass(
    trainer: Trainer, job: Job, source: CopySource, weights: Weights, on_step: Callable[[int], None]
) -> Weights:
    """Return the weights after a pass."""

    def begin() -> Work:
        return source.workload.begin(job, weights, source.data, source.device)

    def finish(work: Work, spent: TaskSeconds) -> Weights:
        _, tensors = work.result()
        refuse_diverged(tensors)
        return tensors

    def report(now: TrainingReport) -> None:
        on_step(now.step)

    outcome = trainer.submit(
        TrainingJob(
            device=source.device,
            begin=begin,
            finish=finish,
            samples=source.samples,
            report=report,
            halved=lambda micro: None,
        )
    ).future.result()
    if not isinstance(outcome, Finished):
        raise Unavailable(outcome.reason)
    return outcome.value


def _loss(source: CopySource, weights: Weights) -> float | None:
    """Return the loss on the held-out part of the data; None if the part is too small."""
    try:
        metrics = source.workload.evaluate(
            source.manifest.config, weights, source.data.heldout(), MEASURE_S, lambda: False
        )
    except VolunteerError:
        return None
    loss = metrics["loss"]
    return loss if math.isfinite(loss) else None
