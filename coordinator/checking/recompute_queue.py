"""Queue of recomputes: drawn tasks done again from published inputs alone.

    drawn      with the verdict: the task waits
    refused    the task waits too, for a few tasks of a run at a time (`rules/refusals`)
    done       passed, failed or unproven (see `proof`)

If a waiting recompute is much smaller than the running one, it starts at once in a second process,
and the larger one pauses between two steps, so that huge tasks in the queue delay nobody. No
verdict waits for a recompute. Tasks done on a checker's class of devices are left to the checker
(see `checkers`). A recompute that is impossible here now waits, with a reason for the organiser; no
draw is ever dropped.
"""

from __future__ import annotations

import asyncio
import secrets
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec
import structlog

from coordinator.checking import audits
from coordinator.checking.case import Case, Draws
from coordinator.checking.draw_effects import end_without_verdict, settle
from coordinator.checking.recompute_comparison import (
    RecomputeFiles,
    SubmittedUpdate,
    missing_library,
    redo,
)
from coordinator.compute import Compute
from coordinator.database import contributions, recomputes, runs
from coordinator.database import volunteers as accounts
from coordinator.database.contributions import ContributionRow
from coordinator.database.recomputes import DrawTerms, RecomputeRow, StoredCase
from coordinator.database.runs import RunRow
from coordinator.merging.lease_keeper import LeaseKeeper
from coordinator.platform import Platform, PlatformService
from coordinator.rules import draws as rules
from coordinator.rules import recompute_result, refusals
from coordinator.rules.draws import ComputeDevice, Redone, Result
from shared.decoding import decode
from shared.errors import InvalidRunFile, Unavailable, VolunteerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sqlalchemy import Connection


# "never": no machine could do the task again
DrawChoice = Literal["", "drawn", "never"]
POLL_S = 15.0  # interval of looking for recomputes that were postponed, or left by a dead process
SENTENCE_CHARS_MAX = 500

log = structlog.get_logger("checks")


class RecomputeTask(msgspec.Struct, frozen=True, kw_only=True):
    """Contribution whose task is recomputed, and the inputs."""

    contribution: int
    case: Case
    given: SubmittedUpdate


class Recomputes(PlatformService):
    """Orders, makes and judges the recomputes of one server."""

    def __init__(self, on: Platform, computes: tuple[Compute, Compute], draws: Draws) -> None:
        super().__init__(on)
        self._compute, self._aside = computes
        self._draws = draws
        self._leases = LeaseKeeper(on)
        self._choosing = asyncio.Lock()
        self._under_way: RecomputeRow | None = None

    def order(self, conn: Connection, row: ContributionRow, run: RunRow) -> DrawChoice:
        """Order the recompute of a drawn update; "never" where no machine could do it."""
        if not self._draws.possible(run):
            return ""
        case = Case.of(conn, row, run)
        if case is None:
            return "never"
        if not self._draws.drawn(conn, row, run):
            return ""
        auditable = case.comparable(ComputeDevice(kind=rules.HERE))
        terms = DrawTerms(
            work=case.stored(),
            flops=case.flops,
            kind=rules.device_kind(case.device),
            seed=1 + secrets.randbits(62) if auditable else 0,
        )
        recomputes.add(conn, row, terms)
        accounts.count_draw(conn, row.volunteer_id)
        return "drawn"

    def order_refused(
        self, conn: Connection, row: ContributionRow, run: RunRow, reason: str
    ) -> bool:
        """Order the recompute of a refused update if a recompute can repeat the refusal and few
        such recomputes wait; return True if it was ordered.
        """
        if run.state != "running" or not refusals.is_question(reason):
            return False
        waiting = recomputes.open_refusals(conn, run.id, row.volunteer_id)
        case = Case.of(conn, row, run) if refusals.may_ask(*waiting) else None
        if case is None:
            return False
        terms = DrawTerms(
            work=case.stored(),
            flops=case.flops,
            kind=rules.device_kind(case.device),
            refusal=reason,
        )
        recomputes.add(conn, row, terms)
        return True

    def wake(self) -> None:
        """Start the ordered recomputes; called after the commit of their orders."""
        self._signals.notify("recomputes")

    async def run(self, stop: asyncio.Event) -> None:
        """Make recomputes until `stop` is set."""
        await self._until(stop, self.next)

    async def run_aside(self, stop: asyncio.Event) -> None:
        """Run the recomputes that overtake a larger one, until `stop` is set."""
        await self._until(stop, self.overtake)

    async def _until(self, stop: asyncio.Event, make: Callable[[], Awaitable[bool]]) -> None:
        watch = self._signals.watch("recomputes")
        while not stop.is_set():
            if not await make():
                await watch.wait(POLL_S)

    async def next(self) -> bool:
        """Make the next recompute that is not left to a checker; return False if there is no such
        recompute.
        """
        async with self._choosing:
            row = self._under_way = await self._take()
        if row is None:
            return False
        try:
            return await self._attempt(row, self._compute)
        finally:
            self._under_way = None

    async def overtake(self) -> bool:
        """Make a recompute that overtakes a much larger one, which is paused meanwhile; return
        False if no such recompute waits.
        """
        async with self._choosing:
            larger = self._under_way
            row = None if larger is None else await self._take(larger)
            if row is None:
                return False
            with self._compute.paused():
                return await self._attempt(row, self._aside)

    async def _take(self, under_way: RecomputeRow | None = None) -> RecomputeRow | None:
        now, leases = self._clock.now(), self._leases
        holder = recomputes.Holder(owner=leases.owner, now=now, until=now + leases.lease_s)

        def take(conn: Connection) -> RecomputeRow | None:
            return recomputes.take(conn, holder, recomputes.served(conn, now), under_way)

        return await self._db.write(take)

    async def _attempt(self, row: RecomputeRow, compute: Compute) -> bool:
        """Run a leased recompute, or postpone it with the reason; return False if the server
        stops.
        """
        try:
            async with self._leases.renewing(recomputes.JOBS, row):
                why = await self._make(row, compute)
        except Unavailable as error:
            if compute.stopping:
                await self._db.write(partial(recomputes.JOBS.release, job=row))
                return False
            why = error.message
        except (VolunteerError, OSError) as error:
            why = f"it cannot be done again now: {error}"
        if why:
            log.warning("recompute waits", contribution=row.contribution_id, reason=why)
            until, message = self._clock.now() + rules.POSTPONED_S, why[:SENTENCE_CHARS_MAX]
            postpone = partial(recomputes.JOBS.release, job=row, after=until, message=message)
            await self._db.write(postpone)
        return True

    async def prepare(self, row: RecomputeRow) -> RecomputeTask:
        """Return the inputs of a recompute. Raises NotFound for a run without a dataset."""

        def read(conn: Connection) -> RecomputeTask:
            contribution = contributions.by_id(conn, row.contribution_id)
            case = Case.from_stored(conn, row.work, runs.by_id(conn, contribution.run_id))
            submitted = SubmittedUpdate(
                sha256=contribution.sha256, codec=contribution.codec, seed=row.seed
            )
            return RecomputeTask(contribution=contribution.id, case=case, given=submitted)

        return await self._db.read(read)

    async def _make(self, row: RecomputeRow, compute: Compute) -> str:
        """Do a recompute here and judge it; return the reason if it must wait, else ""."""
        task = await self.prepare(row)
        case = task.case
        lacking = missing_library(case)
        if lacking is not None:
            return f"this server cannot do it again: the library {lacking} is not installed"
        files = await RecomputeFiles.of(case, task.given, self._blobs)
        data = await case.data(self._blobs)
        try:
            figures, seconds = await compute.timed(redo, case, files, data)
        except Unavailable:
            raise
        except InvalidRunFile as error:  # the training diverges here
            message = f"it cannot be done again: {error.message}"
            result: Result = "passed" if row.refusal else "unproven"
            await self._end(row, result, message[:SENTENCE_CHARS_MAX])
            return ""
        await self.judge(row, case, figures, ComputeDevice(kind=rules.HERE), seconds)
        return ""

    async def judge(
        self, row: RecomputeRow, case: Case, figures: Redone, on: ComputeDevice, seconds: float
    ) -> None:
        """Judge a finished recompute."""
        number = row.contribution_id

        def count(conn: Connection) -> ContributionRow:
            contributions.checked(conn, number, seconds)
            return contributions.by_id(conn, number)

        contribution = await self._db.write(count)
        precision = rules.precision_of(case.job.train.precision, on.kind)
        result = recompute_result.judge(figures, precision, comparable=case.comparable(on))
        loss = contribution.loss_last
        if result == "passed" and not refusals.repeats(row.refusal, loss, figures.loss):
            result = "unproven"  # the update is right, and the reported loss is not
        share = recompute_result.share(figures, precision, comparable=case.comparable(on))
        sentence = _sentence(result, figures, case.device, on)
        await self._end(row, result, sentence, figures, share)

    async def _end(
        self,
        row: RecomputeRow,
        result: Result,
        message: str,
        figures: Redone | None = None,
        share: float = 1.0,
    ) -> None:
        measured = "{}"
        if figures is not None:
            measured = msgspec.json.encode(msgspec.structs.replace(figures, sums=b"")).decode()
        messages = message, measured

        def write(conn: Connection) -> bool | None:
            now = self._clock.now()
            runs.by_id(conn, row.run_id, lock=True)
            # read again, since an audit may have been answered meanwhile
            owners = (recomputes.get(conn, row.contribution_id) or row).accounts
            accounts.lock(conn, owners)
            recompute = recomputes.get(conn, row.contribution_id, lock=True)
            if recompute is None or recompute.accounts != owners:
                return None if recompute else False
            # its training diverges or drifts: the task proves nothing, whoever did it
            if result == "unproven" and (
                figures is None or recompute_result.drifts_too_far(figures)
            ):
                ended = _without_verdict(conn, row, messages, now)
            else:
                ended = settle(conn, row, result, messages, now, share)
            if not ended:
                return False
            if recompute.answer_id is not None:
                audits.judge(conn, recompute, figures, result, now)
            return True

        ended = None
        while ended is None:  # an audit was answered before its auditor was locked
            ended = await self._db.write(write)
        if ended:
            note = log.info if result == "passed" else log.warning
            note("recompute", contribution=row.contribution_id, result=result, reason=message)
            # an update that waited for its proof may be merged
            self._signals.notify("contributions")
            for topic in (f"run:{row.run_id}", "runs") if row.refusal else (f"run:{row.run_id}",):
                self._signals.notify(topic)  # a run may have paused itself


def _without_verdict(
    conn: Connection, row: RecomputeRow, messages: tuple[str, str], now: float
) -> bool:
    """End a draw whose task proves nothing, and let the run's tasks be half as long; return False
    if it had a result before.
    """
    if not end_without_verdict(conn, row, messages, now):
        return False
    run = runs.by_id(conn, row.run_id)
    most = max(1, decode(row.work, StoredCase).job.steps // 2)
    if not run.steps_provable or most < run.steps_provable:
        runs.set_values(conn, run.id, steps_provable=most)
    return True


def _sentence(result: Result, comparison: Redone, device: str, on: ComputeDevice) -> str:
    figures = f"cosine {comparison.cosine:.4f}, norm x {comparison.norm_ratio:.3f}"
    if comparison.buffers:
        figures += f", statistics off by {comparison.buffers:.4f}"
    if comparison.drift is not None:
        figures += f", drift {comparison.drift:.4f}"
    where = f"{on.kind} ({on.model})" if on.model else on.kind
    if result == "unproven" and recompute_result.drifts_too_far(comparison):
        return f"{figures}: the task is too long to prove anything"
    if result == "unproven":
        return f"{figures}: computed on {device}, which {where} cannot be compared with"
    return figures if on.kind == rules.HERE else f"{figures}: done again on {where}"
