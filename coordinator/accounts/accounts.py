"""Accounts of volunteers: sign-in, profiles, and the organiser's actions on them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from coordinator.accounts import bearer_tokens, registration, suspension
from coordinator.accounts.bearer_tokens import Principal, Tokens
from coordinator.accounts.invites import Invites, NewCode
from coordinator.accounts.leaderboard import Leaderboard
from coordinator.accounts.organiser_reversals import Reversals
from coordinator.accounts.registration import Registration
from coordinator.accounts.registration_challenges import Challenges
from coordinator.batcher import Batcher
from coordinator.database import invite_rows as code_rows
from coordinator.database import recomputes, record, runs, standings, statistics, verdicts
from coordinator.database import volunteers as store
from coordinator.database.ledger import escrow, payments
from coordinator.database.ledger.reversal import TakenBack
from coordinator.database.members import member_rows
from coordinator.database.standings import TrustReport
from coordinator.database.statistics import VolunteerSummary
from coordinator.database.volunteers import VolunteerRow
from coordinator.rate_limit import PerMinute
from coordinator.rules import networks, nicknames, secret_codes
from coordinator.rules import reports as machines
from coordinator.signals import Signals
from coordinator.ttl_cache import REST, KeyedCache
from shared.errors import BadRequest, Banned, Forbidden, NotFound, VolunteerError
from shared.protocol.accounts import (
    BenchmarkRequest,
    Challenge,
    LeaveRequest,
    MachineOrder,
    Me,
    RegisterRequest,
    WorkerInfo,
)
from shared.protocol.contributions import Verdict
from shared.protocol.limits import NICKNAME_MAX
from shared.protocol.listings import LeaderRow
from shared.text import escaped
from shared.units import DAY_S

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.config import Settings
    from coordinator.database.engine.open_database import Database
    from shared.clock import Clock

__all__ = ["Principal", "VolunteerDetails", "Volunteers"]

T = TypeVar("T")

LINK_S = 600.0
REISSUE_S = DAY_S  # validity of a reissued link: long, since the organiser passes it on
ORDERS_A_MINUTE = 60  # orders that an account may send to its machines
WORK_MAX = 32_768  # volunteers whose counts are cached
BATCH_MAX = 64  # volunteers whose accounts are read in one transaction
# time between two full counts of an account; each view adds the changes since the last full count
COUNTED_S = 300.0


class _AccountSums(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of an account's history up to its newest counted verdict and ledger event."""

    verdict: int
    work: statistics.WorkTotals
    event: int
    today_micro: int
    day_micro: dict[str, int]  # pay of the last 24 hours by machine


class _ViewRequest(NamedTuple):
    """Request for a volunteer's own view."""

    who: str
    day: float  # beginning of today, in UTC
    old: _AccountSums
    rank: int | None
    also: Callable[[Connection, Sequence[tuple[int, Verdict]]], object]
    worker: str
    since: int | None  # number after which verdicts of the worker are wanted


class VolunteerDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Organiser's view of one volunteer and its machines."""

    person: VolunteerSummary
    machines: tuple[WorkerInfo, ...]


class Volunteers:
    """The accounts of a coordinator. Everything durable is committed before a method returns."""

    def __init__(
        self,
        db: Database,
        clock: Clock,
        settings: Settings,
        signals: Signals | None = None,
        challenges: Challenges | None = None,
    ) -> None:
        self._db = db
        self._clock = clock
        self._signals = signals or Signals(clock)
        self._settings = settings
        self._tokens = Tokens(db, clock)
        self._board = Leaderboard(db, clock)
        self._counted: KeyedCache[tuple[str, float], _AccountSums] = KeyedCache(
            COUNTED_S, clock, rest=REST, most=WORK_MAX
        )
        self._looking: Batcher[_ViewRequest, tuple[Me, Any]] = Batcher(self._look_all, BATCH_MAX)
        self._challenges = challenges or Challenges(secrets.token_bytes(32), 0, clock)
        self.orders = PerMinute(clock.monotonic)
        self.invites = Invites(db, clock)
        self.reversals = Reversals(db, clock)

    # --- coming and going ---

    async def register(self, request: RegisterRequest, address: str = "") -> Registration:
        """Register a worker, or repeat an earlier reply. Raises like `registration`."""
        registration.check(request)
        now = self._clock.now()
        settings = self._settings
        admission = registration.Admission(
            invite_only=settings.by_invitation,
            open=settings.open,
            network=networks.network(address),
            network_most=settings.constants.accounts_per_network,
        )
        needs_proof = settings.open and not request.code
        if needs_proof:
            await self._check_proof(request)
        registered = await self._db.write(
            lambda conn: registration.register(conn, request, admission, now)
        )
        if needs_proof and registered.created:
            self._challenges.use(request)
        return registered

    async def _check_proof(self, request: RegisterRequest) -> None:
        """Check the proof of work of a new worker. Raises Forbidden, BadRequest."""
        try:
            self._challenges.check(request)
        except (Forbidden, BadRequest):
            who = request.worker_id
            if await self._db.read(lambda conn: store.credentials(conn, who)) is None:
                raise

    async def challenge(self, volunteer: str, nickname: str) -> Challenge:
        """Return the proof of work that the registration of this account requires.

        Raises BadRequest for an invalid id, InvalidName for a nickname that is not available.
        """
        secret_codes.check_id("volunteer", volunteer)
        if nickname:
            await self._db.read(lambda conn: registration.free_name(conn, volunteer, nickname))
        return self._challenges.challenge(volunteer)

    def recall(self, header: bytes) -> Principal | None:
        """Return the sender of `Bearer <worker id>.<secret>` if cached; None otherwise."""
        return self._tokens.recall(header)

    async def authenticate(self, worker_id: str, secret: str) -> Principal:
        """Return the worker with this secret. Raises Unauthorized, or Banned: every process notices
        a ban within 0.5 s.
        """
        return await self._tokens.principal(worker_id, secret)

    async def leave(self, principal: Principal, request: LeaveRequest | None = None) -> None:
        """Sign this machine off; with `forget` wipe the account. The machine's next request signs
        it on again.
        """
        now = self._clock.now()
        if request is not None and request.forget:
            who = principal.volunteer_id
            await self._shut_out(lambda conn: _forget(conn, who, "volunteer", now))
            return
        worker = principal.worker_id
        await self._db.write(lambda conn: store.set_worker(conn, worker, state="left"))
        self._tokens.forget(worker)

    async def set_public(self, principal: Principal, public: bool) -> None:
        """Show the nickname to others, or hide it: at once in this process, in other processes once
        their leaderboard is computed again.
        """
        who = principal.volunteer_id
        await self._db.write(lambda conn: store.set_volunteer(conn, who, public=public))
        self._board.show(who, public)

    async def order(self, principal: Principal, request: MachineOrder) -> None:
        """Store an order, which the reply to the next heartbeat of this account's machine carries.

        Raises NotFound, TooManyRequests.
        """
        owner, now = principal.volunteer_id, self._clock.now()
        self.orders.hit(owner, ORDERS_A_MINUTE)  # each order is a write, and a message to a machine
        machine, order = request.worker_id, request.order
        if not await self._db.write(lambda conn: store.order(conn, owner, machine, order, now)):
            raise NotFound("this account has no such machine: look at the list of its machines")

    async def set_benchmark(self, principal: Principal, request: BenchmarkRequest) -> None:
        """Store the benchmark of a machine; its tasks are sized by it."""
        results = machines.benchmarks(request.benchmarks)
        values: dict[str, object] = {
            "benchmark": msgspec.json.encode(results).decode(),
            "step_flops": max((b.step_flops for b in results), default=0.0),
        }
        if request.hardware is not None:
            checked = machines.hardware(request.hardware)
            values |= {
                "hostname": checked.hostname,
                "hardware": msgspec.json.encode(checked).decode(),
            }
        if request.workloads is not None:
            names = machines.workloads(request.workloads)
            values["workloads"] = msgspec.json.encode(names).decode()
        await self._db.write(lambda conn: store.set_worker(conn, principal.worker_id, **values))

    async def consent(self, principal: Principal, run: str) -> None:
        """Record that this volunteer accepted the run's licence. Raises NotFound."""
        now = self._clock.now()
        await self._db.write(
            lambda conn: registration.agree(conn, principal.volunteer_id, run, now)
        )

    async def link_code(self, principal: Principal) -> NewCode:
        """Return a ten-minute code for one more machine of this account; an earlier code becomes
        invalid.
        """
        now = self._clock.now()
        code, until = secret_codes.new_code(secret_codes.LINK_CHARS), now + LINK_S
        volunteer_id, hashed = principal.volunteer_id, secret_codes.code_hash(code)
        await self._db.write(
            lambda conn: code_rows.add_link(conn, volunteer_id, hashed, until, now)
        )
        return NewCode(id=0, label="", code=code, expires_at=until)

    # --- reading ---

    async def me(self, principal: Principal) -> Me:
        """Return a volunteer's view of its own account."""
        return (await self.me_with(principal, lambda conn, new: None))[0]

    async def me_with(
        self,
        principal: Principal,
        also: Callable[[Connection, Sequence[tuple[int, Verdict]]], T],
        since: int | None = None,
    ) -> tuple[Me, T]:
        """Return a volunteer's own view, and the result of `also` from the same transaction, called
        with the worker's verdicts of the last minute after number `since`, and their numbers.

        A transaction that was lost to a conflict is repeated, so `also` must only read.
        """
        now, who = self._clock.now(), principal.volunteer_id
        rank = await self._board.rank(who)

        day = now - now % DAY_S
        old = await self._counted.get((who, day), lambda: self._db.read(partial(_count, who, now)))
        question = _ViewRequest(who, day, old, rank, also, principal.worker_id, since)
        me, result = await self._looking.ask(question)
        return me, result

    async def _look_all(
        self, questions: Sequence[_ViewRequest]
    ) -> list[tuple[Me, Any] | Exception]:
        return await self._db.read(lambda conn: self._look(conn, questions))

    def _look(
        self, conn: Connection, questions: Sequence[_ViewRequest]
    ) -> list[tuple[Me, Any] | Exception]:
        """Return the views of several accounts, each with the result of its `also`, or an error."""
        now = self._clock.now()
        by_account = {question.who: question for question in questions}
        since = {who: (asked.day, asked.old.event) for who, asked in by_account.items()}
        rows = statistics.account_rows(conn, since)
        counted_to = {who: asked.old.verdict for who, asked in by_account.items()}
        new = statistics.since_verdicts(conn, counted_to)
        machines = statistics.machines(conn, by_account, now)
        proving = _proving(conn, [*by_account], now)
        after = {
            question.worker: question.since for question in questions if question.since is not None
        }
        news = verdicts.newest_of(conn, after, now - verdicts.RECENT_S)
        answers: list[tuple[Me, Any] | Exception] = []
        for who, _, _, rank, also, worker, _ in questions:
            if (account := rows.get(who)) is None:
                answers.append(_gone())
                continue
            row, balances, old = account.volunteer, account.balances, by_account[who].old
            done = statistics.add_totals(old.work, new[who].work)
            me = Me(
                volunteer_id=who,
                nickname=row.nickname,
                public=row.public,
                state="active" if row.state == "active" else "banned",
                earned_micro=balances.total_micro,
                pending_micro=balances.pending_micro,
                spent_micro=balances.spent_micro,
                escrow_micro=balances.escrow_micro,
                debt_micro=balances.debt_micro,
                held_micro=balances.held_micro,
                accepted=done.accepted,
                merged=done.merged,
                device_s=done.device_s,
                invited=row.invited,
                standing=row.standing,
                today_micro=old.today_micro + account.earned_micro,
                rank=rank,
                rejected=done.refused,
                workers=tuple(
                    _with_pay(machine, old.day_micro, new[who].pay_micro)
                    for machine in machines[who]
                ),
                proving=proving[who].count,
                proved_in_s=proving[who].until_s,
                standing_reason=self._explained(row),
                at=now,
            )
            try:
                answers.append((me, also(conn, news.get(worker, ()))))
            except VolunteerError as error:
                answers.append(error)
        return answers

    async def leaderboard(
        self,
        run: str | None = None,
        window_days: int | None = None,
        me: str | None = None,
        *,
        seldom: bool = False,
    ) -> tuple[LeaderRow, ...]:
        """Return the hundred volunteers with the most earned credits, and the row of volunteer
        `me`.
        """
        return await self._board.rows(run, window_days, me, seldom=seldom)

    async def public(self, nickname: str) -> tuple[str, str]:
        """Return the id and the nickname of a public volunteer. Raises NotFound, with the same
        words for a hidden volunteer as for an unknown nickname.
        """
        key = nicknames.skeleton(nickname) if len(nickname) <= NICKNAME_MAX else ""
        try:
            row = await self._db.read(lambda conn: store.find(conn, "", key))
        except NotFound:
            row = None
        if row is None or not row.public or not row.takes_part:
            raise not_shown(nickname)
        return row.id, row.nickname

    async def report(self, run: str) -> tuple[VolunteerSummary, ...]:
        """Return the participants of a run, for the organiser of a class. Raises NotFound."""
        return await self._db.read(
            lambda conn: tuple(statistics.of_run(conn, runs.by_name(conn, run).id))
        )

    # --- the organiser ---

    async def list(self) -> tuple[VolunteerSummary, ...]:
        """Return every account, the oldest first."""
        return await self._db.read(
            lambda conn: tuple(statistics.summed(conn, statistics.people(conn)))
        )

    async def trust(self) -> TrustReport:
        """Return the standings of the accounts and the results of their checks."""
        now = self._clock.now()
        return await self._db.read(lambda conn: standings.report(conn, now))

    async def show(self, who: str) -> VolunteerDetails:
        """Return one account, by id or nickname, with its machines. Raises NotFound."""
        now = self._clock.now()

        def read(conn: Connection) -> VolunteerDetails:
            row = _find(conn, who)
            person = statistics.summed(conn, statistics.people(conn, [row.id]))[0]
            machines = statistics.machines(conn, [row.id], now)[row.id]
            return VolunteerDetails(person=person, machines=tuple(machines))

        return await self._db.read(read)

    async def ban(self, who: str, reason: str = "") -> str:
        """Ban an account; return its id. Its updates that wait for a merge are paid and not merged;
        its credits stay. Raises NotFound, Forbidden.
        """
        now = self._clock.now()
        return await self._shut_out(
            lambda conn: suspension.ban(conn, _find(conn, who), reason, now)
        )

    async def ban_and_suspend(self, who: str, reason: str) -> TakenBack:
        """Ban an account, and suspend it first, so that its stake is forfeited and not paid; return
        the forfeited amounts. Raises NotFound, BadRequest, Forbidden.
        """
        now, why = self._clock.now(), suspension.reason_of(reason)

        def change(conn: Connection) -> TakenBack:
            row = _find(conn, who)
            forfeited = suspension.suspend(conn, row.id, why, now, "organiser")
            suspension.ban(conn, row, why, now)
            return forfeited

        return await self._shut_out(change)

    async def unban(self, who: str) -> str:
        """Lift the ban of an account; return its id. Raises NotFound, Forbidden."""
        now = self._clock.now()
        return await self._write(lambda conn: suspension.unban(conn, _find(conn, who), now))

    async def suspend(self, who: str, reason: str) -> str:
        """Suspend an account: it gets no work, and escrow and unmerged contributions are forfeited.
        Its owner reads the reason. Raises NotFound, BadRequest.
        """
        now, why = self._clock.now(), suspension.reason_of(reason)

        def change(conn: Connection) -> str:
            row = _find(conn, who)
            suspension.suspend(conn, row.id, why, now, "organiser")
            return row.nickname

        return await self._shut_out(change)

    async def unsuspend(self, who: str, reason: str) -> str:
        """Let a suspended account work again; forfeited pay stays forfeited. Raises
        NotFound, BadRequest, Conflict.
        """
        now, why = self._clock.now(), suspension.reason_of(reason)

        def change(conn: Connection) -> str:
            row = _find(conn, who)
            suspension.unsuspend(conn, row.id, why, now)
            return row.nickname

        return await self._write(change)

    async def vouch(self, who: str) -> str:
        """Treat an account as invited: vetted, paid, its suspension lifted. Raises NotFound."""
        now = self._clock.now()

        def change(conn: Connection) -> str:
            row = _find(conn, who)
            store.vet(conn, row.id)
            store.set_volunteer(conn, row.id, invited=True)
            detail = {"vested": escrow.free_all(conn, row.id, now)}
            record.append(conn, "organiser", "volunteer.vouch", row.id, detail, now)
            return row.nickname

        return await self._write(change)

    def _explained(self, row: VolunteerRow) -> str:
        """Return the reason of a suspension as its account reads it; "" without one."""
        if row.standing != "suspended":
            return ""
        return suspension.explained(row.suspended_reason, self._settings.contact)

    async def rename(self, who: str, nickname: str) -> str:
        """Rename an account; return the stored name. Raises NotFound, InvalidName, Forbidden."""
        name, now = nicknames.normal(nickname), self._clock.now()
        key = nicknames.skeleton(name)

        def change(conn: Connection) -> str:
            row = _find(conn, who)
            if row.state == "forgotten":
                raise Forbidden("this account was forgotten: it cannot be renamed")
            if not store.rename(conn, row.id, name, key):
                raise registration.taken_name_error(conn, name)
            record.append(conn, "organiser", "volunteer.rename", row.id, "", now)
            return name

        return await self._write(change)

    async def reissue(self, who: str) -> NewCode:
        """Revoke all secrets and keys of an account; return a one-day code for its owner. Raises
        NotFound, Banned for an account that is not active.
        """
        now = self._clock.now()
        code, until = secret_codes.new_code(secret_codes.INVITE_CHARS), now + REISSUE_S
        hashed = secret_codes.code_hash(code)

        def change(conn: Connection) -> NewCode:
            row = _find(conn, who)
            if row.state != "active":
                raise Banned(f"this account is {row.state}: no secret can be issued")
            count = store.revoke(conn, row.id, now)
            member_rows.withdraw_all(conn, row.id, now)
            code_rows.add_link(conn, row.id, hashed, until, now)
            record.append(conn, "organiser", "volunteer.reissue", row.id, {"revoked": count}, now)
            return NewCode(id=0, label=row.nickname, code=code, expires_at=until)

        return await self._shut_out(change)

    async def forget(self, who: str) -> str:
        """Wipe an account's personal data; return the name that replaces its nickname. Raises
        NotFound.
        """
        now = self._clock.now()
        return await self._shut_out(
            lambda conn: _forget(conn, _find(conn, who).id, "organiser", now)
        )

    async def _shut_out(self, change: Callable[[Connection], T]) -> T:
        """Write a change that may ban machines; end their waiting claims, and offer the tasks that
        it returned, at once.
        """
        done = await self._write(change)
        for topic in ("volunteers", "queue"):
            self._signals.notify(topic)
        return done

    async def _write(self, change: Callable[[Connection], T]) -> T:
        """Write a change that every process must notice at once."""

        def stamped(conn: Connection) -> T:
            result = change(conn)
            bearer_tokens.renew_stamp(conn)
            return result

        try:
            return await self._db.write(stamped)
        finally:
            self._tokens.forget()
            self._board.clear()


def not_shown(nickname: str) -> NotFound:
    """Return the error for a volunteer that is absent or hidden, the same for both, so that nobody
    learns which it is.
    """
    return NotFound(f'there is no volunteer "{escaped(nickname)}" to show here')


def _find(conn: Connection, who: str) -> VolunteerRow:
    return store.find(conn, who[:256], nicknames.skeleton(who[:256]))


def _count(who: str, now: float, conn: Connection) -> _AccountSums:
    (verdict, _), event = verdicts.newest(conn), payments.last_event(conn)
    totals = statistics.work(conn, volunteer_id=who)
    return _AccountSums(
        verdict=verdict,
        work=totals.get(who, statistics.WorkTotals()),
        event=event,
        today_micro=payments.earned_since(conn, who, now - now % DAY_S, upto=event),
        day_micro=statistics.pay_by_machine(conn, who, now - DAY_S),
    )


def _with_pay(
    machine: WorkerInfo, counted_micro: Mapping[str, int], new_micro: Mapping[str, int]
) -> WorkerInfo:
    """Return a machine with its pay of the last 24 hours: the last count and the newer pay."""
    day_micro = sum(micro.get(machine.worker_id, 0) for micro in (counted_micro, new_micro))
    return msgspec.structs.replace(machine, day_micro=day_micro)


def _gone() -> NotFound:
    return NotFound("this account is gone")


def _forget(conn: Connection, volunteer_id: str, actor: str, now: float) -> str:
    row = store.locked(conn, volunteer_id)
    if row.state == "forgotten":
        return row.nickname
    name = nicknames.pseudonym(secret_codes.new_code(8).replace("-", "").lower())
    store.forget(conn, row.id, name, nicknames.skeleton(name), now)
    suspension.set_forgotten_aside(conn, row.id, now)
    record.append(conn, actor, "volunteer.forget", row.id, "", now)
    return name


class _Proving(msgspec.Struct, frozen=True, kw_only=True):
    """Open recomputes of an account, and the seconds until all may have a result."""

    count: int = 0
    until_s: float | None = None


def _proving(conn: Connection, owners: Sequence[str], now: float) -> dict[str, _Proving]:
    """Return the open recomputes of each account."""
    counts = recomputes.open_counts(conn, owners)
    served = recomputes.served(conn, now) if counts else frozenset[str]()
    return {
        owner: _Proving(count=counts[owner], until_s=recomputes.backlog_s(conn, now, served, owner))
        if owner in counts
        else _Proving()
        for owner in owners
    }
