"""Drifts of tasks, each measured once in a process.

Tests start the same few runs again and again, and a quarter of the CPU time of a start went into
training the same two tasks. A drift follows from the task, its base and its data alone.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from coordinator.checking import drifts
from coordinator.checking.case import Case
from coordinator.checking.drifts import measure_drift
from coordinator.compute import Stop
from coordinator.rules.provable_length import DriftPoint
from shared.workloads.data.local_data import LocalData

_POINTS: dict[bytes, tuple[DriftPoint, ...]] = {}


def measure_drift_once(
    stop: Stop, case: Case, weights: Path, data: LocalData, most: int
) -> tuple[DriftPoint, ...]:
    """Return the drift of a task, as `measure_drift` does; only a new task is trained."""
    task = (case.job, case.base_sha256, case.manifest, case.chunks, most)
    key = msgspec.json.encode(task)
    if key not in _POINTS:
        _POINTS[key] = measure_drift(stop, case, weights, data, most)
    return _POINTS[key]


def measure_once() -> None:
    """Let the coordinators of this process measure each task once."""
    vars(drifts)[measure_drift.__name__] = measure_drift_once
