"""Measured optimiser step of a run's own model on a device: time, memory, micro-batch."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shared.proofs.signing import canonical, digest
from shared.units import DAY_S
from shared.workloads.base import Job

KEPT_MAX = 50
AGE_MAX_S = 7 * DAY_S  # age at which a step is measured again: drivers and other programs change


class ModelStep(msgspec.Struct, frozen=True, kw_only=True):
    """Measured step, and the key that tells whether it still holds."""

    run: str
    device: str
    key: str  # hash of model, batch, precision, device, threads and torch; see `key_of`
    step_s: float  # including the wait for the device
    steps: int  # number of measured steps
    peak_bytes: int  # peak of the task so far; 0: not known
    micro_batch: int  # samples; 0: the workload has no micro-batches
    batch_size: int
    halved: bool  # larger micro-batches ran out of memory
    at: float


def key_of(job: Job, workload_version: int, machine: Iterable[str]) -> str:
    """Return the hash of job, device and software, which determine a step's time and memory."""
    train = job.train
    kind = (job.workload, str(workload_version), job.update, str(job.batch_size))
    how = (train.optimizer, train.precision, str(train.prox_mu > 0))
    return digest(canonical([[*kind, *how, *machine], job.config]))


def newest(steps: Iterable[ModelStep], now: float) -> tuple[ModelStep, ...]:
    """Return the newest step of each run and device, oldest first, without outdated steps."""
    latest: dict[tuple[str, str], ModelStep] = {}
    for step in sorted(steps, key=lambda step: step.at):
        latest.pop((step.run, step.device), None)
        if now - step.at <= AGE_MAX_S:
            latest[step.run, step.device] = step
    return tuple(latest.values())[-KEPT_MAX:]
