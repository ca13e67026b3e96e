"""Overview for the organiser, read so rarely that watching costs almost nothing; and beats: this
process's regular reports to the other processes.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from coordinator.database.monitoring import census, overview_rows, replicas
from coordinator.rules import health
from coordinator.rules.overview import (
    Census,
    Flow,
    Gauges,
    Overview,
    ReplicaFigures,
    WholeFigures,
)
from coordinator.runs.standstills import Standstills
from coordinator.ttl_cache import CachedValue
from coordinator.upkeep.alerts import standing
from shared.clock import Clock, machine_time, pause
from shared.errors import VolunteerError
from shared.protocol.base import Standstill

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database

OVERVIEW_S = 0.9  # a screen that asks once a second gets a new overview each time
CENSUS_S = 5.0
# A part is read again only after this many times the duration of its last read. This never matters
# on an idle machine: an overview takes 1 ms, a census of 10,000 workers 17 ms (2 cores, SQLite).
OVERVIEW_REST, CENSUS_REST = 5.0, 20.0

log = structlog.get_logger("overview")


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


class Beats:
    """Stores the beats of this process until it stops; counts the serving processes."""

    def __init__(
        self,
        db: Database,
        clock: Clock,
        directory: Path,
        figures: Callable[[], ReplicaFigures],
        among: Callable[[int], None],
    ) -> None:
        self._db = db
        self._clock = clock
        self._id = secrets.token_hex(8)
        # Only one process at a time serves a SQLite file, even if the file was moved.
        alone = db.dialect == "sqlite"
        self._place = "sqlite" if alone else f"{socket.gethostname()}:{directory}"[:255]
        self._figures = figures
        self._among = among
        self._before = ReplicaFigures()
        self._before_at = clock.monotonic()

    async def run(self, stop: asyncio.Event) -> None:
        """Beat until `stop`; a failed beat is retried with the next."""
        while not stop.is_set():
            await self._try(await asyncio.to_thread(self._measure))
            await pause(self._clock, health.BEAT_S, stop)
        await self._try(None)

    async def _try(self, figures: ReplicaFigures | None) -> None:
        try:
            self._among(await self._db.write(partial(self._write, figures=figures)))
        except VolunteerError as error:
            log.warning("beat not written", error=error.message)

    def _write(self, conn: Connection, figures: ReplicaFigures | None) -> int:
        now = self._clock.now()
        if figures is None:
            replicas.end(conn, self._id)
        elif not replicas.beat(conn, self._id, figures, now):
            replicas.begin(conn, self._id, self._place, now)
            replicas.beat(conn, self._id, figures, now)
        return replicas.alive(conn, now - health.SILENT_S)

    def _measure(self) -> ReplicaFigures:
        """Return the figures of this process, with rates since the last measurement."""
        figures, at = self._figures(), self._clock.monotonic()
        before, passed = self._before, max(0.001, at - self._before_at)
        self._before, self._before_at = figures, at
        return msgspec.structs.replace(
            figures,
            requests_a_second=(figures.requests - before.requests) / passed,
            in_a_second=(figures.bytes_in - before.bytes_in) / passed,
            out_a_second=(figures.bytes_out - before.bytes_out) / passed,
            cpu_share=max(0.0, figures.cpu_s - before.cpu_s) / passed if before.cpu_s else 0.0,
        )
