"""Standing of the accounts for the organiser: draws, recompute backlog, counts for alerts."""

from __future__ import annotations

from collections import Counter, defaultdict

import msgspec
from sqlalchemy import Connection, case, func, select

from coordinator.database import recomputes as store
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.trust import escrow, recomputes
from coordinator.rules.audits import AUDIT
from coordinator.rules.draws import unprovable
from coordinator.rules.overview import Backlog, DrawCounts

LISTING_MAX = 1000
REASONS_MAX = 100
ACCEPTED = ("accepted", "merged", "superseded")
PLAYED = ("experience", "evaluation")
NEWEST = 200  # newest decisions that give the refused share


class AccountTrust(msgspec.Struct, frozen=True, kw_only=True):
    """Standing of one account, and the results of its checks."""

    volunteer_id: str
    nickname: str
    standing: str  # probation, vetted, suspended
    invited: bool
    accepted: int
    proofs: int  # passed draws of different tasks since the last draw that did not pass
    stake_micro: int  # pay at stake, in micro-credits
    drawn: DrawCounts
    reason: str = ""  # reason of a suspension


class TrustReport(msgspec.Struct, frozen=True, kw_only=True):
    """Accounts by standing, results of checks, and the accounts to look at first."""

    standings: dict[str, int]
    drawn: DrawCounts
    backlog: Backlog
    accounts: tuple[AccountTrust, ...]


class CostOfChecks(msgspec.Struct, frozen=True, kw_only=True):
    """Checks of a run's contributions, and their cost relative to the accepted work."""

    drawn: DrawCounts
    played: int  # checked files of episodes and of evaluations
    checked_s: float
    work_s: float
    audits: int = 0  # audits that volunteers answered and were paid for
    audits_micro: int = 0  # pay of the audits
    audits_s: float = 0.0  # seconds that the audits took on volunteers' devices
    share: float | None = None  # seconds of all checks for each second of accepted work


_V = volunteers.c
_ORDER = case({"suspended": 0, "probation": 1}, value=_V.standing, else_=2)
_DRAWN = (
    select(recomputes.c.volunteer_id, recomputes.c.result, func.count())
    .where(recomputes.c.refusal == "")
    .group_by(recomputes.c.volunteer_id, recomputes.c.result)
)
_STAKES = select(escrow.c.volunteer_id, func.sum(escrow.c.amount_micro)).group_by(
    escrow.c.volunteer_id
)
_KINDS = (
    select(recomputes.c.kind, recomputes.c.message, func.count())
    .add_columns(func.max(recomputes.c.flops))
    .where(store.IS_OPEN)
    .group_by(recomputes.c.kind, recomputes.c.message)
    .limit(REASONS_MAX)
)


def report(conn: Connection, now: float) -> TrustReport:
    """Return the standings, the results of draws and the backlog; and at most `LISTING_MAX`
    accounts: suspended ones first, then those on probation, then the others, each newest first.
    """
    drawn: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for who, result, count in conn.execute(_DRAWN):
        drawn[who][result or "open"] += int(count)
    stakes = {who: int(total) for who, total in conn.execute(_STAKES)}
    active = select(volunteers).where(_V.state != "forgotten")
    rows = conn.execute(active.order_by(_ORDER, _V.created_at.desc()).limit(LISTING_MAX)).mappings()
    counted = select(_V.standing, func.count()).where(_V.state != "forgotten")
    return TrustReport(
        standings={row[0]: int(row[1]) for row in conn.execute(counted.group_by(_V.standing))},
        drawn=_checked(sum(drawn.values(), Counter())),
        backlog=backlog(conn, now),
        accounts=tuple(
            AccountTrust(
                nickname=row["nickname"],
                standing=row["standing"],
                invited=row["invited"],
                accepted=row["accepted"],
                proofs=row["proofs"],
                volunteer_id=row["id"],
                stake_micro=stakes.get(row["id"], 0),
                drawn=_checked(drawn[row["id"]]),
                reason=row["suspended_reason"],
            )
            for row in rows
        ),
    )


def backlog(conn: Connection, now: float) -> Backlog:
    """Return the numbers of waiting recomputes, the time that they take, and why some cannot be
    made.
    """
    served = store.served(conn, now)
    reasons: Counter[str] = Counter()
    for kind, message, count, flops in conn.execute(_KINDS):
        if why := message or unprovable(kind, flops, served):
            reasons[why] += int(count)
    return Backlog(
        waiting=store.waiting(conn),
        seconds=store.backlog_s(conn, now, served),
        reasons=tuple(reasons.most_common()),
    )


def cost(conn: Connection, run_id: int) -> CostOfChecks:
    """Return the checks of a run and their cost."""
    c = contributions.c
    good, checked = c.state.in_(ACCEPTED) & (c.kind != AUDIT), c.checked_s > 0
    audited = c.state.in_(ACCEPTED) & (c.kind == AUDIT)
    sums = select(
        func.coalesce(func.sum(c.checked_s), 0.0),
        func.coalesce(func.sum(case((good, c.train_s), else_=0.0)), 0.0),
        func.coalesce(func.sum(case((checked & c.kind.in_(PLAYED), 1), else_=0)), 0),
        func.coalesce(func.sum(case((audited, 1), else_=0)), 0),
        func.coalesce(func.sum(case((audited, c.price_micro), else_=0)), 0),
        func.coalesce(func.sum(case((audited, c.train_s), else_=0.0)), 0.0),
    )
    checked_s, work_s, played, *by_volunteers = conn.execute(sums.where(c.run_id == run_id)).one()
    results = select(recomputes.c.result, func.count())
    results = results.where(recomputes.c.run_id == run_id, recomputes.c.refusal == "")
    rows = conn.execute(results.group_by(recomputes.c.result))
    drawn = Counter({result or "open": int(count) for result, count in rows})
    return CostOfChecks(
        drawn=_checked(drawn),
        played=int(played),
        checked_s=float(checked_s),
        work_s=float(work_s),
        audits=int(by_volunteers[0]),
        audits_micro=int(by_volunteers[1]),
        audits_s=float(by_volunteers[2]),
        share=(checked_s + by_volunteers[2]) / work_s if work_s > 0 else None,
    )


def registered(conn: Connection, since: float) -> int:
    """Return how many uninvited accounts registered since an instant."""
    query = select(func.count()).where(_V.created_at >= since, _V.invited.is_(False))
    return int(conn.execute(query).scalar_one())


def failed_recomputes(conn: Connection, since: float) -> list[tuple[int, float]]:
    """Return the contributions whose recompute failed since an instant, each with the time of its
    end, newest first.
    """
    r = recomputes.c
    query = select(r.contribution_id, r.ended_at).where(r.result == "failed", r.ended_at >= since)
    newest = query.order_by(r.ended_at.desc(), r.contribution_id.desc())
    return [(int(number), float(at)) for number, at in conn.execute(newest)]


def refusals(conn: Connection) -> tuple[int, int]:
    """Return how many of the newest decisions are refusals, and the number of these decisions."""
    c = contributions.c
    # The rows are limited first: a long queue of undecided contributions is not read through.
    some = select(c.id, c.state, c.decided_at).order_by(c.id.desc()).limit(2 * NEWEST).subquery()
    decided = select(some.c.state).where(some.c.decided_at.is_not(None))
    newest = decided.order_by(some.c.id.desc()).limit(NEWEST).subquery()
    refused = func.coalesce(func.sum(case((newest.c.state == "rejected", 1), else_=0)), 0)
    row = conn.execute(select(refused, func.count()).select_from(newest)).one()
    return int(row[0]), int(row[1])


def _checked(counted: Counter[str]) -> DrawCounts:
    return DrawCounts(**{name: counted[name] for name in DrawCounts.__struct_fields__})
