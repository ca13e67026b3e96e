"""Lease times: the seconds from the claim of a lease to its `finish_by`, which no renewal moves.
Pure rules.

A lease lasts three times as long as the task is expected to take, by other workers' times or the
worker's benchmark, and at least the run file's floor. A task of unknown duration gets ten times the
floor.
"""

from __future__ import annotations

from coordinator.rules.task_size import OPTIMISM, Run, estimate_s, work_of
from shared.units import DAY_S

LEASE_MAX_S = DAY_S
UNKNOWN_FACTOR = 10  # a task of unknown duration gets this many times `lease_floor_seconds`
LATE_FACTOR = 3.0  # a lease ends after this many times the expected time


def task_s(run: Run, price: int, flops: float) -> float:
    """Return the seconds that a task of this price takes at this speed; 0 = unknown."""
    return OPTIMISM * work_of(run, price) / flops if flops > 0 and run.step_flops > 0 else 0.0


def finish_in_s(run: Run, steps: int, flops: float) -> float:
    """Return the seconds until a task of the pass must be submitted."""
    expected = estimate_s(run, steps, flops)
    floor = run.settings.lease_floor_seconds
    if expected is None:
        return min(
            LEASE_MAX_S, max(UNKNOWN_FACTOR * floor, LATE_FACTOR * run.settings.target_seconds)
        )
    return min(LEASE_MAX_S, max(floor, LATE_FACTOR * expected))


def finish_beside_in_s(run: Run, price: int, flops: float) -> float:
    """Return the seconds until a task outside the pass must be submitted."""
    floor = run.settings.lease_floor_seconds
    if flops <= 0 or run.step_flops <= 0:
        return min(LEASE_MAX_S, UNKNOWN_FACTOR * floor)
    return min(LEASE_MAX_S, max(floor, LATE_FACTOR * task_s(run, price, flops)))
