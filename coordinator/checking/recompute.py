"""Recomputes: a small share of the tasks is done again, from the very state that its worker had,
and only what this proves has consequences for an account.

    ordered    with the verdict, by a draw or after a failed forward check
    asked      the worker is asked, with its verdict, for the files that it committed to
    revealed   they are here: the task is done again in a process of its own
    done       passed, failed (suspended, and what it was paid is taken back), unclear, unproven

Nothing of this holds up a verdict. A task that is too large for this server is not
done again, and counts like one that this server cannot compare.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from coordinator.accounts.suspension import suspend
from coordinator.checking.case import Case, Draws
from coordinator.compute import Compute, Stop
from coordinator.database import contributions, recomputes, runs
from coordinator.database import volunteers as accounts
from coordinator.database.contributions import ContributionRow
from coordinator.database.ledger import escrow
from coordinator.database.ledger.payments import Payment
from coordinator.database.ledger.reversal import take_back
from coordinator.database.recomputes import RecomputeRow
from coordinator.database.runs import RunRow
from coordinator.rules import checks as rules
from coordinator.rules.checks import Redone, Result
from coordinator.runs.definition import definition
from coordinator.runs.version_files import read_weights
from coordinator.signals import Signals
from shared.clock import Clock
from shared.decoding import decode
from shared.errors import NotFound, Unavailable, VolunteerError
from shared.local_data import LocalData
from shared.protocol.contributions import Commitment, SubmitRequest
from shared.tensors.frame import open_frame
from shared.tensors.quantize import EXACT_CODECS, codec, residual_schema
from shared.tensors.update import delta

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from sqlalchemy import Connection

    from coordinator.database.engine.open import Database
    from coordinator.storage.blobs import BlobStore

POLL_S = 60.0  # for evidence that is overdue
SENTENCE_CHARS_MAX = 500
HERE = "cpu"  # where recomputes are made

log = structlog.get_logger("checks")


class Files(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a recompute; None where there is nothing of the kind."""

    weights: Path  # of the base
    update: Path
    codec: str
    inner: Path | None
    left: Path | None
    residual: Path | None


def redo(stop: Stop, case: Case, files: Files, data: LocalData) -> Redone:
    """Do a task again and compare: the update as its codec wrote it, and the state that was left.

    Raises NotFound and InvalidFrame for what cannot be done again, Unavailable when stopped.
    """
    about = definition(case.run)
    base = read_weights(files.weights, about)
    inner = None if files.inner is None else _tensors(files.inner)
    work = about.workload.begin(case.job, base, data, HERE, inner)
    while not work.done:
        if stop():
            raise Unavailable("the coordinator is stopping")
        work.advance()
    result = work.result()[1]
    cosine, ratio = _beside(case, files, result)
    state = None if files.left is None else _states(work.state(), _tensors(files.left))
    return Redone(cosine=cosine, norm_ratio=ratio, state_cosine=state)


def _beside(case: Case, files: Files, result: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """Return cosine and ratio of norms of the submitted update beside ours, encoded alike."""
    import numpy as np

    about = definition(case.run)
    schema, chosen = about.schema, codec(files.codec)
    arrays = {name: value.detach().numpy() for name, value in result.items()}
    dot = theirs_2 = ours_2 = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ours"
        with open_frame(files.weights, schema) as base:
            update: Any = delta(base, arrays, schema) if case.job.update == "delta" else arrays
            if files.codec in EXACT_CODECS:
                chosen.encode(update, schema, path)
            else:
                before: Any = {}
                if files.residual is not None:
                    before = open_frame(files.residual, residual_schema(schema))
                chosen.encode(update, schema, path, before, Path(folder) / "residual")
        with chosen.decode(path, schema) as ours, chosen.decode(files.update, schema) as theirs:
            for spec in schema:
                if spec.role != "parameter":
                    continue
                mine = ours[spec.name].reshape(-1).astype(np.float64)
                other = theirs[spec.name].reshape(-1).astype(np.float64)
                dot += float(mine @ other)
                ours_2 += float(mine @ mine)
                theirs_2 += float(other @ other)
    return dot / max(1e-300, (ours_2 * theirs_2) ** 0.5), (theirs_2 / max(1e-300, ours_2)) ** 0.5


def _states(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Return the least cosine over the kinds of state ("exp_avg", "exp_avg_sq"); -1 where one is
    missing, of another length by more than a tenth, or of another shape.
    """
    sums: dict[str, list[float]] = {}
    for name, mine in ours.items():
        other = theirs.get(name)
        if other is None or other.shape != mine.shape:
            return -1.0
        if not mine.is_floating_point():
            if not bool((mine == other).all()):
                return -1.0
            continue
        a, b = mine.double().flatten(), other.double().flatten()
        found = sums.setdefault(name.partition("/")[0], [0.0, 0.0, 0.0])
        for index, pair in enumerate(((a, b), (a, a), (b, b))):
            found[index] += float(pair[0] @ pair[1])
    least = 1.0
    for dot, ours_2, theirs_2 in sums.values():
        if ours_2 == theirs_2 == 0.0:
            continue
        alike = ours_2 > 0 and 0.81 <= theirs_2 / ours_2 <= 1.21
        least = min(least, dot / (ours_2 * theirs_2) ** 0.5 if alike else -1.0)
    return least


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise NotFound(f"a revealed state is no file of tensors: {error}") from error


class Recomputes:
    """Orders, makes and judges the recomputes of one server."""

    def __init__(
        self,
        db: Database,
        clock: Clock,
        signals: Signals,
        blobs: BlobStore,
        compute: Compute,
        draws: Draws,
    ) -> None:
        self._db = db
        self._clock = clock
        self._signals = signals
        self._blobs = blobs
        self._compute = compute
        self._draws = draws
        self._begin_at_once = False  # one was ordered that needs no evidence

    def order(self, conn: Connection, row: ContributionRow, run: RunRow, *, doubted: bool) -> bool:
        """Order the recompute of an update if it is drawn or `doubted`, with its verdict; True if
        its pay is to wait for it, which is so for a doubted one of an account on probation.
        """
        if not (doubted or self._draws.drawn(conn, "recompute", row, run)):
            return False
        if not recomputes.has_room(conn, row):
            return False
        case = Case.of(conn, row, run)
        if case is None:
            return False
        if case.flops > rules.RECOMPUTE_FLOPS_MAX:
            accounts.count_uncompared(conn, row.volunteer_id)
            return False
        said = recomputes.commitment_of(row)
        keeps = row.kind == "delta" and not case.job.reset_inner
        withheld = doubted and not row.vetted
        wanted = [] if _silent(said, keeps=keeps) else sorted({*_named(said)})
        due = self._clock.now() + rules.REVEAL_S
        self._begin_at_once |= not wanted
        recomputes.add(conn, row, (wanted, case.stored()), withheld=withheld, due_at=due)
        return withheld

    def wake(self) -> None:
        """Begin what was ordered and needs no evidence; after the commit."""
        if self._begin_at_once:
            self._begin_at_once = False
            self._signals.notify("recomputes")

    async def run(self, stop: asyncio.Event) -> None:
        """Make recomputes until `stop` is set."""
        watch = self._signals.watch("recomputes")
        while not stop.is_set():
            await self.expire()
            if not await self.next():
                await watch.wait(POLL_S)

    async def expire(self) -> int:
        """End those whose evidence did not come in time; how many."""
        now = self._clock.now()
        late = await self._db.read(lambda conn: recomputes.overdue(conn, now))
        for row in late:
            await self._end(row, "unproven", "what it was committed to was not revealed in time")
        return len(late)

    async def next(self) -> bool:
        """Make the oldest recompute whose evidence is here; False when there is none."""
        row = await self._db.read(recomputes.first)
        if row is None:
            return False
        try:
            await self._make(row)
        except Unavailable as error:
            if self._compute.stopping:
                return False
            await self._end(row, "unclear", f"the recompute ended early: {error.message}")
        except (VolunteerError, OSError) as error:
            await self._end(row, "unclear", f"it cannot be done again: {error}")
        return True

    async def _make(self, row: RecomputeRow) -> None:
        def read(conn: Connection) -> tuple[ContributionRow, Case, bool]:
            found = contributions.by_id(conn, row.contribution_id)
            case = Case.again(conn, row.work, runs.by_id(conn, found.run_id))
            return found, case, recomputes.follows(conn, found)

        contribution, case, follows = await self._db.read(read)
        said = recomputes.commitment_of(contribution)
        keeps = contribution.kind == "delta" and not case.job.reset_inner
        if _silent(said, keeps=keeps):
            await self._end(row, "unproven", "it was not committed to a state of its optimiser")
            return
        if not follows:
            await self._end(row, "unproven", "its state is of no earlier task of this machine")
            return
        files = await self._files(case, contribution, said)
        data = await case.data(self._blobs)
        try:
            found, seconds = await self._compute.timed(redo, case, files, data)
        except Unavailable:
            raise
        except Exception as error:  # what is here was whole before: the evidence is not
            why = f"its evidence cannot be used: {error}"
            await self._end(row, "unproven", why[:SENTENCE_CHARS_MAX])
            return
        await self._db.write(lambda conn: contributions.checked(conn, contribution.id, seconds))
        # As claimed, from the devices that the machine registered: never as told with the result.
        device = case.device or decode(contribution.report, SubmitRequest).device
        comparable = device.partition(":")[0] == HERE
        precision = case.job.train.precision
        result = rules.judge_recompute(found, contribution.codec, precision, comparable=comparable)
        await self._end(row, result, _sentence(result, found, device), found)

    async def _files(self, case: Case, row: ContributionRow, said: Commitment) -> Files:
        async def local(sha256: str) -> Path | None:
            return await self._blobs.local(sha256) if sha256 else None

        return Files(
            weights=await self._blobs.local(case.base_sha256),
            update=await self._blobs.local(row.sha256),
            codec=row.codec,
            inner=await local(said.inner),
            left=await local(said.left),
            residual=await local(said.residual),
        )

    async def _end(
        self, row: RecomputeRow, result: Result, message: str, found: Redone | None = None
    ) -> None:
        measured = "{}" if found is None else msgspec.json.encode(found).decode()
        if await self._db.write(lambda conn: self._settle(conn, row, result, message, measured)):
            note = log.info if result == "passed" else log.warning
            note("recompute", contribution=row.contribution_id, result=result, reason=message)

    def _settle(
        self, conn: Connection, row: RecomputeRow, result: Result, message: str, measured: str
    ) -> bool:
        now = self._clock.now()
        if not recomputes.end(conn, row, result, message, measured, now):
            return False
        contribution = contributions.by_id(conn, row.contribution_id)
        if result == "failed":
            why = f"task {contribution.task_id} was done again here and is not what was submitted"
            suspend(conn, row.volunteer_id, why, now)
            take_back(conn, [Payment.of(contribution)], why, now)
        elif row.withheld:
            settle = escrow.pay if result == "passed" else escrow.withhold
            settle(conn, [contribution], now)
        return True


def _named(said: Commitment) -> list[str]:
    return [name for name in (said.inner, said.left, said.residual) if name]


def _silent(said: Commitment, *, keeps: bool) -> bool:
    """Return True if a worker that keeps its optimiser's state committed to none."""
    return keeps and not said.left


def _sentence(result: Result, found: Redone, device: str) -> str:
    figures = f"cosine {found.cosine:.4f}, norm x {found.norm_ratio:.3f}"
    if found.state_cosine is not None:
        figures += f", state {found.state_cosine:.4f}"
    if result == "unclear":
        return f"{figures}: computed on {device}, which this server cannot compare with its CPU"
    return figures
