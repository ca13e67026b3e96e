"""Healing: rollback from versions made with the work of accounts suspended since.

A merge is never undone by itself. Where contributions whose account was suspended, or whose pay was
taken back, had more than `heal_share` of a version's weight, going back to the version before it is
proposed to the organiser; with `auto_rollback` it happens.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import structlog

from coordinator.database import contributions, evaluations, runs, versions
from coordinator.database.runs import OPEN, RunRow
from coordinator.database.versions import VersionRow
from coordinator.merging import recipe
from coordinator.merging.recipe import MergeTerms
from coordinator.runs.definition import definition
from coordinator.runs.runs import Runs
from coordinator.signals import Signals
from shared.decoding import decode
from shared.errors import VolunteerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database

RECENT = 20  # newest ancestors of the head that are examined
POLL_S = 30.0

log = structlog.get_logger("healing")


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """Proposed rollback: to the version before the first spoilt one."""

    run: str
    version: int  # first version that is spoilt
    share: float  # share of its weight from accounts suspended since
    to: int

    @property
    def command(self) -> str:
        return f"coordinator run rollback {self.run} --to {self.to}"


def proposal(conn: Connection, run: RunRow) -> Proposal | None:
    """Return the rollback that is proposed for a run; None where it needs none."""
    limit = definition(run).file.trust.heal_share
    first: tuple[VersionRow, float] | None = None
    line = _line(conn, run)
    if not line:
        return None
    spoilt = contributions.discredited(conn, run.id, line[-1].version)
    for row in line:
        share = _share(conn, run, row, spoilt.get(row.version, frozenset()))
        if share > limit:
            first = row, share
    if first is None or first[0].parent is None:
        return None
    to = first[0].parent
    while to > 0 and evaluations.evaluation(conn, run.id, to).pruned:
        to -= 1
    return Proposal(run=run.name, version=first[0].version, share=first[1], to=to)


def _line(conn: Connection, run: RunRow) -> Sequence[VersionRow]:
    """Return the newest ancestors of the head, newest first, without reverted versions."""
    found: list[VersionRow] = []
    at: int | None = run.head if run.head > 0 else None
    while at is not None and len(found) < RECENT:
        row = versions.get(conn, run.id, at)
        if row.kind == "merge":
            found.append(row)
        at = versions.content_before(conn, row) if row.kind == "rollback" else row.parent
    return found


def _share(conn: Connection, run: RunRow, row: VersionRow, spoilt: frozenset[int]) -> float:
    """Return the share of a version's weight from some of its contributions."""
    if not spoilt or row.parent is None:
        return 0.0
    made = recipe.of_contributions(
        conn,
        run=run,
        base=versions.get(conn, run.id, row.parent),
        rows=contributions.by_ids(conn, decode(row.contributions, list[int])),
        terms=MergeTerms(),
    )
    weights = made.weights
    bad = sum(w for one, w in zip(made.rows, weights, strict=True) if one.id in spoilt)
    return bad / sum(weights) if bad else 0.0


class Healing:
    """Proposes rollbacks to the organiser, or makes them where the run file allows it."""

    def __init__(self, db: Database, signals: Signals, runs: Runs) -> None:
        self._db = db
        self._signals = signals
        self._runs = runs
        self._logged: dict[int, Proposal] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Watch all runs until `stop` is set."""
        watch = self._signals.watch("runs")
        while not stop.is_set():
            try:
                await self.heal()
            except (VolunteerError, OSError) as error:
                log.warning("healing failed", error=str(error))
            await watch.wait(POLL_S)

    async def heal(self) -> int:
        """Log a proposed rollback once, or roll back; return the number of rollbacks."""
        found = await self._db.read(
            lambda conn: [(run, proposal(conn, run)) for run in runs.every(conn, OPEN)]
        )
        healed = 0
        for run, proposed in found:
            if proposed is None:
                continue
            if definition(run).file.trust.auto_rollback:
                share = f"{proposed.share:.0%} of version {proposed.version}"
                why = f"{share} came from suspended accounts"
                await self._runs.rollback(run.name, proposed.to, why, "coordinator")
                log.warning("rolled back", run=run.name, to=proposed.to, reason=why)
                healed += 1
            elif self._logged.get(run.id) != proposed:
                self._logged[run.id] = proposed
                log.warning(
                    "rollback proposed",
                    run=run.name,
                    version=proposed.version,
                    share=round(proposed.share, 3),
                    command=proposed.command,
                )
        return healed
