"""Measurement of the drift of runs' tasks, which bounds the steps of a task.

A run is measured when it starts, and again each time its version number has doubled. Two tasks are
trained side by side, from the newest version and from a base that is slightly off; their updates
are compared after 1, 2, 4, ... steps, until they are too far apart or the budget of a recompute is
spent.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from coordinator.checking.case import Case
from coordinator.checking.redo import Workbench, twins
from coordinator.compute import Compute, Stop
from coordinator.database import runs
from coordinator.platform import Platform, PlatformService
from coordinator.rules.checks import RECOMPUTE_FLOPS_MAX, precision_of
from coordinator.rules.drift import DRIFT_SOUGHT, DriftPoint, is_due, provable_steps
from coordinator.rules.likeness import NUDGES
from coordinator.rules.run_file import SIZED_STEPS
from coordinator.rules.sizing import steps_that_learn
from coordinator.runs.definition import definition
from shared.errors import VolunteerError
from shared.workloads.data.local_data import LocalData

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.runs import RunRow

POLL_S = 10.0
STEPS_MEASURED = 512  # most steps of a measurement

log = structlog.get_logger("checks")


class Drifts(PlatformService):
    """Measures the drift of the runs of one server."""

    def __init__(self, on: Platform, compute: Compute) -> None:
        super().__init__(on)
        self._compute = compute

    async def run(self, stop: asyncio.Event) -> None:
        """Measure runs as they become due, until `stop` is set."""
        watch = self._signals.watch("runs")
        while not stop.is_set():
            for run in await self._db.read(_due):
                if not stop.is_set():
                    await self.measure(run)
            await watch.wait(POLL_S)

    async def measure(self, run: RunRow) -> int | None:
        """Measure a run and bound the steps of its tasks; return the bound, or None where the run
        has no task to measure yet.
        """
        planned = longest(run)
        case = await self._db.read(lambda conn: Case.typical(conn, run, planned))
        if case is None:
            return None
        try:
            weights, data = await self._blobs.local(case.base_sha256), await case.data(self._blobs)
            points, _ = await self._compute.timed(measure_drift, case, weights, data)
        except (VolunteerError, OSError) as error:
            if self._compute.stopping:
                return None
            log.warning("drift not measured", run=run.name, reason=str(error))
            values = {"drift_version": run.head}
            await self._db.write(lambda conn: runs.set_values(conn, run.id, **values))
            return None
        most = provable_steps(points, planned)
        values = {"drift_version": run.head, "steps_provable": most if most < planned else 0}
        await self._db.write(lambda conn: runs.set_values(conn, run.id, **values))
        log.info("drift", run=run.name, version=run.head, steps=most, planned=planned)
        self._signals.notify("runs")
        return most


def longest(run: RunRow) -> int:
    """Return the steps of a run's longest task without a bound."""
    about = definition(run)
    task = about.file.task
    if task.target_seconds > 0:
        return task.max_steps
    return task.local_steps or max(SIZED_STEPS, steps_that_learn(run.parameters))


def _due(conn: Connection) -> list[RunRow]:
    """Return the running runs to measure. Gradients do not drift: all are taken at one base."""
    running = (run for run in runs.every(conn, ("running",)) if run.head >= 0)
    runs_due = [run for run in running if is_due(run.head, run.drift_version)]
    return [run for run in runs_due if definition(run).plan.update == "delta"]


def measure_drift(stop: Stop, case: Case, weights: Path, data: LocalData) -> tuple[DriftPoint, ...]:
    """Return the drift of a task after 1, 2, 4, ... steps, until it exceeds `DRIFT_SOUGHT`."""
    about, size = definition(case.run), NUDGES[precision_of(case.job.train.precision, "cpu")]
    step_flops = about.workload.flops_per_sample(about.file.model) * case.job.batch_size
    most = min(STEPS_MEASURED, max(1, int(RECOMPUTE_FLOPS_MAX / max(1.0, 2 * step_flops))))
    points: list[DriftPoint] = []
    for steps, drift in twins(Workbench(stop=stop), case, weights, data, size):
        points.append(DriftPoint(steps=steps, drift=drift))
        if drift > DRIFT_SOUGHT or 2 * steps > most:
            break
    return tuple(points)
