"""Statistics about people: a volunteer's totals, the leaderboard, the report of a class. Reads
only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.types import TypeEngine

from coordinator.database.engine.bulk_statements import BulkStatement
from coordinator.database.engine.statements import among, one_of
from coordinator.database.ledger.payments import (
    EARNING,
    Balances,
    balances_of,
    earnings,
)
from coordinator.database.tables.accounts import codes, consents, volunteers, workers
from coordinator.database.tables.contributions import contributions, verdicts
from coordinator.database.tables.ledger import accounts, events, postings
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import tasks
from coordinator.database.volunteers import VolunteerRow, takes_part, worker_state
from shared.protocol.accounts import WorkerInfo
from shared.units import DAY_S

STRETCHES = 48  # columns of the chart of work over time
GOOD = ("accepted", "merged", "superseded")  # states of accepted contributions
LISTING_MAX = 100_000


class WorkTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of a volunteer's contributions."""

    accepted: int = 0  # good contributions: waiting, merged or not needed
    merged: int = 0
    rejected: dict[str, int] = {}  # counts by reason
    device_s: float = 0.0  # device time of the good contributions

    @property
    def refused(self) -> int:
        """Return the number of contributions rejected for any reason."""
        return sum(self.rejected.values())


class LeaderboardStanding(msgspec.Struct, frozen=True, kw_only=True):
    """One volunteer's line of the leaderboard, for a window of time."""

    volunteer_id: str
    nickname: str
    public: bool
    earned_micro: int
    accepted: int
    device_s: float
    workers: int


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """Work decided within one stretch of time."""

    at: float  # beginning of the stretch
    seconds: float  # its length
    contributions: int
    volunteers: int
    device_s: float


class VolunteerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One volunteer as the organiser sees it."""

    volunteer_id: str
    nickname: str
    label: str  # name that the organiser gave the invite
    state: str  # active, banned, forgotten; "invited" for an unused invite
    public: bool
    machines: int
    first_seen: float | None
    last_seen: float | None
    earned_micro: int = 0  # credits ever earned, less reversals, spent or not
    pending_micro: int = 0
    escrow_micro: int = 0
    debt_micro: int = 0
    work: WorkTotals = WorkTotals()
    standing: str = ""  # probation, vetted, suspended
    proofs: int = 0  # see `AccountTrust`
    reason: str = ""  # reason of a suspension


def work(
    conn: sa.Connection,
    *,
    volunteer_id: str | None = None,
    run_id: int | None = None,
    since: float | None = None,
) -> dict[str, WorkTotals]:
    """Return totals by volunteer: of one volunteer or all, in one run or all, since an instant or
    ever.
    """
    c = contributions.c
    query = sa.select(c.volunteer_id, c.state, c.reason, sa.func.count(), sa.func.sum(c.train_s))
    for column, value in ((c.volunteer_id, volunteer_id), (c.run_id, run_id)):
        query = query if value is None else query.where(column == value)
    if since is not None:
        query = query.where(c.decided_at >= since)
    totals: defaultdict[str, WorkTotals] = defaultdict(WorkTotals)
    for who, state, reason, count, seconds in conn.execute(
        query.group_by(c.volunteer_id, c.state, c.reason)
    ):
        totals[who] = _with(totals[who], state, reason, int(count), float(seconds))
    return dict(totals)


_B, _C, _V = verdicts.alias("before"), contributions.c, verdicts.c


def _changed(lines: sa.CTE) -> sa.ClauseElement:
    """Return the query of contributions with a new verdict, by their present and former state."""
    g = lines.c
    newer = (_V.volunteer_id == g.who) & (_V.id > g.after)
    new = sa.select(g.who, g.after, _V.contribution_id).join_from(lines, verdicts, newer).distinct()
    news = new.subquery("new")
    last = sa.select(sa.func.max(_V.id)).where(_V.contribution_id == _C.id, _V.id <= news.c.after)
    last = last.correlate(contributions, news)
    former = (_B.c.state.label("former_state"), _B.c.reason.label("former_reason"))
    kinds = (news.c.who, _C.state, _C.reason, *former, _C.worker_id)
    return (
        sa.select(*kinds, sa.func.count(), sa.func.sum(_C.train_s), sa.func.sum(_C.price_micro))
        .select_from(news)
        .join(contributions, _C.id == news.c.contribution_id)
        .outerjoin(_B, _B.c.id == last.scalar_subquery())
        .group_by(*kinds)
    )


_CHANGED = BulkStatement(
    "asked", {"who": sa.String(), "after": sa.BigInteger()}, _changed, blank=("", 0)
)


class WorkChange(msgspec.Struct, frozen=True, kw_only=True):
    """Change of a volunteer's totals, and of the pay of the good work of each of its machines."""

    work: WorkTotals
    pay_micro: Mapping[str, int]


def since_verdicts(conn: sa.Connection, after: Mapping[str, int]) -> dict[str, WorkChange]:
    """Return the changes of volunteers' totals by the verdicts after the number that `after` gives
    for each volunteer.
    """
    total = dict.fromkeys(after, WorkTotals())
    pay: dict[str, Counter[str]] = {who: Counter() for who in after}
    rows: Any = _CHANGED.execute(conn, [*after.items()])
    for who, state, reason, former, former_reason, worker, count, seconds, price in rows:
        total[who] = _with(total[who], state, reason, int(count), float(seconds))
        if former is not None:
            total[who] = _with(total[who], former, former_reason, -int(count), -float(seconds))
        pay[who][worker] += int(price) * ((state in GOOD) - (former in GOOD))
    return {who: WorkChange(work=total[who], pay_micro=pay[who]) for who in after}


def add_totals(one: WorkTotals, other: WorkTotals) -> WorkTotals:
    """Return the sum of two totals."""
    reasons = {*one.rejected, *other.rejected}
    return WorkTotals(
        accepted=one.accepted + other.accepted,
        merged=one.merged + other.merged,
        rejected={r: one.rejected.get(r, 0) + other.rejected.get(r, 0) for r in reasons},
        device_s=one.device_s + other.device_s,
    )


def _with(work: WorkTotals, state: str, reason: str, count: int, seconds: float) -> WorkTotals:
    if state == "rejected":
        why = reason or "other"
        rejected = {**work.rejected, why: work.rejected.get(why, 0) + count}
        return msgspec.structs.replace(work, rejected=rejected)
    if state not in GOOD:
        return work
    return msgspec.structs.replace(
        work,
        accepted=work.accepted + count,
        merged=work.merged + (count if state == "merged" else 0),
        device_s=work.device_s + seconds,
    )


def stretches(
    conn: sa.Connection,
    run_ids: Sequence[int],
    since: float,
    width_s: float,
    volunteer_id: str = "",
) -> list[Stretch]:
    """Return the good work on some runs, of everybody or of one volunteer, in stretches of
    `width_s` seconds, oldest first; empty stretches are left out.
    """
    c = contributions.c
    conditions = (c.volunteer_id == volunteer_id,) if volunteer_id else ()
    # The quotient is never negative, so that both databases round it the same way.
    number = sa.cast(sa.func.floor((c.decided_at - since) / width_s), sa.Integer).label("number")
    query = (
        sa.select(
            number,
            sa.func.count(),
            sa.func.count(c.volunteer_id.distinct()),
            sa.func.sum(c.train_s),
        )
        .where(c.run_id.in_(run_ids), c.state.in_(GOOD), c.decided_at >= since, *conditions)
        .group_by(number)
        .order_by(number)
    )
    return [
        Stretch(
            at=since + index * width_s,
            seconds=width_s,
            contributions=int(count),
            volunteers=int(people),
            device_s=float(seconds or 0.0),
        )
        for index, count, people, seconds in conn.execute(query)
    ]


def work_over_time(
    conn: sa.Connection, volunteer_id: str, run_ids: Sequence[int], now: float
) -> list[Stretch]:
    """Return a volunteer's good work on some runs, in stretches of a day or longer from its first
    contribution on.
    """
    c = contributions.c
    of_account = (c.volunteer_id == volunteer_id) & c.run_id.in_(run_ids) & c.state.in_(GOOD)
    first_at = conn.execute(sa.select(sa.func.min(c.decided_at)).where(of_account)).scalar()
    if first_at is None:
        return []
    width_s = max(DAY_S, (now - first_at) / (STRETCHES - 1))
    return stretches(conn, run_ids, first_at, width_s, volunteer_id)


def _posted(kind: str, *also: sa.ColumnElement[bool]) -> sa.Select[str, int]:
    """Return the query of sums posted to accounts of a kind, by owner."""
    return (
        sa.select(accounts.c.owner, sa.func.sum(postings.c.amount_micro))
        .join(postings, postings.c.account_id == accounts.c.id)
        .join(events, events.c.id == postings.c.event_id)
        .where(accounts.c.kind == kind, *also)
        .group_by(accounts.c.owner)
    )


def earned(
    conn: sa.Connection, run_id: int | None = None, since: float | None = None
) -> dict[str, int]:
    """Return each volunteer's earned credits, less reversals; spending does not count."""
    also: list[sa.ColumnElement[bool]] = [events.c.kind.in_(EARNING)]
    if run_id is not None:
        also.append(events.c.run_id == run_id)
    if since is not None:
        also.append(events.c.at >= since)
    return {owner: int(total) for owner, total in conn.execute(_posted("earned", *also))}


def earned_after(conn: sa.Connection, who: str, after: int, run_id: int | None = None) -> int:
    """Return the credits that one volunteer earned by ledger events after `after`."""
    also = [accounts.c.owner == who, events.c.kind.in_(EARNING), postings.c.event_id > after]
    if run_id is not None:
        also.append(events.c.run_id == run_id)
    return sum(int(total) for _, total in conn.execute(_posted("earned", *also)))


def pending(conn: sa.Connection, run_id: int) -> dict[str, int]:
    """Return each volunteer's pending credits of a run."""
    totals = conn.execute(_posted("pending", events.c.run_id == run_id))
    return {owner: int(total) for owner, total in totals}


def standings(
    conn: sa.Connection, run_id: int | None = None, since: float | None = None
) -> list[LeaderboardStanding]:
    """Return the volunteers that take part and earned credits, most credits first."""
    totals = {who: micro for who, micro in earned(conn, run_id, since).items() if micro > 0}
    done = work(conn, run_id=run_id, since=since)
    machines = _machines(conn)
    query = sa.select(volunteers.c.id, volunteers.c.nickname, volunteers.c.public)
    people = conn.execute(query.where(takes_part()))
    rows = [
        LeaderboardStanding(
            volunteer_id=who,
            nickname=nickname,
            public=public,
            earned_micro=totals[who],
            accepted=done.get(who, WorkTotals()).accepted,
            device_s=done.get(who, WorkTotals()).device_s,
            workers=machines.get(who, 0),
        )
        for who, nickname, public in people
        if who in totals
    ]
    return sorted(rows, key=lambda s: (-s.earned_micro, s.nickname))


def _machines(conn: sa.Connection) -> dict[str, int]:
    query = sa.select(workers.c.volunteer_id, sa.func.count()).where(workers.c.revoked_at.is_(None))
    return {who: int(count) for who, count in conn.execute(query.group_by(workers.c.volunteer_id))}


# --- for the organiser ---


def people(conn: sa.Connection, who: Iterable[str] | None = None) -> list[VolunteerSummary]:
    """Return the summaries of all volunteers, or of the given ids, oldest first."""
    machine = workers.c.revoked_at.is_(None)
    query = (
        sa.select(volunteers, codes.c.label)
        .add_columns(
            sa.func.sum(sa.case((machine, 1), else_=0)).label("machines"),
            sa.func.max(workers.c.last_seen_at).label("last_seen"),
        )
        .join(codes, codes.c.id == volunteers.c.invite_id, isouter=True)
        .join(workers, workers.c.volunteer_id == volunteers.c.id, isouter=True)
        .group_by(volunteers.c.id, codes.c.id)
        .order_by(volunteers.c.created_at, volunteers.c.id)
        .limit(LISTING_MAX)
    )
    if who is not None:
        query = query.where(volunteers.c.id.in_(list(who)))
    return [
        VolunteerSummary(
            nickname=row["nickname"],
            state=row["state"],
            public=row["public"],
            last_seen=row["last_seen"],
            standing=row["standing"],
            proofs=row["proofs"],
            volunteer_id=row["id"],
            label=row["label"] or "",
            machines=int(row["machines"]),
            first_seen=row["created_at"],
            reason=row["suspended_reason"],
        )
        for row in conn.execute(query).mappings()
    ]


def summed(
    conn: sa.Connection, people_listed: Iterable[VolunteerSummary]
) -> list[VolunteerSummary]:
    """Return the same volunteers with their work and credits on all runs."""
    totals, done = earned(conn), work(conn)
    a = accounts.c
    balances_by_kind: dict[str, dict[str, int]] = {"pending": {}, "escrow": {}, "debt": {}}
    query = sa.select(a.owner, a.kind, a.balance_micro).where(a.kind.in_([*balances_by_kind]))
    for owner, kind, balance in conn.execute(query):
        balances_by_kind[kind][owner] = int(balance)
    return [
        msgspec.structs.replace(
            _with_totals(person, totals, balances_by_kind["pending"], done),
            escrow_micro=balances_by_kind["escrow"].get(person.volunteer_id, 0),
            debt_micro=balances_by_kind["debt"].get(person.volunteer_id, 0),
        )
        for person in people_listed
    ]


def of_run(conn: sa.Connection, run_id: int) -> list[VolunteerSummary]:
    """Return a run's report: the volunteers with work, consent or a named invite, then unused
    invites.
    """
    totals, waiting, done = earned(conn, run_id), pending(conn, run_id), work(conn, run_id=run_id)
    agreed = sa.select(consents.c.volunteer_id).where(consents.c.run_id == run_id)
    part = {*totals, *waiting, *done, *conn.execute(agreed).scalars()}
    rows = [
        _with_totals(person, totals, waiting, done)
        for person in people(conn)
        if person.volunteer_id in part or person.label
    ]
    return rows + _invited(conn)


def _with_totals(
    person: VolunteerSummary,
    totals: dict[str, int],
    waiting: dict[str, int],
    done: dict[str, WorkTotals],
) -> VolunteerSummary:
    who = person.volunteer_id
    return msgspec.structs.replace(
        person,
        earned_micro=totals.get(who, 0),
        pending_micro=waiting.get(who, 0),
        work=done.get(who, WorkTotals()),
    )


def _invited(conn: sa.Connection) -> list[VolunteerSummary]:
    """Return the named invites that are neither used nor revoked."""
    used = sa.select(volunteers.c.invite_id).where(volunteers.c.invite_id.is_not(None))
    query = (
        sa.select(codes.c.label)
        .where(codes.c.kind == "invite", codes.c.label != "", codes.c.id.not_in(used))
        .where(codes.c.revoked_at.is_(None))
        .order_by(codes.c.id)
    )
    return [
        VolunteerSummary(
            volunteer_id="",
            nickname="",
            label=label,
            state="invited",
            public=False,
            machines=0,
            first_seen=None,
            last_seen=None,
        )
        for label in conn.execute(query).scalars()
    ]


# --- one account ---


class AccountRow(msgspec.Struct, frozen=True, kw_only=True):
    """Volunteer with its balances, and its earnings since an instant."""

    volunteer: VolunteerRow
    balances: Balances
    earned_micro: int


_ACCOUNTS = (
    sa.select(volunteers, accounts.c.kind, accounts.c.balance_micro)
    .outerjoin(accounts, accounts.c.owner == volunteers.c.id)
    .where(among(volunteers.c.id, "ids"))
)


def _earned(lines: sa.CTE) -> sa.ClauseElement:
    g = lines.c
    gained = sa.select(sa.func.coalesce(sa.func.sum(postings.c.amount_micro), 0)).where(
        *earnings(g.who, g.since), postings.c.event_id > g.after
    )
    return sa.select(g.who, gained.correlate(lines).scalar_subquery())


_SINCE: dict[str, TypeEngine[Any]] = {
    "who": sa.String(),
    "since": sa.Double(),
    "after": sa.BigInteger(),
}
_EARNED = BulkStatement("asked", _SINCE, _earned, blank=("", 0.0, 0))


def account_rows(
    conn: sa.Connection, since: Mapping[str, tuple[float, int]]
) -> dict[str, AccountRow]:
    """Return the existing accounts among the keys of `since`, each with its earnings. `since` gives
    an instant and the number of a ledger event for each account: earnings before that instant, or
    by events up to that number, do not count.
    """
    rows: defaultdict[str, list[sa.RowMapping]] = defaultdict(list)
    for row in conn.execute(_ACCOUNTS, {"ids": [*since]}).mappings():
        rows[row["id"]].append(row)
    result: Any = _EARNED.execute(conn, [(who, *since_of) for who, since_of in since.items()])
    gained: dict[str, int] = dict(result.all())
    fields = VolunteerRow.__struct_fields__
    return {
        who: AccountRow(
            volunteer=VolunteerRow(**{name: by_kind[0][name] for name in fields}),
            balances=balances_of(
                (row["kind"], row["balance_micro"]) for row in by_kind if row["kind"]
            ),
            earned_micro=int(gained[who]),
        )
        for who, by_kind in rows.items()
    }


# --- machines ---


_W = workers.c
_DOING = (tasks.c.worker_id == _W.id) & one_of(tasks.c.state, ("doing",))
_MACHINES = (
    sa.select(_W.volunteer_id, _W.id, _W.hostname, _W.state, _W.last_seen_at, _W.rate, _W.celsius)
    .add_columns(sa.select(sa.func.min(tasks.c.id)).where(_DOING).scalar_subquery().label("task"))
    .add_columns(
        sa.select(sa.func.min(tasks.c.device)).where(_DOING).scalar_subquery().label("device")
    )
    .add_columns(
        sa.select(sa.func.min(runs.c.name))
        .where(_DOING, runs.c.id == tasks.c.run_id)
        .scalar_subquery()
        .label("run")
    )
    .where(among(_W.volunteer_id, "volunteers"), _W.revoked_at.is_(None))
    .order_by(_W.created_at, _W.id)
    .limit(LISTING_MAX)
)


def machines(
    conn: sa.Connection, volunteer_ids: Iterable[str], now: float
) -> dict[str, list[WorkerInfo]]:
    """Return the unrevoked machines of accounts, with their states."""
    by_account: dict[str, list[WorkerInfo]] = {who: [] for who in volunteer_ids}
    for row in conn.execute(_MACHINES, {"volunteers": [*by_account]}):
        by_account[row.volunteer_id].append(
            WorkerInfo(
                worker_id=row.id,
                hostname=row.hostname,
                state=worker_state(row.state, row.last_seen_at, now),
                device=row.device or "",
                last_seen=row.last_seen_at,
                task=row.task,
                run=row.run or "",
                rate=row.rate,
                celsius=row.celsius,
            )
        )
    return by_account


def pay_by_machine(conn: sa.Connection, volunteer_id: str, since: float) -> dict[str, int]:
    """Return the pay of an account's good work decided since an instant, by machine."""
    c = contributions.c
    query = sa.select(c.worker_id, sa.func.sum(c.price_micro)).group_by(c.worker_id)
    good = query.where(c.volunteer_id == volunteer_id, c.state.in_(GOOD), c.decided_at >= since)
    return {worker: int(total) for worker, total in conn.execute(good)}
