"""Measurement of the drift of runs' tasks, which bounds the steps of a task.

A run is measured before it starts, so that no task is handed out whose length nothing bounds, and
again each time its version number has doubled. Two tasks are trained side by side, from the newest
version and from a slightly changed copy of it; their updates are compared after 1, 2, 4, ... steps,
until they differ too much or a budget is spent. The budget before the start is small, since a
person waits for it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from coordinator.checking.case import Case
from coordinator.checking.recompute_comparison import Workbench, twins
from coordinator.compute import Compute, Stop
from coordinator.database import runs
from coordinator.platform import Platform, PlatformService
from coordinator.rules.draws import RECOMPUTE_FLOPS_MAX, precision_of
from coordinator.rules.provable_length import DRIFT_SOUGHT, DriftPoint, ProvableLength, is_due
from coordinator.rules.recompute_result import NUDGES
from coordinator.rules.task_size import steps_that_learn
from coordinator.runs.definition import definition
from shared.errors import VolunteerError
from shared.workloads.data.local_data import LocalData

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.runs import RunRow

POLL_S = 10.0
STEPS_MEASURED = 512  # most steps of a measurement
# Most steps and most operations of the measurement before a run starts. Until the next measurement,
# tasks have at most eight times the measured steps.
FIRST_STEPS, FIRST_FLOPS = 64, 1e12

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
        """Measure a run and bound the steps of its tasks; return the bound, None if the run has no
        task to measure yet.
        """
        case = await self._db.read(lambda conn: Case.typical(conn, run, longest(run)))
        if case is None:
            return None
        bound = await self._bound(case, RECOMPUTE_FLOPS_MAX, STEPS_MEASURED)
        if bound is None and self._compute.stopping:
            return None
        values: dict[str, object] = {"drift_version": run.head}
        values |= {} if bound is None else bound.columns
        await self._db.write(lambda conn: runs.set_values(conn, run.id, **values))
        self._signals.notify("runs")
        return None if bound is None else bound.steps

    async def first(self, run: RunRow, base_sha256: str) -> dict[str, object]:
        """Measure a draft from its version 0; return the columns of its bound. If a step takes too
        long to wait for, or there is no data yet, return {}: `run` measures the run later.
        """
        case = None
        if definition(run).plan.update == "delta":
            case = await self._db.read(
                lambda conn: Case.first(conn, run, base_sha256, longest(run))
            )
        if case is None or 2 * run.step_flops > FIRST_FLOPS:
            return {}
        bound = await self._bound(case, FIRST_FLOPS, FIRST_STEPS)
        return {} if bound is None else {"drift_version": 0} | bound.columns

    async def _bound(self, case: Case, flops: float, steps: int) -> ProvableLength | None:
        """Measure within a budget of operations and steps how long a task can be and be proved;
        None if that is impossible.
        """
        run, planned = case.run, longest(case.run)
        most = min(steps, max(1, int(flops / max(1.0, 2 * run.step_flops))))
        try:
            weights, data = await self._blobs.local(case.base_sha256), await case.data(self._blobs)
            points, _ = await self._compute.timed(measure_drift, case, weights, data, most)
        except (VolunteerError, OSError) as error:
            log.info("drift not measured", run=run.name, reason=str(error))
            return None
        bound = ProvableLength.of(points, planned)
        log.info("drift", run=run.name, version=run.head, steps=bound.steps, planned=planned)
        return bound


def longest(run: RunRow) -> int:
    """Return the steps that a run's longest task has while no measured drift bounds it."""
    about = definition(run)
    task = about.file.task
    if task.target_seconds > 0:
        return task.max_steps
    return task.local_steps or steps_that_learn(run.parameters)


def _due(conn: Connection) -> list[RunRow]:
    """Return the running runs to measure. Left out are runs of gradients, which are all computed at
    one base and do not drift, and runs over members' data, whose tasks nobody can repeat.
    """
    running = (run for run in runs.every(conn, ("running",)) if run.head >= 0)
    runs_due = [run for run in running if is_due(run.head, run.drift_version)]
    abouts = [(run, definition(run)) for run in runs_due]
    return [run for run, about in abouts if about.plan.update == "delta" and not about.at_members]


def measure_drift(
    stop: Stop, case: Case, weights: Path, data: LocalData, most: int
) -> tuple[DriftPoint, ...]:
    """Return the drift of a task after 1, 2, 4, ... steps: at most `most` steps, or until the drift
    exceeds `DRIFT_SOUGHT`.
    """
    size = NUDGES[precision_of(case.job.train.precision, "cpu")]
    points: list[DriftPoint] = []
    for steps, drift in twins(Workbench(stop=stop), case, weights, data, size):
        points.append(DriftPoint(steps=steps, drift=drift))
        if drift > DRIFT_SOUGHT or 2 * steps > most:
            break
    return tuple(points)
