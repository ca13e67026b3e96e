"""Claims of waiting workers; claims that arrive during a transaction join the next one.

Many claims thus cost few more statements than one, and only committed leases are sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import msgspec

from coordinator.accounts import suspension
from coordinator.batcher import Batcher
from coordinator.database import audits, claim_rows, contributions, lease_grants, passes
from coordinator.database.audits import AuditLease
from coordinator.database.claim_rows import Abilities, ClaimView, Rights, StateLine
from coordinator.database.lease_grants import NewLease
from coordinator.database.members import member_rows
from coordinator.database.tasks import TaskRow
from coordinator.rules import secret_codes
from coordinator.rules.audits import AUDIT, AccountMarks, Auditor
from coordinator.rules.dispatch import (
    Assignment,
    DispatchResult,
    FairShares,
    OpenTasks,
    Refusal,
    dispatch,
)
from coordinator.rules.draws import FLOOR, device_kind
from coordinator.rules.eligibility import Todo, Waiter
from coordinator.rules.placement import Machines
from coordinator.rules.standing import PROBATION_LEASES
from coordinator.rules.standstill_causes import PauseFacts, RunFacts, standstill
from coordinator.rules.task_size import Run, RunPace, StepsAndTokens, round_in_work, work_of
from coordinator.scheduling import lease_message
from coordinator.scheduling.lease_message import JobBase, Spec
from coordinator.traffic import Durations
from shared.errors import (
    BadRequest,
    Banned,
    InvalidRunFile,
    NotFound,
    Unauthorized,
    VolunteerError,
)
from shared.protocol.base import Reason
from shared.protocol.leases import ClaimReply, ClaimRequest, IdleReply, Lease
from shared.protocol.limits import LONG_POLL_S_MAX
from shared.text import counted

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.accounts.accounts import Principal
    from coordinator.config import Settings
    from coordinator.database.engine.open_database import Database
    from coordinator.scheduling.renewals import Renewals
    from coordinator.signals import Signals
    from shared.clock import Clock

BATCH_MAX = 256  # claims in one transaction
SPREAD = 0.5  # a claim may end early by up to this share of its wait
# tasks read besides two for each waiter, since waiters may have failed some of them before
TODO_SPARE = 32
ABLE_S = 30.0  # time for which a worker's workloads, devices and speed are cached
WORKERS_MAX = 100_000
LOOK_AGAIN_S = 0.05  # time until tasks are looked at that another transaction has locked
PACE_S = 30.0  # time for which a run's measured pace is cached
CLAIM_ID = re.compile(r"[!-~]{1,64}")
DEVICE = re.compile(r"[a-z0-9][a-z0-9:_.-]{0,31}")
NAMES_MAX = 64
FLOPS_MAX = 1e24
SUSPENDED_S = 30.0  # interval at which a suspended worker asks again
RETRY_S = {
    Reason.NO_RUN: 5.0,
    Reason.NO_FIT: 30.0,
    Reason.RUN_PAUSED: 10.0,
    Reason.RUN_ENDED: 60.0,
    Reason.IN_FLIGHT: 1.0,
    Reason.ALL_TAKEN: 0.5,
    Reason.MERGING: 1.0,
}
# Claims refused for these reasons wait in a line, and new work wakes them one after the other; the
# topics of `_topics` wake the others.
IN_LINE = (Reason.ALL_TAKEN, Reason.MERGING)
WAKES = {Reason.IN_FLIGHT: ("volunteers", "queue")}

Answer = Lease | Refusal


class _WorkerFacts(msgspec.Struct, frozen=True):
    """Facts about a worker, cached for a while."""

    until: float = 0.0
    able: Abilities = Abilities()
    paces: dict[tuple[str, int], float] = {}  # seconds a step, for an uninvited worker


@dataclass(slots=True)
class _ClaimResults:
    """Results of one transaction, by the claim's key."""

    rows: dict[str, TaskRow]
    refusals: dict[str, Refusal] = field(default_factory=dict)
    shut_out: dict[str, VolunteerError] = field(default_factory=dict)
    runs: dict[int, JobBase] = field(default_factory=dict)
    audits: Mapping[int, AuditLease] = field(default_factory=dict)  # audits, by task
    fresh: set[str] = field(default_factory=set)  # claims answered with a new lease
    more: bool = False
    passed_over: bool = False  # tasks that another transaction has locked were not looked at
    open: int = 1  # tasks, and samples without a task, that may be left
    remaining: frozenset[int] | None = None  # see `DispatchResult`; None = unknown
    leased: Counter[int] = field(default_factory=Counter)  # operations by run


class ClaimTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Terms of one server for its leases."""

    leases_max: int  # most leases of one volunteer
    contact: str = ""
    drawn: float = 0.0  # least drawn share of the contributions of any run

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the terms of a server with these settings."""
        return cls(
            leases_max=settings.max_volunteer_leases,
            contact=settings.contact,
            drawn=FLOOR if settings.open else 0.0,
        )


class Claims:
    """Answers claims, many in one transaction."""

    def __init__(
        self,
        db: Database,
        clock: Clock,
        signals: Signals,
        renewals: Renewals,
        terms: ClaimTerms,
    ) -> None:
        self._db = db
        self._clock = clock
        self._signals = signals
        self._line = signals.line("queue")
        self._renewals = renewals
        self._terms = terms
        self.batcher: Batcher[Waiter, Answer] = Batcher(self._serve, BATCH_MAX)
        self._specs: dict[int, Spec] = {}
        self._runs = signals.watch("runs")
        self._paces: dict[int, tuple[float, RunPace | None]] = {}
        self._workers: dict[str, _WorkerFacts] = {}  # cached facts by worker
        self._shares = FairShares()
        self._machines = Machines()
        self.durations = Durations()  # durations of transactions, one for all claims that joined it
        self.leases: Counter[str] = Counter()  # leases given, by run
        self.waiting = 0  # unanswered claims

    async def claim(self, principal: Principal, request: ClaimRequest) -> ClaimReply:
        """Return a lease as soon as there is one for this worker, or within `wait_s` the reason why
        there is none.

        The same `claim_id` gets the same lease while it lives. Raises BadRequest, and Banned or
        Unauthorized if the worker was banned while it waited.
        """
        _check(request)
        self._renewals.note_alive(principal.worker_id)
        waiter = _waiter(principal, request)
        wait_s = max(0.0, min(request.wait_s, LONG_POLL_S_MAX)) * _spread(request.claim_id)
        until = self._clock.monotonic() + wait_s
        watch = self._signals.watch()
        self.waiting += 1
        try:
            while True:
                answer = await self.batcher.ask(waiter)
                if isinstance(answer, Lease):
                    return ClaimReply(lease=answer)
                left_s = until - self._clock.monotonic()
                line = self._line if answer.reason in IN_LINE else None
                watch.topics = _topics(answer, principal.worker_id)
                if left_s <= 0 or not await watch.wait(left_s, line):
                    return ClaimReply(idle=_idle(answer))
        except asyncio.CancelledError:
            self._line.leave()
            raise
        finally:
            self.waiting -= 1

    async def _serve(self, asking: Sequence[Waiter]) -> list[Answer | Exception]:
        """Return leases, refusals or errors, committed; a lease whose reply is lost is found again
        by its claim_id.
        """
        now = self._clock.now()
        since = self._signals.moment
        self._line.begin_look()
        if await self._runs.wait(0):  # a run may have been extended
            self._specs.clear()
        speaks = {waiter.claim_id: waiter for waiter in asking}  # a claim sent twice counts as one
        waiters = list(speaks.values())
        with self.durations.timed():
            served = await self._db.write(lambda conn: self._transact(conn, waiters, now))
        self._shares.note(served.leased)
        answers: dict[str, Answer | Exception] = {**served.refusals, **served.shut_out}
        for claim_id, row in served.rows.items():
            self._renewals.hold(row)
            run, waiter = served.runs[row.run_id], speaks[claim_id]
            self.leases[run.spec.name] += claim_id in served.fresh
            audited = served.audits.get(row.id)
            lease = lease_message.lease(run, row, now, waiter.codecs)
            if audited is not None:
                lease = lease_message.audit(lease, audited)
            answers[claim_id] = lease
        self._line.end_look(since, served.open, served.remaining, took=bool(served.fresh))
        if served.more:
            self._signals.deliver("queue")
        elif served.passed_over:
            again = asyncio.get_running_loop().call_later
            again(LOOK_AGAIN_S, self._signals.deliver, "queue")
        return [answers[waiter.claim_id] for waiter in asking]

    def _transact(self, conn: Connection, waiters: Sequence[Waiter], now: float) -> _ClaimResults:
        todo_max = 2 * len(waiters) + TODO_SPARE
        view = claim_rows.view(conn, waiters, todo_max)
        view = self._readable(conn, view)
        served = _ClaimResults(rows=dict(view.live))
        fresh = [waiter for waiter in waiters if waiter.claim_id not in view.live]
        if fresh:
            rights = claim_rows.rights(conn, [waiter.worker_id for waiter in fresh])
            fresh = _entitled(fresh, rights, now, served, self._terms.contact)
            fresh = self._able(conn, fresh, rights, now, served)
        if fresh:
            self._hand_out(conn, view, fresh, now, served)
        if any(refusal.reason in IN_LINE for refusal in served.refusals.values()):
            homes = sorted({waiter.worker_id for waiter in waiters})
            served.passed_over = claim_rows.passes_over(conn, view, homes, todo_max)
        lines = {line.id: line for line in view.runs}
        for run_id in {row.run_id for row in served.rows.values()}:
            spec = self.spec(conn, run_id)
            line = lines.get(run_id) or claim_rows.live_run(conn, run_id)
            progress = StepsAndTokens(line.global_step, line.tokens)
            served.runs[run_id] = JobBase.of(spec, spec.plan, progress)
        served.audits = audits.works(
            conn, [row.id for row in served.rows.values() if row.kind == AUDIT]
        )
        return served

    def _readable(self, conn: Connection, view: ClaimView) -> ClaimView:
        """Return a view without the runs that no task of this server can be done for: their stored
        file is damaged, or their workload is not installed here.
        """
        broken = set()
        for run in view.runs:
            try:
                self.spec(conn, run.id)
            except (InvalidRunFile, NotFound):
                broken.add(run.id)
        if not broken:
            return view
        whole = (run for run in view.runs if run.id not in broken)
        todo = (task for task in view.todo if task.run_id not in broken)
        return msgspec.structs.replace(view, runs=tuple(whole), todo=tuple(todo))

    def _hand_out(
        self,
        conn: Connection,
        view: ClaimView,
        able: Sequence[Waiter],
        now: float,
        served: _ClaimResults,
    ) -> None:
        specs = {line.id: self.spec(conn, line.id) for line in view.runs}
        offers = {(run.id, run.home): run for run in self._offers(conn, view, able, now)}
        todo, able = with_audits(conn, view.todo, able)
        busy = [(holding.worker_id, holding.device) for holding in view.holdings if holding.count]
        self._machines.note_asking(able, busy, now)
        outcome = dispatch(
            able,
            offers.values(),
            OpenTasks(todo=todo, loads=view.loads, holdings=view.holdings),
            leases_max=self._terms.leases_max,
            bench=self._machines.bench(todo, now),
        )
        self._machines.note_reserved(outcome.reserved, now)
        for one in outcome.assignments:
            run = offers[one.run_id, one.home]
            served.leased[one.run_id] += round(work_of(run, one.price_micro))
            self._machines.note_assigned(run, one.price_micro, able[one.waiter])
        claim_rows.set_cursors(conn, outcome.moved)
        items = [
            _new_lease(one, able[one.waiter], specs[one.run_id], offers[one.run_id, one.home].seed)
            for one in outcome.assignments
        ]
        for row, item in zip(lease_grants.take(conn, items, now), items, strict=True):
            served.rows[item.waiter.claim_id] = row
            served.fresh.add(item.waiter.claim_id)
        states = _states(conn, outcome, able)
        for position, refusal in outcome.refusals.items():
            waiter = able[position]
            served.refusals[waiter.claim_id] = _explained(refusal, waiter, states)
        served.more, served.open = outcome.more, outcome.open
        served.remaining = outcome.remaining

    def _offers(
        self, conn: Connection, view: ClaimView, waiters: Sequence[Waiter], now: float
    ) -> list[Run]:
        """Return the running runs as dispatch sees them; a run on members' data once for each
        waiter.
        """
        lately = self._shares.lately({run.id: run.weight for run in view.runs}, now)
        specs = {line.id: self.spec(conn, line.id) for line in view.runs}
        accounts = {waiter.worker_id: waiter.volunteer_id for waiter in waiters}
        at_members = [run_id for run_id, spec in specs.items() if spec.at_members]
        rows = member_rows.of_workers(conn, at_members, sorted(accounts))
        offers: list[Run] = []
        for line in view.runs:
            spec, pace = specs[line.id], self.pace(conn, line.id, now)
            run = lease_message.offer(spec, line, pace, now, lately[line.id])
            if not spec.at_members:
                offers.append(run)
                continue
            waiting, least = frozenset[str](), spec.plan.min_contributions
            # read after the held tasks: a task has its update accepted while it is held, or later
            if least > 1:
                waiting = contributions.waiting_accounts(conn, line.id, least)
                run = msgspec.structs.replace(run, lacks=least - len(waiting))
            offers += lease_message.at_homes(run, accounts, rows, waiting)
        return offers

    def _able(
        self,
        conn: Connection,
        waiters: Sequence[Waiter],
        rights: Mapping[str, Rights],
        now: float,
        served: _ClaimResults,
    ) -> list[Waiter]:
        """Return the waiters with the workloads and limits of their machines; a waiter on a device
        that its machine never registered is refused.
        """
        self._learn(conn, [w for w in waiters if not self._is_known(w, now)], rights, now)
        able: list[Waiter] = []
        for waiter in waiters:
            facts = self._workers.get(waiter.worker_id, _WorkerFacts())
            if facts.able.devices and waiter.device not in facts.able.devices:
                served.refusals[waiter.claim_id] = Refusal(
                    reason=Reason.NO_FIT,
                    message=f"{waiter.device} is no device that this machine has registered",
                )
            else:
                able.append(_limited(waiter, rights.get(waiter.worker_id), facts, now))
        return able

    def _is_known(self, waiter: Waiter, now: float) -> bool:
        facts = self._workers.get(waiter.worker_id)
        if facts is None or facts.until < now:
            return False
        return not facts.able.devices or waiter.device in facts.able.devices

    def _learn(
        self,
        conn: Connection,
        waiters: Sequence[Waiter],
        rights: Mapping[str, Rights],
        now: float,
    ) -> None:
        """Read the registrations of machines and, for uninvited ones, their measured speed."""
        if not waiters:
            return
        if len(self._workers) > WORKERS_MAX:
            self._workers.clear()
        abilities = claim_rows.abilities(conn, {waiter.worker_id for waiter in waiters})
        for worker, able in abilities.items():
            vouched = worker not in rights or rights[worker].invited
            paces = {} if vouched else claim_rows.past_speeds(conn, worker)
            self._workers[worker] = _WorkerFacts(now + ABLE_S, able, paces)

    def spec(self, conn: Connection, run_id: int) -> Spec:
        """Return the part of a run that changes only if the organiser extends it, cached."""
        spec = self._specs.get(run_id)
        if spec is None:
            spec = self._specs[run_id] = lease_message.read_spec(conn, run_id)
        return spec

    def pace(self, conn: Connection, run_id: int, now: float) -> RunPace | None:
        """Return the pace of a run, cached for a while."""
        measured_at, pace = self._paces.get(run_id, (0.0, None))
        if now > measured_at + PACE_S:
            pace = passes.measure(conn, run_id)
            spec = self.spec(conn, run_id)
            if pace is not None and not (spec.file.task.local_steps or spec.pacing):
                in_work = round_in_work(spec.plan, pace, *passes.in_work(conn, run_id))
                pace = msgspec.structs.replace(pace, round=in_work)
            self._paces[run_id] = (now, pace)
        return pace


# --- a request and its answer ---


def _check(request: ClaimRequest) -> None:
    """Check a claim. Raises BadRequest."""
    if not CLAIM_ID.fullmatch(request.claim_id):
        raise BadRequest("claim_id must have 1 to 64 printable characters")
    if not DEVICE.fullmatch(request.device):
        raise BadRequest('device must be a name such as "cpu" or "cuda:0"')
    lists = (request.runs, request.kinds, request.codecs, request.libraries)
    if max(map(len, lists)) > NAMES_MAX:
        raise BadRequest(f"a claim may name {NAMES_MAX} runs, kinds, codecs or libraries at most")


def _spread(claim_id: str) -> float:
    """Return the share of its wait after which a claim is answered, which spreads the ends of
    claims that began together.
    """
    return 1.0 - SPREAD * zlib.crc32(claim_id.encode()) / 2**32


def _topics(refusal: Refusal, worker_id: str) -> tuple[str, ...]:
    """Return the topics that wake a claim that waits outside the line."""
    if refusal.run_id:  # each update of another member would wake all that wait for members
        return ("volunteers", "runs", f"run:{refusal.run_id}", f"worker:{worker_id}")
    return WAKES.get(refusal.reason, ("volunteers", "runs"))


def _waiter(principal: Principal, request: ClaimRequest) -> Waiter:
    return Waiter(
        claim_id=_key(principal.worker_id, request.claim_id),
        worker_id=principal.worker_id,
        volunteer_id=principal.volunteer_id,
        device=request.device,
        flops=min(FLOPS_MAX, max(0.0, request.step_flops)),
        memory_bytes=max(0, request.memory_bytes),
        host_bytes=max(0, request.host_bytes),
        runs=frozenset(request.runs),
        kinds=frozenset(request.kinds),
        codecs=frozenset(request.codecs),
        versions=request.workload_versions,
        libraries=frozenset(request.libraries),
        audits=request.audits,
    )


def _key(worker_id: str, claim_id: str) -> str:
    """Return a claim's key in the database, which includes the worker."""
    return hashlib.blake2b(f"{worker_id} {claim_id}".encode(), digest_size=32).hexdigest()


def _entitled(
    waiters: Sequence[Waiter],
    rights: Mapping[str, Rights],
    now: float,
    served: _ClaimResults,
    contact: str,
) -> list[Waiter]:
    """Return the waiters that may have work now; store the refusals of the others in `served`."""
    entitled: list[Waiter] = []
    for waiter in waiters:
        account = rights.get(waiter.worker_id)
        if account is not None and (account.banned or account.revoked):
            error = (
                Unauthorized(secret_codes.REVOKED)
                if account.revoked
                else Banned(secret_codes.BANNED)
            )
            served.shut_out[waiter.claim_id] = error
        elif account is not None and (refusal := _no_right(account, now, contact)) is not None:
            served.refusals[waiter.claim_id] = refusal
        else:
            entitled.append(waiter)
    return entitled


def _no_right(account: Rights, now: float, contact: str) -> Refusal | None:
    if account.standing == "suspended":
        why = suspension.explained(account.suspended_reason or "a check failed", contact)
        message = f"this account is suspended: {why}"
        return Refusal(reason=Reason.BANNED, message=message, retry_after_s=SUSPENDED_S)
    if account.rest_until > now:
        left_s = account.rest_until - now
        message = (
            f"the last {counted(account.unproven, 'check')} of this account's work proved nothing: "
            f"it gets work again in {left_s:.0f} s"
        )
        return Refusal(reason=Reason.IN_FLIGHT, message=message, retry_after_s=min(left_s, 300.0))
    return None


def _limited(waiter: Waiter, account: Rights | None, facts: _WorkerFacts, now: float) -> Waiter:
    """Return the waiter with its machine's abilities and its account's limits."""
    vouched = account is None or account.invited
    paces = {run: pace for (device, run), pace in facts.paces.items() if device == waiter.device}
    rests = {} if account is None else account.rests
    return msgspec.structs.replace(
        waiter,
        workloads=facts.able.workloads,
        vouched=vouched,
        step_s={} if vouched else paces,
        rests={run: at - now for run, at in rests.items() if at > now},
        leases_max=PROBATION_LEASES if account and account.standing != "vetted" else 0,
    )


def _new_lease(assignment: Assignment, waiter: Waiter, spec: Spec, seed: int) -> NewLease:
    plan = spec.plan
    parts = plan.gradient_every if plan.update == "gradient" else 0
    return NewLease(
        assignment=assignment,
        waiter=waiter,
        kind=spec.kind,
        update_kind=plan.update,
        part_steps=0 if assignment.beside else parts,
        batch_size=spec.batch_size,
        options=spec.options,
        run_seed=seed,
    )


def _states(
    conn: Connection, outcome: DispatchResult, able: Sequence[Waiter]
) -> dict[str, StateLine]:
    """Return the states of chosen and of paused runs, for waiters that no run wants."""
    idle = [at for at, refusal in outcome.refusals.items() if refusal.reason == Reason.NO_RUN]
    names = {name for at in idle for name in able[at].runs}
    return claim_rows.states(conn, sorted(names)) if idle else {}


def _explained(refusal: Refusal, waiter: Waiter, states: Mapping[str, StateLine]) -> Refusal:
    """Return the refusal with a more exact reason if the runs that the owner chose, or all runs, do
    not go on.
    """
    if refusal.reason != Reason.NO_RUN:
        return refusal
    for name, line in states.items():
        if line.state == "paused" and (name in waiter.runs or not waiter.runs):
            return Refusal(
                reason=Reason.RUN_PAUSED, message=f'"{name}" does not go on: {_pause(line)}'
            )
    if not waiter.runs:
        return refusal
    name = min(waiter.runs)
    if name in states and states[name].state in ("completed", "failed"):
        return Refusal(reason=Reason.RUN_ENDED, message=f'"{name}" has ended')
    problem = "has not started yet" if name in states else "does not exist here"
    return Refusal(reason=Reason.NO_RUN, message=f'"{name}" {problem}')


def _pause(line: StateLine) -> str:
    pause = PauseFacts(actor=line.state_actor, reason=line.state_reason)
    answer = standstill(RunFacts(name=line.name, state=line.state, now=0.0, pause=pause))
    return "" if answer is None else answer.message


def _idle(refusal: Refusal) -> IdleReply:
    retry_s = refusal.retry_after_s or RETRY_S.get(refusal.reason, 5.0)
    return IdleReply(
        reason=refusal.reason,
        message=refusal.message,
        retry_after_s=retry_s,
    )


def with_audits(
    conn: Connection, todo: Sequence[Todo], waiters: Sequence[Waiter]
) -> tuple[list[Todo], list[Waiter]]:
    """Add the terms of audits to the tasks, and to the waiters their qualification as auditors.
    Nothing is read if no audit waits or no waiter audits.
    """
    ids = [task.id for task in todo if task.beside == AUDIT]
    able = {waiter.volunteer_id for waiter in waiters if waiter.audits}
    if not ids or not able:
        return list(todo), list(waiters)
    terms, auditors = audits.waiting(conn, ids), audits.auditors(conn, able)
    tasks = [msgspec.structs.replace(task, audit=terms.get(task.id)) for task in todo]
    return tasks, [_with_auditor(waiter, auditors) for waiter in waiters]


def _with_auditor(waiter: Waiter, auditors: dict[str, tuple[AccountMarks, int, int]]) -> Waiter:
    account = auditors.get(waiter.volunteer_id)
    if account is None or not waiter.audits:
        return waiter
    person, accepted_micro, audited_micro = account
    auditor = Auditor(
        person=person,
        kind=device_kind(waiter.device),
        accepted_micro=accepted_micro,
        audited_micro=audited_micro,
    )
    return msgspec.structs.replace(waiter, auditor=auditor)
