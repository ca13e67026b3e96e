"""Overview for the organiser, read so rarely that watching costs almost nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from coordinator.database.monitoring import census, overview_rows, replicas
from coordinator.rules import health
from coordinator.rules.overview import (
    Census,
    Flow,
    Gauges,
    Overview,
    WholeFigures,
)
from coordinator.runs.standstills import Standstills
from coordinator.ttl_cache import CachedValue
from coordinator.upkeep.alerts import standing
from shared.clock import Clock, machine_time
from shared.protocol.base import Standstill

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database

OVERVIEW_S = 0.9  # a screen that asks once a second gets a new overview each time
CENSUS_S = 5.0
# A part is read again only after this many times the duration of its last read. On an idle machine
# this wait is shorter than the intervals above: an overview takes 1 ms, a census of 10,000 workers
# 17 ms (2 cores, SQLite).
OVERVIEW_REST, CENSUS_REST = 5.0, 20.0


class Overviews:
    """Reads the overview; requests within a moment share one read."""

    def __init__(self, db: Database, clock: Clock, server: str, standstills: Standstills) -> None:
        self._db = db
        self._standstills = standstills
        self._clock = clock
        self._server = server
        self._census = CachedValue(self._count, CENSUS_S, clock, rest=CENSUS_REST)
        self._overview = CachedValue(self._look, OVERVIEW_S, clock, rest=OVERVIEW_REST)
        self._gauges = CachedValue(self._gauge, OVERVIEW_S, clock, rest=CENSUS_REST)

    async def get(self) -> Overview:
        """Return the newest overview, at most a moment old."""
        return await self._overview.get()

    async def gauges(self) -> Gauges:
        """Return the newest figures for the metrics; past work is not read for them."""
        return await self._gauges.get()

    async def forget_silent(self) -> None:
        """Delete the rows of serving processes that sent no beat for a while."""
        before = self._clock.now() - health.SILENT_S
        await self._db.write(lambda conn: replicas.forget(conn, before))

    async def _gauge(self) -> Gauges:
        now = self._clock.now()
        standstills = self._standstills
        return await self._db.read(lambda conn: _gauges(conn, now, standstills.read(conn)))

    async def _count(self) -> Census:
        now = self._clock.now()
        return await self._db.read(lambda conn: census.census(conn, now))

    async def _look(self) -> Overview:
        counted, now = await self._census.get(), self._clock.now()
        return await self._db.read(partial(self._read, counted=counted, now=now))

    def _read(self, conn: Connection, counted: Census, now: float) -> Overview:
        answers = self._standstills.read(conn)
        open_runs, tasks = overview_rows.listing(conn, now)
        whole = {name: getattr(counted, name) for name in WholeFigures.__struct_fields__}
        whole["at"] = now
        whole["database"] = msgspec.structs.replace(
            counted.database, failed=self._db.failed, ahead_s=now - machine_time(self._clock)
        )
        overview = Overview(
            **whole,
            server=self._server,
            runs=tuple(
                msgspec.structs.replace(
                    row.line,
                    standstill=answers.get(row.line.name),
                    pushed=counted.pushed.get(row.id, Flow()),
                    pulled=counted.pulled.get(row.id, Flow()),
                )
                for row in open_runs
            ),
            runs_total=overview_rows.runs_total(conn),
            tasks=tasks,
            failed=census.failed_tasks(conn)
            if any(open_run.line.failed for open_run in open_runs)
            else (),
            queues=overview_rows.queues(conn, now),
            merges=overview_rows.newest_merges(conn, counted.staleness, now),
            replicas=replicas.listing(conn),
        )
        verdict, troubles = health.judge(overview, standing(conn))
        return msgspec.structs.replace(overview, verdict=verdict, troubles=troubles)


def _gauges(conn: Connection, now: float, answers: Mapping[str, Standstill]) -> Gauges:
    open_runs, _ = overview_rows.listing(conn, now)
    return Gauges(
        **msgspec.structs.asdict(census.figures(conn, now)),
        runs=tuple(
            msgspec.structs.replace(row.line, standstill=answers.get(row.line.name))
            for row in open_runs
        ),
        queues=overview_rows.queues(conn, now),
    )
