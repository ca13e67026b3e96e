"""Beats: reports that a serving process writes for the other processes, the monitor and alerts."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from coordinator.database.monitoring import replicas
from coordinator.rules import health
from coordinator.rules.overview import ReplicaFigures
from shared.clock import Clock, pause
from shared.errors import VolunteerError

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database

log = structlog.get_logger("overview")


class Beats:
    """Stores the beats of this process until it stops. `figures` reads its figures; `among` gets
    the number of the serving processes after each beat.
    """

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
        """Beat until `stop`; after a failed beat the next one is sent at its usual time."""
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
        before, interval_s = self._before, max(0.001, at - self._before_at)
        self._before, self._before_at = figures, at
        return msgspec.structs.replace(
            figures,
            requests_a_second=(figures.requests - before.requests) / interval_s,
            in_a_second=(figures.bytes_in - before.bytes_in) / interval_s,
            out_a_second=(figures.bytes_out - before.bytes_out) / interval_s,
            cpu_share=max(0.0, figures.cpu_s - before.cpu_s) / interval_s if before.cpu_s else 0.0,
        )
