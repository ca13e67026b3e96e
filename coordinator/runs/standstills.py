"""Standstills of the open runs: the facts are gathered here, once for all surfaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.database import runs
from coordinator.database.members import member_rows
from coordinator.database.monitoring import run_facts
from coordinator.rules.standstill_causes import PauseFacts, RunFacts, standstill
from coordinator.rules.task_size import memory_bytes
from coordinator.runs.definition import definition
from coordinator.ttl_cache import CachedValue
from shared.errors import VolunteerError
from shared.protocol.base import Standstill

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database
    from coordinator.database.runs import RunRow
    from coordinator.plan.merge_readiness import Ready
    from shared.clock import Clock

FRESH_S, REST = 2.0, 20.0


@dataclass(kw_only=True)
class ThisServer:
    """Facts about the server that runs in this process."""

    closed: Callable[[], str] = str  # why nothing new is accepted; "" if it is accepted
    stalled_s: float = 0.0  # setting `alert_stalled_s`
    since: float | None = None  # time at which the server began; None without a server


class Standstills:
    """Says why open runs do not go on."""

    def __init__(
        self,
        db: Database,
        clock: Clock,
        server: ThisServer,
        readiness: Callable[[Connection, RunRow], Ready],
    ) -> None:
        self.server = server
        self._clock = clock
        self._readiness = readiness
        self._cached = CachedValue(lambda: db.read(self.read), FRESH_S, clock, rest=REST)

    async def get(self) -> Mapping[str, Standstill]:
        """Return the standstills by the name of the run; they may be a moment old."""
        return await self._cached.get()

    def read(self, conn: Connection) -> Mapping[str, Standstill]:
        """Return the standstills by the name of the run."""
        now = self._clock.now()
        server = run_facts.of_server(conn, now)
        answers = {
            run.name: standstill(self._facts(conn, run, server, now))
            for run in runs.every(conn, runs.OPEN)
        }
        return {name: answer for name, answer in answers.items() if answer is not None}

    def _facts(
        self, conn: Connection, run: RunRow, server: run_facts.ServerFacts, now: float
    ) -> RunFacts:
        needs, pacing, is_due, lacks, keepers = 0, None, False, 0, None
        with suppress(VolunteerError):  # without the workload, some facts stay unknown
            about = definition(run)
            needs = memory_bytes(run.parameters, about.workload.fixed_bytes(about.file.model))
            pacing, state = about.pacing, self._readiness(conn, run)
            is_due, lacks = state.now, state.members
            if about.at_members:
                keepers = {row.worker_id for row in member_rows.of_run(conn, run.id)}
        made_at, usual_s = run_facts.pace(conn, run)
        bad = server.failures.get(run.id, ())
        failed, refused = run_facts.outcomes(conn, run, bad, made_at, now)
        return RunFacts(
            name=run.name,
            state=run.state,
            now=now,
            version=run.head,
            served=self.server.since is not None or server.served_since is not None,
            closed=self.server.closed() or server.closed,
            pause=PauseFacts(actor=run.state_actor, reason=run.state_reason, at=run.state_since),
            failures=failed,
            refusals=refused,
            machines=run_facts.machines(conn, run, server, needs, now, keepers),
            needs_bytes=needs,
            workload=run.workload,
            proofs=run_facts.proofs(conn, run),
            episodes=run_facts.episodes(
                conn, run, pacing.samples if pacing else 0, pacing.unit if pacing else "", now
            ),
            merge=run_facts.merge(conn, run, is_due=is_due, members=lacks, now=now),
            made_at=made_at,
            watched_since=max(
                run.state_since or 0.0, server.served_since or 0.0, self.server.since or 0.0
            ),
            usual_s=usual_s,
            stalled_s=self.server.stalled_s,
        )
