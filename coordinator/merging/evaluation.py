"""Evaluation of versions on held-out data after the merge, one at a time: version 0 first, then the
newest that waits; it chooses a run's `best` version.

The measurement runs in a process or thread of `Compute`. Version 0 is always measured, so that
every run has a first loss.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import structlog

from coordinator.compute import Compute, Stop
from coordinator.database import datasets, evaluations, runs, versions
from coordinator.database.evaluations import EvaluationRow, SuiteScoreRow
from coordinator.database.runs import RunRow
from coordinator.database.versions import VersionRow
from coordinator.merging.lease_keeper import LeaseKeeper
from coordinator.merging.suites import SuiteFile, SuiteOutcome, due, measure_suites
from coordinator.platform import Platform, PlatformService
from coordinator.runs.datasets import heldout
from coordinator.runs.definition import definition
from coordinator.runs.version_files import read_weights
from coordinator.traffic import SLOW_S, Durations
from shared.errors import StorageFull, Unavailable, VolunteerError
from shared.workloads.base import Sample
from shared.workloads.data.local_data import LocalData

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Connection


POLL_S = 5.0
TRIES_MAX = 12  # tries of one evaluation while a store, a disk or a process fails: for an hour
PAUSE_MAX_S = 600.0  # longest pause between two of them; the first lasts 2 x POLL_S
TEXT_MAX = 4000  # characters of a sample kept in the database

log = structlog.get_logger("evaluation")


class EvaluatedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics and sample of one evaluated version."""

    metrics: dict[str, float]
    sample: Sample


def measure(
    stop: Stop, run: RunRow, path: Path, data: LocalData | None, sample: bool
) -> EvaluatedVersion | None:
    """Measure a weights file on held-out data; None when stopped before the end."""
    about = definition(run)
    weights = read_weights(path, about)
    file, workload = about.file, about.workload
    metrics = workload.evaluate(file.model, weights, data, file.evaluation.budget_seconds, stop)
    if stop():
        return None
    sample_shown = Sample(kind="text", title="")
    if sample:
        sample_shown = workload.sample(file.model, weights, data, file.evaluation.prompt, file.seed)
    return EvaluatedVersion(metrics=metrics, sample=sample_shown)


class Evaluation(PlatformService):
    """Measures versions in the background."""

    def __init__(self, on: Platform, compute: Compute) -> None:
        super().__init__(on)
        self._compute = compute
        self._leases = LeaseKeeper(on)
        self.durations = Durations(SLOW_S)
        self.outcomes: Counter[tuple[str, str]] = Counter()  # run, "done" or "failed"
        # run and version of the measurements that `_unscored` has chosen since the start
        self._tried: set[tuple[int, int]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Evaluate waiting versions until `stop` is set."""
        watch = self._signals.watch("versions")
        if self._db.dialect == "sqlite":  # one server: any lease is left from a dead process
            now = self._clock.now()
            await self._db.write(lambda conn: evaluations.JOBS.release_all(conn, now))
        stopper = asyncio.ensure_future(stop.wait())
        stopper.add_done_callback(lambda _: self._compute.close())
        try:
            while not stop.is_set():
                if not await self.evaluate_next():
                    await watch.wait(POLL_S)
        finally:
            stopper.cancel()

    async def evaluate_next(self) -> bool:
        """Measure the next waiting version, or else a version without its suite scores; return
        False if no version is left to measure.
        """
        # Look without a write transaction first, since every new version calls this.
        waits, unscored = await self._db.read(self._look)
        if not waits:
            if unscored is not None:
                await self._try_suites(*unscored)
            return unscored is not None
        row = await self._db.write(self._take)
        if row is None:
            return False
        async with self._leases.renewing(evaluations.JOBS, row):
            await self._evaluate(row)
        return True

    def _take(self, conn: Connection) -> EvaluationRow | None:
        now, leases = self._clock.now(), self._leases
        return evaluations.take(conn, leases.owner, now, leases.lease_s)

    async def _evaluate(self, row: EvaluationRow) -> None:
        """Measure a leased version and its due suites."""
        run = await self._db.read(lambda conn: runs.by_id(conn, row.run_id))
        version = await self._db.read(lambda conn: versions.get(conn, row.run_id, row.version))
        try:
            with self.durations.timed():
                measured = await self._measure(run, version)
            is_stored = measured is not None and await self._store(run, row, measured)
        except (VolunteerError, OSError, RuntimeError, ValueError) as error:
            await self._put_off(run, row, error)
            return
        if measured is None:  # the server stops: another process may measure the version
            await self._db.write(partial(evaluations.JOBS.release, job=row))
        if is_stored:
            self.outcomes[run.name, "done"] += 1
            await self._try_suites(run, version)

    async def _put_off(self, run: RunRow, row: EvaluationRow, error: Exception) -> None:
        """Try again later where a store, a disk or a process failed; else, or after TRIES_MAX
        tries, the evaluation has failed.
        """
        message, now = str(error)[:2000], self._clock.now()
        facts = {"run": run.name, "version": row.version, "error": str(error)}
        if isinstance(error, (Unavailable, StorageFull, OSError)) and row.attempt < TRIES_MAX:
            log.warning("evaluation put off", **facts)
            after = now + min(PAUSE_MAX_S, POLL_S * 2.0**row.attempt)
            release = partial(evaluations.JOBS.release, job=row, after=after, message=message)
            await self._db.write(release)
            return
        self.outcomes[run.name, "failed"] += 1
        log.warning("evaluation failed", **facts)
        values = {"state": "failed", "message": message, "at": now}
        await self._db.write(lambda conn: evaluations.JOBS.change(conn, row, **values))

    async def _measure(self, run: RunRow, version: VersionRow) -> EvaluatedVersion | None:
        interval = max(1, definition(run).file.evaluation.sample_every)
        path = await self._blobs.local(version.published_sha256)
        return await self.measure(run, path, sample=version.version % interval == 0)

    async def measure(self, run: RunRow, path: Path, *, sample: bool) -> EvaluatedVersion | None:
        """Return the metrics and sample of a weights file on the held-out data; None if the server
        stops.
        """
        data = await self._heldout(run)
        try:
            return await self._compute.run(measure, run, path, data, sample)
        except Unavailable:
            if self._compute.stopping:
                return None
            raise

    async def _heldout(self, run: RunRow) -> LocalData | None:
        if run.dataset_id is None:
            return None
        dataset_id = run.dataset_id
        row = await self._db.read(lambda conn: datasets.by_id(conn, dataset_id))
        about = definition(run)
        return await heldout(row.manifest, self._blobs, about.workload.files(about.file.model))

    async def _try_suites(self, run: RunRow, version: VersionRow) -> None:
        """Measure a version on the due suites. If they fail, the version keeps its loss."""
        now = await self._db.read(lambda conn: runs.by_id(conn, run.id))
        suites = await self._db.read(lambda conn: due(conn, now, version.version))
        if not suites:
            return
        try:
            outcome = await self._suites(now, version, suites)
        except (VolunteerError, OSError, RuntimeError, ValueError) as error:
            if self._compute.stopping:
                return
            outcome = SuiteOutcome(scores={}, failures={suite.name: str(error) for suite in suites})
        rows = [
            SuiteScoreRow(name, version.version, score.correct, score.examples, score.cut)
            for name, score in outcome.scores.items()
        ]
        failed = "; ".join(f"suite {name}: {why}" for name, why in outcome.failures.items())

        def write(conn: Connection) -> None:
            evaluations.put_scores(conn, run.id, rows, self._clock.now())
            if failed:
                values = {"message": failed[:2000]}
                evaluations.set_evaluation(conn, run.id, version.version, **values)

        await self._db.write(write)
        if failed:
            log.warning("suites failed", run=run.name, version=version.version, error=failed[:2000])
        self._signals.notify(f"run:{run.id}")

    def _look(self, conn: Connection) -> tuple[bool, tuple[RunRow, VersionRow] | None]:
        """Return True if a version waits for its evaluation; otherwise False, and a version that
        waits for suites, or None.
        """
        if evaluations.waits(conn, self._clock.now()):
            return True, None
        return False, self._unscored(conn)

    def _unscored(self, conn: Connection) -> tuple[RunRow, VersionRow] | None:
        """Return a version that lacks its suite scores, version 0 or the last of an ended run; None
        if no version lacks them.
        """
        for run in runs.every(conn, (*runs.OPEN, "completed")):
            if run.head < 0 or not definition(run).file.evaluation.suites:
                continue
            number = 0 if evaluations.last_version(conn, run.id) is None else run.head
            if (run.id, number) in self._tried or (number and run.state != "completed"):
                continue
            self._tried.add((run.id, number))  # tried once after each start of the server
            has_files = not evaluations.evaluation(conn, run.id, number).pruned
            if has_files and due(conn, run, number):
                return run, versions.get(conn, run.id, number)
        return None

    async def _suites(
        self, run: RunRow, version: VersionRow, suites: tuple[SuiteFile, ...]
    ) -> SuiteOutcome:
        data = await self._heldout(run)
        weights = await self._blobs.local(version.published_sha256)
        here = tuple(
            [SuiteFile(name=s.name, file=str(await self._blobs.local(s.file))) for s in suites]
        )
        return await self._compute.run(measure_suites, run, weights, data, here)

    async def _store(self, run: RunRow, row: EvaluationRow, measured: EvaluatedVersion) -> bool:
        """Store a measurement; return False if another process measures the version now."""
        sample_sha = (
            await self._blobs.put_bytes(measured.sample.data) if measured.sample.data else None
        )
        loss = measured.metrics.get("loss", math.nan)
        about = definition(run)

        def write(conn: Connection) -> bool:
            now = self._clock.now()
            newest = runs.by_id(conn, run.id, lock=True)  # a match may have chosen a version since
            finite = {
                name: value for name, value in measured.metrics.items() if math.isfinite(value)
            }
            is_current = evaluations.JOBS.change(
                conn,
                row,
                state="done",
                loss=loss if math.isfinite(loss) else None,
                metrics=msgspec.json.encode(finite).decode(),
                message="",
                # an untrained model may generate NUL, which PostgreSQL cannot store
                sample=measured.sample.text[:TEXT_MAX].replace("\0", "\N{REPLACEMENT CHARACTER}"),
                sample_sha256=sample_sha,
                at=now,
            )
            if not is_current:
                return False
            if sample_sha:
                blob = (sample_sha, len(measured.sample.data), "sample")
                datasets.register(conn, [blob], now, self._blobs.serials)
            best = None if about.members_choose else evaluations.best(conn, run.id)
            if about.matches_choose:  # matches choose the best later; until then it is 0
                best = 0 if newest.best is None else None
            if best is not None:
                runs.set_values(conn, run.id, best=best)
            return True

        if not await self._db.write(write):
            log.info("evaluation taken over", run=run.name, version=row.version)
            return False
        log.info("evaluated", run=run.name, version=row.version, loss=round(loss, 4))
        self._signals.notify(f"run:{run.id}")
        return True
