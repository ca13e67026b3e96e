"""Forward checks: a share of the updates, and every one of a newcomer, is measured on samples of
its task that a secret of the server chooses once it is here, before the verdict.

A check proves little and so it punishes nobody: it orders a recompute (see `recompute`). What fails
it, of an account on probation, is not merged; of others it is accepted. What it cannot tell is
accepted, and counts for nothing on the way to being vetted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from coordinator.checking.case import Case, Draws
from coordinator.compute import Compute, Stop
from coordinator.database import checks, contributions, runs
from coordinator.database.contributions import ContributionRow
from coordinator.rules import checks as rules
from coordinator.rules.checks import Result
from coordinator.runs.datasets import heldout
from coordinator.runs.definition import Definition, definition
from coordinator.runs.version_files import read_weights
from shared.clock import Clock
from shared.errors import VolunteerError
from shared.local_data import LocalData
from shared.tensors.quantize import codec
from shared.workloads.base import ForwardFigures

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.engine.open import Database
    from coordinator.storage.blobs import BlobStore

PEERS = 64  # newest checks passed that a check is compared with

log = structlog.get_logger("checks")


def measure(
    stop: Stop,
    case: Case,
    files: tuple[Path, Path, str],
    data: tuple[LocalData, LocalData],
    seed: int,
) -> ForwardFigures | None:
    """Measure an update; `files` are the base weights, the update, and its codec's name."""
    import torch

    about = definition(case.run)
    weights, path, name = files
    base = read_weights(weights, about)
    updated: dict[str, torch.Tensor] = {}
    with codec(name).decode(path, about.schema) as update:
        for spec in about.schema:
            values = torch.from_numpy(update[spec.name].copy()).reshape(spec.shape)
            is_delta = case.job.update == "delta" and spec.role == "parameter"
            updated[spec.name] = base[spec.name] - values if is_delta else values
    return about.workload.check(case.job, base, updated, data, seed)


class ForwardChecks:
    """Makes the forward checks of one server."""

    def __init__(
        self, db: Database, clock: Clock, blobs: BlobStore, compute: Compute, draws: Draws
    ) -> None:
        self._db = db
        self._clock = clock
        self._blobs = blobs
        self._compute = compute
        self._draws = draws

    async def check(self, row: ContributionRow, about: Definition) -> Result | None:
        """Check an update, if it is drawn; None if it is not, or cannot be checked this way."""
        if not self._draws.possible("forward", about):
            return None
        known, case = await self._db.read(lambda conn: self._case(conn, row))
        if case is None:
            return known
        try:
            found, seconds = await self._measured(case, row)
        except (VolunteerError, OSError) as error:
            log.warning("check failed", contribution=row.id, error=str(error))
            return None
        if found is None:
            return None
        return await self._db.write(lambda conn: self._record(conn, row, found, seconds))

    def _case(self, conn: Connection, row: ContributionRow) -> tuple[Result | None, Case | None]:
        """Return the result where an earlier process came so far, and what a check needs else; None
        where none is drawn.
        """
        known = checks.result_of(conn, row.id)
        run = runs.by_id(conn, row.run_id)
        if known is not None or not self._draws.drawn(conn, "forward", row, run):
            return known, None
        return None, Case.of(conn, row, run)

    async def _measured(
        self, case: Case, row: ContributionRow
    ) -> tuple[ForwardFigures | None, float]:
        own = await case.data(self._blobs)
        data = own, await heldout(case.manifest, self._blobs, case.files)
        weights = await self._blobs.local(case.base_sha256)
        files = weights, await self._blobs.local(row.sha256), row.codec
        return await self._compute.timed(measure, case, files, data, self._draws.seed(row))

    def _record(
        self, conn: Connection, row: ContributionRow, found: ForwardFigures, seconds: float
    ) -> Result:
        contributions.checked(conn, row.id, seconds)
        peers = checks.peers(conn, row.run_id, PEERS)
        result = rules.judge_forward(found, peers, row.codec)
        result = checks.add(conn, row, found, result, self._clock.now())
        if result != "passed":
            log.info(
                "forward check", contribution=row.id, result=result, drop=found.drop, gap=found.gap
            )
        return result
