"""Intake of contributions: stored in one transaction, checked off the event loop, and decided in
another transaction.

    submit ── received durably (checking) ──> measured in a thread ──> accepted: pending credit, task done
                                                                  └──> rejected: reason, task back in the queue

A coordinator that dies in between finds the contribution in `checking` at its restart and decides
it then.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import structlog
from msgspec.structs import replace

from coordinator.batcher import Batcher
from coordinator.checking.audits import Audits
from coordinator.checking.recompute_queue import DrawChoice, Recomputes
from coordinator.compute import Compute
from coordinator.database import (
    contributions,
    recomputes,
    runs,
    submissions,
    tasks,
    upload_rows,
    verdicts,
)
from coordinator.database import volunteers as accounts
from coordinator.database.contributions import UPDATES as MERGED
from coordinator.database.contributions import ContributionRow, PeerContribution
from coordinator.database.ledger import escrow, payments
from coordinator.database.runs import OPEN, RunRow
from coordinator.database.submissions import Arrival, Background, EndedPart
from coordinator.database.tasks import FailureKind, TaskRow
from coordinator.experience.harvest import Harvest
from coordinator.platform import Platform, PlatformService
from coordinator.rules import codec_choice, validation
from coordinator.rules.audits import AUDIT
from coordinator.rules.validation import Evidence, Judgement, Measurement
from coordinator.runs import member_figures
from coordinator.runs.definition import Definition, definition
from coordinator.runs.settlement import put_back
from coordinator.scheduling.lease_message import UPDATES
from coordinator.storage.blobs import DamagedBlob
from coordinator.traffic import SLOW_S, Durations
from shared.decoding import decode
from shared.errors import BadRequest, Conflict, OffsetMismatch, UnknownTask, VolunteerError
from shared.proofs.signing import canonical, digest
from shared.protocol.base import Reason
from shared.protocol.contributions import SubmitRequest, Verdict
from shared.protocol.limits import PARTS_MAX, TRIES_MAX
from shared.tensors.codec import codec
from shared.workloads.experience import warm_start

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.accounts.accounts import Principal

log = structlog.get_logger("intake")

HISTORY_PAGE = 50  # verdicts in one reply
RECHECK_MAX = 100
BATCH_MAX = 64  # contributions in one transaction
REDO_MAX = 3  # times that a late gradient may be computed again; then its task fails
COHORT_ROWS = 4  # rows that are read for each volunteer of the cohort
# Reasons that do not count against the task.
NO_FAULT = frozenset({Reason.STALE.value, Reason.CANCELLED.value, Reason.RUN_ENDED.value})

LOST = Judgement(
    state="rejected",
    reason=Reason.CANCELLED.value,
    message="its task was taken back meanwhile: nothing is counted against you",
)
DAMAGED = Judgement(
    state="rejected",
    reason=Reason.CANCELLED.value,
    message="the object store does not give its bytes back: nothing is counted against you",
)


NEVER = (
    "not paid: its task cannot be done again, so nothing can prove it; ask the organiser to vouch "
    "for you"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examiners:
    """Services with which the intake examines contributions."""

    harvest: Harvest
    recomputes: Recomputes
    audits: Audits


_Received = tuple[ContributionRow, bool]  # a contribution, and whether it is new
_Measured = tuple[ContributionRow, Measurement]


class Intake(PlatformService):
    """Receives, checks and decides contributions."""

    def __init__(self, on: Platform, examiners: Examiners) -> None:
        super().__init__(on)
        self._attendance = on.attendance
        self._recomputes = examiners.recomputes
        self._harvest = examiners.harvest
        self.audits = examiners.audits
        self._under_way: dict[int, asyncio.Task[None]] = {}  # running checks, by contribution
        self.durations = Durations(SLOW_S)  # duration of submissions with their check
        self.decided: Counter[tuple[str, str, str]] = Counter()  # run, state, reason
        # submissions of one task are received in turn, so that a repeat finds the first one
        self._arriving = Batcher(self._receive_all, BATCH_MAX, key=lambda each: each.task_id)
        self._deciding = defaultdict[int, Batcher[_Measured, None]](self._decider)  # keyed by run
        self._abouts: dict[int, Definition] = {}  # unchanging definition of each run, read once

    async def submit(
        self, principal: Principal, task_id: int, request: SubmitRequest
    ) -> tuple[int, bool]:
        """Store and check one contribution; return its number, and whether it is new.

        A submission with the same key and content is always the same contribution. Raises
        UnknownTask for another account's task, Gone if another worker holds it by now, Cancelled if
        its run has ended, Conflict for other content, OffsetMismatch for missing bytes, BadRequest.
        """
        if not (0 <= request.part < PARTS_MAX and 0 <= request.tries < TRIES_MAX):
            raise BadRequest("part or tries is out of range")
        codec(request.codec)
        with self.durations.timed():
            row, fresh = await self._arriving.ask(_Submission(principal, task_id, request))
            if fresh:
                self._attendance.count_trained(row.run_id, row.train_s)
                if row.kind == "experience":  # counted now, since episodes are never merged
                    self._attendance.count_merged(row.run_id, row.train_s)
            if row.state == "checking":
                await self._check(row)
            elif row.state == "rejected":
                self._signals.notify("queue")
        if request.heldout is not None:
            owner, sums = (principal.volunteer_id, principal.worker_id), request.heldout
            await self._db.write(
                lambda conn: member_figures.record_loss(conn, row.run_id, owner, sums)
            )
        return row.id, fresh

    def count(self, verdict: Verdict) -> None:
        """Count a verdict for the metrics, once, at the first submission of its contribution."""
        self.decided[verdict.run, verdict.state, verdict.reason] += 1

    async def _receive_all(self, asked: Sequence[_Submission]) -> list[_Received | Exception]:
        return await self._db.write(lambda conn: self._receive(conn, asked))

    def _receive(
        self, conn: Connection, asked: Sequence[_Submission]
    ) -> list[_Received | Exception]:
        """Store new contributions; return each contribution and whether it is new, or an error."""
        # locked first, since the same request may be sent twice at once
        tasks_by_id = tasks.holders(conn, [each.task_id for each in asked])
        arrivals = submissions.arrivals(conn, [each.named for each in asked])
        numbers = [a.contribution_id for a in arrivals.values() if a.contribution_id is not None]
        earlier = {row.id: row for row in contributions.by_ids(conn, numbers)} if numbers else {}
        run_ids = {task.run_id for task in tasks_by_id.values()}
        runs_by_id = {run_id: runs.by_id(conn, run_id) for run_id in run_ids}
        answers: list[_Received | Exception | None] = []
        new: list[dict[str, Any]] = []
        for place, each in enumerate(asked):
            task, arrival = tasks_by_id.get(each.task_id), arrivals[place]
            try:
                if task is None:
                    raise UnknownTask(f"there is no task {each.task_id} of yours")
                if arrival.contribution_id is not None:
                    answers.append((each.same(earlier[arrival.contribution_id]), False))
                    continue
                run = runs_by_id[task.run_id]
                new.append(_values(each, task, arrival, run, self._clock.now()))
                answers.append(None)
            except VolunteerError as error:
                answers.append(error)
        upload_rows.remove(conn, [values.pop("upload") for values in new])
        last = [values["task_id"] for values in new if values.pop("last")]
        rows = contributions.add(conn, new, last)
        for row in list(rows.values()):
            run = runs_by_id[row.run_id]
            if _is_late(row, run):
                self._too_late(conn, row, run)
                rows[row.task_id] = contributions.by_id(conn, row.id)
        return [
            (rows[each.task_id], True) if answer is None else answer
            for each, answer in zip(asked, answers, strict=True)
        ]

    async def _check(self, row: ContributionRow) -> None:
        """Check a contribution once for all requests; cancelling a request does not stop it."""
        under_way = self._under_way.get(row.id)
        if under_way is None:
            under_way = asyncio.create_task(self._check_once(row))
            self._under_way[row.id] = under_way
        await asyncio.shield(under_way)

    async def _check_once(self, row: ContributionRow) -> None:
        try:
            await self._examine(row)
        except Exception as error:
            log.warning("check failed", contribution=row.id, error=str(error))
            raise
        finally:
            del self._under_way[row.id]
        self._signals.notify("contributions")
        self._signals.notify("queue")

    async def _examine(self, row: ContributionRow) -> None:
        """Check and decide a contribution by the service for its kind."""
        if row.kind in MERGED:
            await self._measure(row)
        elif row.kind == AUDIT:
            await self.audits.check(row)
        elif Compute.possible():  # else a server with PyTorch decides it in its recheck
            await self._harvest.check(row)

    async def _measure(self, row: ContributionRow) -> None:
        about = self._abouts.get(row.run_id)
        if about is None:
            run = await self._db.read(lambda conn: runs.by_id(conn, row.run_id))
            about = self._abouts[row.run_id] = definition(run)
        granted = codec_choice.grantable(about.plan)
        if row.codec in granted:
            measured = await self._measurement(row, about)
        else:
            measured = Measurement(
                problem=f'the update is encoded as "{row.codec}", which this run does not accept; '
                f"accepted: {', '.join(sorted(granted))}"
            )
        await self._deciding[row.run_id].ask((row, measured))

    async def _measurement(self, row: ContributionRow, about: Definition) -> Measurement:
        try:
            path = await self._blobs.local(row.sha256)
        except DamagedBlob:
            return Measurement(damaged=True)
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, validation.measure, path, about.schema, row.codec
        )

    def _decider(self) -> Batcher[_Measured, None]:
        """Return a batcher that decides the contributions of a run. It decides contributions of one
        account one after the other, since the chance of a draw depends on the account's earlier
        contributions.
        """
        return Batcher(self._decide_all, BATCH_MAX, key=lambda each: each[0].volunteer_id)

    async def _decide_all(self, asked: Sequence[_Measured]) -> list[None]:
        run_id = asked[0][0].run_id
        if await self._db.write(lambda conn: self._decide(conn, run_id, asked)):
            self._recomputes.wake()
        if (least := self._abouts[run_id].members_min) > 1:
            await self._wake_members(run_id, least, {row.worker_id for row, _ in asked})
        return [None] * len(asked)

    async def _wake_members(self, run_id: int, least: int, workers: Collection[str]) -> None:
        """Wake the claims of the workers of decided updates in a run that mixes members, and the
        claims that wait for members once there are enough.
        """
        read = partial(contributions.waiting_accounts, run_id=run_id, limit=least)
        topics = [f"worker:{worker}" for worker in sorted(workers)]
        if len(await self._db.read(read)) >= least:
            topics.append(f"run:{run_id}")
        for topic in topics:
            self._signals.notify(topic)

    def _decide(self, conn: Connection, run_id: int, asked: Sequence[_Measured]) -> bool:
        """Decide measured contributions of a run in one transaction; return True if a recompute was
        ordered.
        """
        now, measured = self._clock.now(), {row.id: measurement for row, measurement in asked}
        if self._abouts[run_id].plan.in_flight == "redo":  # the head must not change any more
            runs.by_id(conn, run_id, lock=True)
        # their standings are read below: they may be suspended or banned while this waits for them
        accounts.lock(conn, {row.volunteer_id for row, _ in asked})
        # The rows are locked: after a restart both the sender and the recheck may decide.
        rows = contributions.undecided(conn, measured)
        backgrounds = submissions.backgrounds(conn, rows)
        tasks_by_row = submissions.tasks_of(conn, rows)
        judged: list[tuple[ContributionRow, Judgement]] = []
        most = COHORT_ROWS * validation.COHORT
        peers = {
            kind: contributions.cohort(conn, run_id, kind, most)
            for kind in sorted({row.kind for row in rows})
        }
        at_members = self._abouts[run_id].at_members
        for row in rows:
            background, task = backgrounds[row.id], tasks_by_row.get(row.id)
            judgement = _judge(row, background, measured[row.id], peers[row.kind])
            judgement = validation.excluded(
                judgement, background.state, background.standing, at_members=at_members
            )
            # a cancelled task: its run ended after the row was read
            if judgement.state == "accepted" and task is not None and task.state == "cancelled":
                judgement = validation.TOO_LATE
            if judgement.reason == Reason.STALE and _is_late(row, background.run):
                self._too_late(conn, row, background.run)
            else:
                judged.append((row, LOST if task is None else judgement))
        decided = [(row, each.columns(measured[row.id])) for row, each in judged]
        verdicts.decide_all(conn, decided, now)
        taken = list[_Taken]()
        is_any_ordered = False
        for row, judgement in judged:
            if row.id not in tasks_by_row:
                continue
            run = backgrounds[row.id].run
            if judgement.state == "rejected":
                is_any_ordered |= self._recomputes.order_refused(conn, row, run, judgement.reason)
                self._reject(conn, row, run, judgement, now)
                continue
            drawn: DrawChoice = ""
            # the recompute must be ordered before the part is split off its task
            if judgement is not validation.SUSPENDED:
                drawn = self._recomputes.order(conn, row, run)
            is_any_ordered |= drawn == "drawn"
            taken.append(_Taken(row, backgrounds[row.id], judgement, drawn))
        parts = [
            EndedPart(row=each.row, task=tasks_by_row[each.row.id], accepted=each.accepted)
            for each in taken
        ]
        submissions.advance(conn, parts, now)
        self._take(conn, taken)
        return is_any_ordered

    def _take(self, conn: Connection, taken: Sequence[_Taken]) -> None:
        """Count the accepted contributions, and post the pending credit of all that were not
        rejected; superseded ones are paid at once.
        """
        now = self._clock.now()
        accepted = [
            (each.row.volunteer_id, each.row.price_micro) for each in taken if each.accepted
        ]
        accounts.count_accepted(conn, accepted)
        payments.post_step(conn, "pending", [payments.Payment.of(each.row) for each in taken], now)
        withheld: dict[str, list[ContributionRow]] = {}
        paid: list[ContributionRow] = []
        strangers = {each.row.volunteer_id for each in taken if not each.row.vetted}
        open_draws = recomputes.oldest_open(conn, strangers) if strangers else {}
        for each in taken:
            row = each.row
            if each.judgement is validation.SUSPENDED:
                withheld.setdefault("", []).append(row)
                continue
            is_behind_draw = open_draws.get(row.volunteer_id, row.id + 1) <= row.id
            if (each.drawn or is_behind_draw) and each.accepted and not row.vetted:
                contributions.wait_for_proof(conn, row.id)
            if each.drawn == "never" and not each.background.invited:
                withheld.setdefault(NEVER, []).append(row)
            elif not each.accepted:
                paid.append(row)
        for why, unpaid in withheld.items():
            escrow.withhold(conn, unpaid, now)
            if why:
                ids = [row.id for row in unpaid]
                verdicts.note_unpaid(conn, ids, why, ("accepted", "superseded"))
        escrow.pay(conn, paid, now)

    def _too_late(self, conn: Connection, row: ContributionRow, run: RunRow) -> None:
        """Refuse an overtaken update and have it computed again from the newer version, a few
        times; then its task fails.
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
            submissions.extend_for_retry(conn, row, now)
        else:
            put_back(conn, row, run, "failure", message, now)

    def _reject(
        self, conn: Connection, row: ContributionRow, run: RunRow, judgement: Judgement, now: float
    ) -> None:
        """Requeue the task of a rejected contribution; only bad content counts as a failure."""
        kind: FailureKind | None = None if judgement.reason in NO_FAULT else "failure"
        put_back(conn, row, run, kind, judgement.message, now)

    async def recheck(self) -> int:
        """Decide the contributions that an earlier process left unchecked; return their number."""
        count = newest = 0
        while rows := await self._db.read(
            partial(contributions.unchecked, after=newest, limit=RECHECK_MAX)
        ):
            for row in rows:
                with suppress(Exception):  # logged; the others are still decided
                    await self._check(row)
            count, newest = count + len(rows), rows[-1].id
        return count

    def stands(
        self,
        conn: Connection,
        principal: Principal,
        contribution_id: int,
        newest: Sequence[tuple[int, Verdict]] = (),
    ) -> Verdict:
        """Return the verdict on a contribution of this volunteer, without a query if it is in
        `newest`. Raises NotFound.
        """
        own = [verdict for _, verdict in newest if verdict.contribution == contribution_id]
        if own and own[-1].reason != Reason.STALE:
            return own[-1]
        row = contributions.by_id(conn, contribution_id, principal.volunteer_id)
        verdict = verdicts.latest_verdict(conn, row.id)
        if verdict is not None:
            redo = verdict.reason == Reason.STALE and submissions.may_retry(conn, row)
            return replace(verdict, redo=redo)
        return Verdict(
            contribution=row.id,
            task=row.task_id,
            run=runs.by_id(conn, row.run_id).name,
            state=row.state,
            at=row.received_at,
        )

    async def history(self, principal: Principal, before: int | None) -> list[tuple[int, Verdict]]:
        """Return this volunteer's verdicts, newest first, each with the next page's `before`."""
        return await self._db.read(
            lambda conn: verdicts.history(conn, principal.volunteer_id, before, HISTORY_PAGE)
        )


class _Taken(NamedTuple):
    """Contribution whose verdict is not "rejected"."""

    row: ContributionRow
    background: Background
    judgement: Judgement
    drawn: DrawChoice

    @property
    def accepted(self) -> bool:
        return self.judgement.state == "accepted"


def _judge(
    row: ContributionRow,
    background: Background,
    measured: Measurement,
    peers: Sequence[PeerContribution],
) -> Judgement:
    """Judge a contribution by its content first, so that good work is paid even if it is too late
    to merge. `peers` are the run's recent contributions of vetted volunteers.
    """
    if measured.damaged:
        return DAMAGED
    run, about = background.run, definition(background.run)
    train, total = about.file.train, about.total_steps(run)
    effort = validation.effort(row.kind, train, background.global_step, row.steps, total)

    def norm(peer: PeerContribution) -> float:
        peer_effort = validation.effort(
            row.kind, about.file.train, peer.global_step, peer.steps, total
        )
        return validation.by_effort(peer.norm, peer_effort, effort)

    evidence = Evidence(
        submit=decode(row.report, SubmitRequest),
        measurement=measured,
        task_steps=row.steps,
        task_samples=row.samples,
        head=run.head,
        base_version=row.base_version,
        effort=effort,
        # A limit set by other members' updates would reveal something of them; with noise `clip`
        # limits every update alike.
        cohort=() if about.file.privacy.on else validation.voices(peers, validation.COHORT, norm),
        # members' own data may be far from the organiser's example
        loss=background.loss
        if about.declaration.measure == "loss" and not about.at_members
        else None,
        parameters=about.parameters,
        replayed=background.replayed,
    )
    pacing = about.pacing
    if pacing and background.global_step < warm_start(train, pacing.warm_steps):
        train = msgspec.structs.replace(train, lr=pacing.warm_lr)
    judgement = validation.judge(evidence, about.file.validation, train, about.plan)
    if judgement.state == "accepted" and run.state not in OPEN:
        return validation.TOO_LATE
    return judgement


class _Submission(NamedTuple):
    """Request to submit a contribution."""

    principal: Principal
    task_id: int
    request: SubmitRequest

    @property
    def named(self) -> tuple[str, str, int, SubmitRequest]:
        return self.principal.volunteer_id, self.principal.worker_id, self.task_id, self.request

    @property
    def digest(self) -> str:
        return digest(canonical(msgspec.to_builtins(self.request)))

    def same(self, earlier: ContributionRow) -> ContributionRow:
        """Return the contribution that was submitted before. Raises UnknownTask, Conflict."""
        if earlier.volunteer_id != self.principal.volunteer_id:
            raise UnknownTask(f"there is no task {self.task_id} of yours")
        if earlier.digest != self.digest:
            raise Conflict(f"task {self.task_id} was submitted before with other content")
        return earlier


def _values(
    submission: _Submission, task: TaskRow, arrival: Arrival, run: RunRow, now: float
) -> dict[str, object]:
    """Return the row of a new submission, with `last`, True for the last part of its task, and the
    `upload` that it uses up. Raises the errors of `Intake.submit`.
    """
    request, principal = submission.request, submission.principal
    plan = definition(run).plan
    tasks.may_submit(task, principal.worker_id, request.attempt)
    if task.base_version is None:
        raise Conflict(f"task {task.id} has not begun: there is no base version yet")
    part = submissions.expect(task, request, arrival)
    base = task.base_version
    # a worker that begins parts from newer versions reports which one this part began from
    if task.part_steps or plan.pull_every:
        base = min(base, max(0, request.base_version))
    if arrival.upload is None:
        raise OffsetMismatch(
            f"the bytes {request.sha256[:12]}... were not uploaded for task {task.id}: begin "
            "the upload again"
        )
    return {
        "run_id": task.run_id,
        "task_id": task.id,
        "attempt": request.attempt,
        "part": request.part,
        "tries": request.tries,
        "worker_id": principal.worker_id,
        "volunteer_id": principal.volunteer_id,
        "digest": submission.digest,
        "kind": AUDIT
        if task.kind == AUDIT
        else UPDATES.get(task.kind) or task.update_kind or plan.update,
        "codec": request.codec,
        "sha256": request.sha256,
        "size": request.size,
        "base_version": base,
        "steps": part.steps,
        "samples": part.samples,
        "price_micro": part.price_micro,
        "loss_first": request.loss_first,
        "loss_last": request.loss_last,
        "train_s": max(0.0, min(request.train_s, now - (task.begun_at or now))),
        "clip": 1.0,
        "state": "checking",
        "reason": "",
        "message": "",
        "report": msgspec.json.encode(request).decode(),
        "received_at": now,
        "vetted": arrival.standing == "vetted",
        "network": arrival.network,
        "last": part.last,
        "upload": arrival.upload,
    }


def _is_late(row: ContributionRow, run: RunRow) -> bool:
    """Return True for a gradient from too old a version, in a run that has these computed again."""
    plan, gap = definition(run).plan, run.head - row.base_version
    return row.kind == "gradient" and plan.in_flight == "redo" and gap > plan.max_staleness
