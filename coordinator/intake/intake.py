"""Intake of contributions: stored first, then checked off the event loop, then decided, each step
in one transaction.

    submit ── received durably (checking) ──> measured in a thread ──> accepted: pending credit, task done
                                                                  └──> rejected: reason, task back in the queue

A coordinator that dies in between finds the contribution in `checking` at its restart and decides
it then.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
from msgspec.structs import replace

from coordinator.checking.audits import Audits
from coordinator.checking.recompute import Drawn, Recomputes
from coordinator.compute import Compute
from coordinator.database import (
    contributions,
    runs,
    submissions,
    tasks,
    verdicts,
)
from coordinator.database import volunteers as accounts
from coordinator.database.contributions import UPDATES as MERGED
from coordinator.database.contributions import ContributionRow, PeerContribution
from coordinator.database.ledger import escrow, payments
from coordinator.database.runs import OPEN, RunRow
from coordinator.database.submissions import Background, NextPart
from coordinator.database.tasks import FailureKind, TaskRow
from coordinator.experience.harvest import Harvest
from coordinator.plan.plan import in_phase
from coordinator.plan.plan_tables import Plan
from coordinator.platform import Platform, PlatformService
from coordinator.rules import codec_choice, validation
from coordinator.rules.audits import AUDIT
from coordinator.rules.standing import GAIN, LOSS
from coordinator.rules.validation import Evidence, Judgement, Measurement
from coordinator.runs import phases
from coordinator.runs.definition import Definition, definition
from coordinator.runs.settlement import put_back
from coordinator.scheduling.lease_message import UPDATES
from coordinator.traffic import SLOW_S, Durations
from shared.decoding import decode
from shared.errors import BadRequest, Conflict, NotFound, OffsetMismatch, VolunteerError
from shared.protocol.base import Reason
from shared.protocol.contributions import SubmitRequest, Verdict
from shared.protocol.limits import PARTS_MAX, TRIES_MAX
from shared.signing import canonical, digest
from shared.tensors import quantize

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.accounts.accounts import Principal

log = structlog.get_logger("intake")

HISTORY_MAX = 200
RECHECK_MAX = 100
REDO_MAX = 3  # times that a late gradient may be recomputed; then its task fails
COHORT_ROWS = 4  # rows that are read for each volunteer of the cohort
# Reasons that are not the volunteer's fault, which do not count against it.
NO_FAULT = frozenset({Reason.STALE.value, Reason.CANCELLED.value, Reason.RUN_ENDED.value})

LOST = Judgement(
    state="rejected",
    reason=Reason.CANCELLED.value,
    message="its task was taken back meanwhile: nothing is counted against you",
)


NEVER = (
    "not paid: its task cannot be done again, so nothing can prove it; ask the organiser to vouch "
    "for you"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examiners:
    """Examiners of a contribution before its verdict; all run PyTorch."""

    harvest: Harvest
    recomputes: Recomputes
    audits: Audits


class Intake(PlatformService):
    """Receives, checks and decides contributions."""

    def __init__(self, on: Platform, examiners: Examiners) -> None:
        super().__init__(on)
        self._recomputes = examiners.recomputes
        self._harvest = examiners.harvest
        self.audits = examiners.audits
        self._under_way: dict[int, asyncio.Task[None]] = {}  # running checks, by contribution
        self.durations = Durations(SLOW_S)  # duration of submissions with their check
        self.decided: Counter[tuple[str, str, str]] = Counter()  # run, state, reason
        self._abouts: dict[int, Definition] = {}  # unchanging definition of each run, read once

    async def submit(self, principal: Principal, task_id: int, request: SubmitRequest) -> Verdict:
        """Store one contribution and return its verdict. Raises the errors of `take_in`."""
        number, fresh = await self.take_in(principal, task_id, request)
        verdict = await self.verdict(principal, number)
        if fresh:
            self.count(verdict)
        return verdict

    async def take_in(
        self, principal: Principal, task_id: int, request: SubmitRequest
    ) -> tuple[int, bool]:
        """Store and check one contribution; return its number, and whether it is new.

        A submission with the same key and content is always the same contribution. Raises NotFound
        for another account's task or upload, Gone if another worker holds the task by now, Conflict
        for the same key with other content, BadRequest for an unknown codec.
        """
        if not (0 <= request.part < PARTS_MAX and 0 <= request.tries < TRIES_MAX):
            raise BadRequest("part or tries is out of range")
        quantize.codec(request.codec)
        with self.durations.timed():
            row, fresh = await self._db.write(
                lambda conn: self._receive(conn, principal, task_id, request)
            )
            if row.state == "checking":
                await self._check(row)
            elif row.state == "rejected":
                self._signals.notify("queue")
        return row.id, fresh

    def count(self, verdict: Verdict) -> None:
        """Count a verdict for the metrics, once, at the first submission of its contribution."""
        self.decided[verdict.run, verdict.state, verdict.reason] += 1

    def _receive(
        self, conn: Connection, principal: Principal, task_id: int, request: SubmitRequest
    ) -> tuple[ContributionRow, bool]:
        """Return the contribution, and whether it is new."""
        now = self._clock.now()
        content = digest(canonical(msgspec.to_builtins(request)))
        # locked first, since the same request may be sent twice at once
        task = tasks.holder(conn, task_id)
        found = submissions.arrival(
            conn, task, principal.volunteer_id, principal.worker_id, request
        )
        if found.known is not None:
            known = contributions.by_id(conn, found.known)
            if known.volunteer_id != principal.volunteer_id:
                raise NotFound(f"there is no task {task_id} of yours")
            if known.digest != content:
                raise Conflict(f"task {task_id} was submitted before with other content")
            return known, False
        tasks.may_submit(task, principal.worker_id, request.attempt)
        if task.base_version is None:
            raise Conflict(f"task {task_id} has not begun: there is no base version yet")
        run, now_holds = found.run, phases.at_head(found.run)
        part = submissions.expect(task, request, found)
        base = task.base_version
        # a part may begin from an older version than the newest, if it asked for that
        if task.part_steps or now_holds.pull_every:
            base = min(base, max(0, request.base_version))
        if not found.uploaded:
            raise OffsetMismatch(
                f"the bytes {request.sha256[:12]}... were not uploaded for task {task_id}: begin "
                "the upload again"
            )
        values = _values(principal, task, request, part, now) | {
            "base_version": base,
            "vetted": found.standing == "vetted",
            "network": found.network,
        }
        kind = UPDATES.get(task.kind) or task.update_kind or now_holds.update
        row = contributions.add(conn, values | {"kind": kind}, last=part.last)
        if not _is_late(row, run, now_holds):
            return row, True
        self._too_late(conn, row, run)
        return contributions.by_id(conn, row.id), True

    async def _check(self, row: ContributionRow) -> None:
        """Check a contribution once for all requests; cancelling one does not stop the check."""
        under_way = self._under_way.get(row.id)
        if under_way is None:
            under_way = self._under_way[row.id] = asyncio.create_task(self._check_once(row))
            under_way.add_done_callback(lambda task: self._checked(row.id, task))
        await asyncio.shield(under_way)

    def _checked(self, contribution_id: int, task: asyncio.Task[None]) -> None:
        del self._under_way[contribution_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("check failed", contribution=contribution_id, error=str(error))

    async def _check_once(self, row: ContributionRow) -> None:
        if row.kind in MERGED:
            await self._measure(row)
        elif row.kind == AUDIT:
            await self.audits.check(row)
        elif not Compute.possible():
            return  # a server with PyTorch decides it at its next recheck
        else:
            await self._harvest.check(row)
        self._signals.notify("contributions")
        self._signals.notify("queue")
        self._recomputes.wake()

    async def _measure(self, row: ContributionRow) -> None:
        about = self._abouts.get(row.run_id)
        if about is None:
            run = await self._db.read(lambda conn: runs.by_id(conn, row.run_id))
            about = self._abouts[row.run_id] = definition(run)
        granted = codec_choice.grantable(about.plan)
        if row.codec in granted:
            path = await self._blobs.local(row.sha256)
            loop = asyncio.get_running_loop()
            measured = await loop.run_in_executor(
                self._threads, validation.measure, path, about.schema, row.codec
            )
        else:
            measured = Measurement(
                problem=f'the update is encoded as "{row.codec}", which this run does not accept; '
                f"accepted: {', '.join(sorted(granted))}"
            )
        await self._db.write(lambda conn: self._decide(conn, row.id, measured))

    def _decide(self, conn: Connection, contribution_id: int, measured: Measurement) -> None:
        now = self._clock.now()
        # The rows are locked: after a restart both the sender and the recheck may decide.
        row = contributions.by_id(conn, contribution_id, lock=True)
        if row.state != "checking":
            return  # another process decided
        found = submissions.background(conn, row)
        plan = phases.at_head(found.run)
        if plan.in_flight == "redo":  # the head must not move any more
            runs.by_id(conn, row.run_id, lock=True)
            found = submissions.background(conn, row)  # the lock may have waited for a merge
            plan = phases.at_head(found.run)
        judgement = self._judge(conn, row, found, plan, measured)
        if judgement.state != "rejected" and found.standing == "suspended":
            judgement = validation.SUSPENDED
        if judgement.reason == Reason.STALE and _is_late(row, found.run, plan):
            self._too_late(conn, row, found.run)
            return
        task = submissions.held(conn, row)
        if task is None:
            judgement = LOST
        verdicts.decide(
            conn,
            row,
            judgement.state,
            now=now,
            reason=judgement.reason,
            message=judgement.message,
            weight=judgement.weight,
            clip=judgement.clip,
            norm=measured.norm if measured.finite and not measured.problem else None,
        )
        if task is None:
            return
        if judgement.state == "rejected":
            self._reject(conn, row, found.run, judgement, now)
            return
        drawn: Drawn = ""
        # the recompute must be ordered before the part is split off its task
        if judgement is not validation.SUSPENDED:
            drawn = self._recomputes.order(conn, row, found.run)
        submissions.through(conn, row, task, now)
        self._take(conn, row, found, judgement, drawn)

    def _take(
        self,
        conn: Connection,
        row: ContributionRow,
        found: Background,
        judgement: Judgement,
        drawn: Drawn,
    ) -> None:
        """Post the pending credit of an accepted contribution; kinds that are never merged are paid
        at once.
        """
        now, accepted, lost_to = self._clock.now(), judgement.state == "accepted", found.lost_to
        if accepted:
            who, price = row.volunteer_id, row.price_micro
            lost_to = accounts.set_trust(conn, who, GAIN, accepted_micro=price)
        payments.post_pending_many(conn, [payments.Payment.of(row)], now)
        if judgement is validation.SUSPENDED:
            escrow.withhold(conn, [row], now)
            return
        if drawn and accepted and not row.vetted:
            contributions.wait_for_proof(conn, row.id)
        never = drawn == "never" and not found.invited
        if never or row.id <= lost_to:
            escrow.withhold(conn, [row], now)
            verdicts.unpaid(conn, [row.id], NEVER if never else escrow.LOST)
        elif not accepted:
            escrow.pay(conn, [row], now)

    def _judge(
        self,
        conn: Connection,
        row: ContributionRow,
        found: Background,
        plan: Plan,
        measured: Measurement,
    ) -> Judgement:
        """Judge a contribution, its content first: good but superseded work is paid. `plan` is the
        plan at the head.
        """
        run = found.run
        about = definition(run)
        comparable = about.workload.traits.loss_is_measured
        effort = _effort(about, run, row.kind, found.global_step, row.steps)
        evidence = Evidence(
            submit=decode(row.report, SubmitRequest),
            measurement=measured,
            task_steps=row.steps,
            task_samples=row.samples,
            head=run.head,
            base_version=row.base_version,
            trust=found.trust,
            effort=effort,
            cohort=_cohort(conn, about, run, row.kind, effort),
            loss=found.loss if comparable else None,
            parameters=about.parameters,
            replayed=found.replayed,
        )
        file, then = about.file, in_phase(about.plan, found.phase)
        judgement = validation.judge(evidence, file.validation, file.train, then)
        if judgement.state == "accepted" and run.state not in OPEN:
            return validation.TOO_LATE
        if judgement.state == "accepted" and row.kind != plan.update:
            message = f"the run merges another kind of update by now; {verdicts.PAID}"
            return Judgement(state="superseded", reason=Reason.STALE, message=message)
        return judgement

    def _too_late(self, conn: Connection, row: ContributionRow, run: RunRow) -> None:
        """Refuse an overtaken update and have it recomputed from the newer version, a few times;
        then its task fails.
        """
        now, limit = self._clock.now(), REDO_MAX
        again = row.tries < limit
        message = (
            f"version {run.head} was merged meanwhile: compute it once more from there, "
            f"{row.tries + 1} of {limit}: nothing is counted against you"
            if again
            else f"submitted {limit + 1} times after the next version: the task has failed"
        )
        stale = Reason.STALE.value
        verdicts.decide(conn, row, "rejected", now=now, reason=stale, message=message)
        if again:
            submissions.once_more(conn, row, now)
        else:
            put_back(conn, row, run, "failure", message, now)

    def _reject(
        self, conn: Connection, row: ContributionRow, run: RunRow, judgement: Judgement, now: float
    ) -> None:
        """Reject a contribution and requeue its task; only bad content counts as a failure."""
        at_fault = judgement.reason not in NO_FAULT
        kind: FailureKind | None = "failure" if at_fault else None
        put_back(conn, row, run, kind, judgement.message, now)
        if at_fault and judgement.certain:
            accounts.set_trust(conn, row.volunteer_id, LOSS)

    async def recheck(self) -> int:
        """Decide the contributions that an earlier process left unchecked; return their number."""
        left = await self._db.read(
            lambda conn: contributions.in_state(conn, "checking", limit=RECHECK_MAX)
        )
        for row in left:
            with suppress(VolunteerError):  # logged; the others are still decided
                await self._check(row)
        return len(left)

    async def verdict(self, principal: Principal, contribution_id: int) -> Verdict:
        """Return the state of a contribution of this volunteer. Raises NotFound."""
        return await self._db.read(lambda conn: self.stands(conn, principal, contribution_id))

    def stands(
        self,
        conn: Connection,
        principal: Principal,
        contribution_id: int,
        newest: Sequence[Verdict] = (),
    ) -> Verdict:
        """Return the state of a contribution of this volunteer, from its worker's newest verdicts
        if it is among them. Raises NotFound.
        """
        told = [each for each in newest if each.contribution == contribution_id]
        if told and told[-1].reason != Reason.STALE:
            return told[-1]
        row = contributions.by_id(conn, contribution_id, principal.volunteer_id)
        verdict = verdicts.latest_verdict(conn, row.id)
        if verdict is not None:
            redo = verdict.reason == Reason.STALE and submissions.goes_on(conn, row)
            return replace(verdict, redo=redo)
        return Verdict(
            contribution=row.id,
            task=row.task_id,
            run=runs.by_id(conn, row.run_id).name,
            state=row.state,
            at=row.received_at,
        )

    async def history(
        self, principal: Principal, before: int | None, limit: int = 50
    ) -> list[tuple[int, Verdict]]:
        """Return this volunteer's verdicts, newest first; each number continues the listing."""
        limit = max(1, min(limit, HISTORY_MAX))
        return await self._db.read(
            lambda conn: verdicts.history(conn, principal.volunteer_id, before, limit)
        )


def _cohort(
    conn: Connection, about: Definition, run: RunRow, kind: str, effort: float
) -> list[float]:
    """Return the norms by effort of volunteers with recently accepted vetted work, one for each."""
    most, total = validation.COHORT, about.total_steps(run)
    peers = contributions.cohort(conn, run.id, kind, COHORT_ROWS * most)

    def norm(peer: PeerContribution) -> float:
        its = validation.effort(kind, about.file.train, peer.global_step, peer.steps, total)
        return validation.by_effort(peer.norm, its, effort)

    return validation.voices(peers, most, norm)


def _values(
    principal: Principal, task: TaskRow, request: SubmitRequest, part: NextPart, now: float
) -> dict[str, Any]:
    """Return the values of a submission to store, except kind and base."""
    return {
        "run_id": task.run_id,
        "task_id": task.id,
        "attempt": request.attempt,
        "part": request.part,
        "tries": request.tries,
        "worker_id": principal.worker_id,
        "volunteer_id": principal.volunteer_id,
        "digest": digest(canonical(msgspec.to_builtins(request))),
        "codec": request.codec,
        "sha256": request.sha256,
        "size": request.size,
        "steps": part.steps,
        "samples": part.samples,
        "price_micro": part.price_micro,
        "loss_first": request.loss_first,
        "loss_last": request.loss_last,
        "train_s": max(0.0, min(request.train_s, now - (task.begun_at or now))),
        "norm": None,
        "clip": 1.0,
        "weight": None,
        "state": "checking",
        "reason": "",
        "message": "",
        "version": None,
        "report": msgspec.json.encode(request).decode(),
        "received_at": now,
        "decided_at": None,
        "merged_at": None,
    }


def _is_late(row: ContributionRow, run: RunRow, plan: Plan) -> bool:
    """Return True if a gradient's version is too old for a run that merges one at a time."""
    gap = run.head - row.base_version
    return row.kind == "gradient" and plan.in_flight == "redo" and gap > plan.max_staleness


def _effort(about: Definition, run: RunRow, kind: str, first: int, steps: int) -> float:
    return validation.effort(kind, about.file.train, first, steps, about.total_steps(run))
