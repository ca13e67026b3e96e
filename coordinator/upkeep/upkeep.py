"""Periodic maintenance: end runs, prune versions, delete orphans, clean up after crashes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from coordinator.database import (
    datasets,
    evaluations,
    experience,
    merge_jobs,
    recomputes,
    record,
    runs,
    tasks,
    unreferenced_blobs,
    upload_rows,
    versions,
    volunteers,
)
from coordinator.database.members import member_rows
from coordinator.database.unreferenced_blobs import SWEEPER_S
from coordinator.experience.replay import opponents
from coordinator.platform import Platform, PlatformService
from coordinator.runs import settlement
from coordinator.runs.definition import definition
from coordinator.runs.run_ends import why_end
from coordinator.storage.blobs import in_pool
from coordinator.upkeep.store_mark import RENEW_S
from shared.clock import machine_time
from shared.errors import VolunteerError
from shared.files.deletions import delete_file
from shared.units import DAY_S

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.intake.intake import Intake
    from coordinator.intake.uploads import Uploads
    from coordinator.upkeep.store_mark import StoreMarks

TICK_S = 5.0
SWEEP_S = 300.0  # interval of retention and of deleting orphans
# an unreferenced blob is kept for this time, since a transaction may be about to refer to it
ORPHAN_AGE_S = 3600.0
PIECES_AGE_S = 2 * DAY_S  # age from which a piece is deleted, since its upload has expired
# most blobs that one sweep deletes: SWEPT_SHARE of the registered blobs that stay, but at least
# SWEPT_MIN
SWEPT_SHARE, SWEPT_MIN = 0.1, 64

log = structlog.get_logger("upkeep")


class Upkeep(PlatformService):
    """Periodic maintenance of one server."""

    def __init__(self, on: Platform, intake: Intake, uploads: Uploads, marks: StoreMarks) -> None:
        super().__init__(on)
        self._marks = marks
        self._intake = intake
        self._uploads = uploads
        self._sweeper = secrets.token_hex(8)

    async def run(self, stop: asyncio.Event) -> None:
        """Tick until `stop` is set.

        One failing chore does not stop the others, or the next tick.
        """
        swept_at = marked_at = self._clock.monotonic()
        watch = self._signals.watch("versions")
        await self._try(self._marks.renew)
        await self._try(self._intake.recheck)
        while not stop.is_set():
            await self._try(self.end_runs)
            if self._clock.monotonic() - marked_at > RENEW_S:
                marked_at = self._clock.monotonic()
                await self._try(self._marks.renew)
            if self._clock.monotonic() - swept_at > SWEEP_S:
                swept_at = self._clock.monotonic()
                await self._try(self._intake.recheck)
                await self._try(self._uploads.expire)
                await self._try(self.prune)
                await self._try(self.sweep)
            await watch.wait(TICK_S)
        await self._try(self._marks.release)

    async def _try(self, chore: Callable[[], Awaitable[object]]) -> None:
        try:
            await chore()
        except (VolunteerError, OSError) as error:
            log.warning("chore failed", chore=chore.__qualname__, error=str(error))

    # --- the end of a run ---

    async def end_runs(self) -> int:
        """Complete the runs whose `[stop]` is reached; return their number."""
        due = await self._db.read(self._due_to_end)
        if not due:
            return 0
        ended = [await self._db.write(partial(self._end, run_id=run_id)) for run_id in due]
        for run_id in due:
            for topic in (f"run:{run_id}", "runs", "queue", "versions"):
                self._signals.notify(topic)
        return sum(ended)

    def _due_to_end(self, conn: Connection) -> list[int]:
        return [
            run.id
            for run in runs.every(conn, ("running",))
            if why_end(conn, run, self._clock.now())
        ]

    def _end(self, conn: Connection, run_id: int) -> int:
        run = runs.by_id(conn, run_id, lock=True)
        why = why_end(conn, run, self._clock.now()) if run.state == "running" else ""
        if not why:
            return 0
        now = self._clock.now()
        change = runs.StateChange(at=now, actor="coordinator", reason=why)
        runs.move(conn, run, "completed", change, ended_at=now)
        settlement.close(conn, run.id, now)
        record.append(conn, "coordinator", "run.complete", run.name, why, now)
        log.info("run completed", run=run.name, reason=why)
        return 1

    # --- files ---

    async def prune(self) -> int:
        """Mark old versions as pruned; `sweep` deletes their files."""

        def mark(conn: Connection) -> int:
            marked = 0
            for run in runs.every(conn):
                retention = definition(run).file.retention
                bases = tasks.bases_in_use(conn, run.id)
                keep = {0, run.head, *bases, *opponents(conn, run.id)}
                keep |= {run.best} if run.best is not None else set()
                newest = run.head - retention.latest + 1
                if definition(run).declaration.taught_by == "experience":
                    # episodes may use any version after a leased base
                    newest = min([newest, *bases])
                prunable = versions.prunable(conn, run.id, sorted(keep), newest, retention.every)
                for row in prunable:
                    evaluations.set_evaluation(conn, run.id, row.version, pruned=True)
                    marked += 1
            return marked

        return await self._db.write(mark)

    async def sweep(self) -> int:
        """Delete blobs to which no row of this database refers any more, or which were announced
        and never registered, once they are too old to be part of a running transaction; return
        their number.

        Nothing is deleted from a store that is not this database's alone. A sweep takes at most a
        share of the store, so that the deletions of a mistake take hours.
        """
        now = self._clock.now()
        before = now - ORPHAN_AGE_S
        await in_pool(_clear, self._blobs.scratch(), machine_time(self._clock) - ORPHAN_AGE_S)
        if not await self._marks.renew():
            return 0
        if self._blobs.staging is not None:
            await self._blobs.staging.sweep(now - PIECES_AGE_S)
        await self._db.write(lambda conn: _forget_parts(conn, before))
        await self._db.write(lambda conn: volunteers.clear_networks(conn, now))
        await self._db.write(member_rows.delete_forgotten)

        def take(conn: Connection) -> list[str]:
            used = _used(conn, now)
            most = max(SWEPT_MIN, int(unreferenced_blobs.let_go(conn, used, before) * SWEPT_SHARE))
            return unreferenced_blobs.take(conn, used, self._sweeper, (before, now), most)

        until = self._clock.monotonic() + SWEEPER_S / 2
        names, deleted = await self._db.write(take), list[str]()
        try:
            for name in names:
                if self._clock.monotonic() > until:
                    break  # soon another sweeper may take over the remaining names
                await self._blobs.delete(name, "let go")
                deleted.append(name)
        finally:
            if names:
                await self._db.write(
                    lambda conn: unreferenced_blobs.end_sweep(conn, self._sweeper, deleted)
                )
        if deleted:
            log.info("swept", blobs=len(deleted))
        return len(deleted)


def _used(conn: Connection, now: float) -> set[str]:
    """Return the blobs to which rows refer."""
    used = datasets.in_use(conn) | versions.blobs_in_use(conn) | upload_rows.blobs_in_use(conn)
    used |= experience.blobs_in_use(conn, now) | merge_jobs.blobs_in_use(conn)
    return used | recomputes.blobs_in_use(conn)


def _forget_parts(conn: Connection, before: float) -> None:
    """Delete the parts of merges whose lease ended, and the lists of pruned versions' states."""
    merge_jobs.drop_old(conn, before)
    merge_jobs.drop_states(conn, versions.blobs_in_use(conn))


def _clear(scratch: Path, before: float) -> None:
    """Delete the half-written files of killed processes, older than an instant of this machine;
    subfolders clean up by themselves.
    """
    for path in scratch.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and path.stat().st_mtime < before:
                delete_file(path, "expired")
