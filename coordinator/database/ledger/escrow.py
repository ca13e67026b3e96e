"""Pay of contributions that are done: earned at once, or through an escrow.

    invited, vouched for   pending -> earned
    everybody else         pending -> escrow; after so much later work, or time: escrow -> earned
    unproven by recomputes pending -> escrow, until one proves again
    not comparable here    pending -> escrow, until a check passes
    suspended, distrusted, or of no weight in a merge: pending -> mint

A row of `escrow` stands for what is not earned yet, beside the ledger's events, which stay. What
becomes earned settles the debt of its account first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, String, cast, delete, exists, insert, select

from coordinator.database import verdicts
from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.statements import among, its
from coordinator.database.ledger import debts
from coordinator.database.ledger.payments import (
    Payment,
    post_earned_many,
    post_escrow_many,
    post_forfeit_many,
    post_vested_many,
    post_void_many,
)
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.ledger import events
from coordinator.database.tables.trust import escrow
from coordinator.rules.standing import (
    DAY_S,
    TRUST_MIN,
    UNPROVEN_MAX,
    VEST_AFTER,
    VEST_DAYS,
    vested,
)
from shared.errors import Conflict

AGED_MAX = 1000  # vested by their age in one transaction
SUSPENDED = "not paid: this account is suspended"
DISTRUSTED = f"not paid: the trust in this account is below {TRUST_MIN:g}"
WEIGHTLESS = "not paid: it counts nothing in a merge"

_V, _E, _C = volunteers.c, escrow.c, contributions.c
# No longer pending: paid, or not to be paid. Each is looked up by its unique key.
_SETTLED = exists().where(
    events.c.key.in_(
        [f"{kind}:" + cast(_C.id, String) for kind in ("earn", "void", "escrow", "forfeit")]
    )
)
_WHOSE = (
    select(_C.id.label("contribution"), _SETTLED.label("settled"))
    .add_columns(_V.standing, _V.invited, _V.trust, _V.accepted, _V.passed, _V.unproven)
    .join(volunteers, _V.id == _C.volunteer_id)
    .where(among(_C.id, "ids"))
)
_SUSPENDED = select(_V.id).where(among(_V.id, "ids"), _V.standing == "suspended").limit(1)
_ADD = insert(escrow)
_BASE = select(
    _E.contribution_id,
    _E.volunteer_id,
    _E.run_id,
    _E.amount_micro,
    _E.since,
    (_V.accepted - _E.accepted).label("accepted_since"),
    (_V.passed - _E.passed).label("passed_since"),
    _V.invited,
).join(volunteers, _V.id == _E.volunteer_id)
_FREE = _BASE.where(_V.standing != "suspended", _V.unproven < UNPROVEN_MAX, _V.uncompared == 0)
_OF_ONE = _BASE.where(its(_E.volunteer_id)).order_by(_E.contribution_id)
_DUE = _FREE.where(its(_E.volunteer_id), _E.accepted <= _V.accepted - VEST_AFTER)
_REMOVE = delete(escrow).where(among(_E.contribution_id, "ids"))


def pay(conn: Connection, rows: Sequence[ContributionRow], now: float) -> None:
    """Pay contributions that are merged, or need no merge; each must be pending, and its verdict
    recorded: one that is not paid says so there.

    A handful of statements for hundreds of contributions. Nothing is paid for weight 0, to a
    suspended account, or below the least trust to one that nobody vouched for; what was paid, or
    taken back while it waited, stays so. Raises Conflict when an account is suspended at this
    moment.
    """
    if not rows:
        return
    found = conn.execute(_WHOSE, {"ids": [row.id for row in rows]})
    whose = {each.contribution: each for each in found if not each.settled}
    earned: list[ContributionRow] = []
    held: list[ContributionRow] = []
    unpaid: dict[str, list[ContributionRow]] = {}
    for row in (row for row in rows if row.id in whose):
        account = whose[row.id]
        if why := _why_unpaid(account, row):
            unpaid.setdefault(why, []).append(row)
        else:
            at_once = account.invited and account.unproven < UNPROVEN_MAX
            (earned if at_once else held).append(row)
    for why, withheld in unpaid.items():
        withhold(conn, withheld, now)
        verdicts.unpaid(conn, [row.id for row in withheld], why)
    _earn(conn, [Payment.of(row) for row in earned], now)
    _hold(conn, held, whose, now)
    paid = sorted({row.volunteer_id for row in (*earned, *held)})
    # Its own ledger accounts are locked by now: a suspension is seen here, or sees what is here.
    if paid and conn.execute(_SUSPENDED, {"ids": paid}).first() is not None:
        raise Conflict("an account was suspended while it was paid")


def hold(conn: Connection, rows: Sequence[ContributionRow], now: float) -> None:
    """Put pending credit of an audit into escrow, whosever it is: later work has to stand behind
    it. Raises Conflict when its account is suspended at this moment.
    """
    owners = sorted({row.volunteer_id for row in rows})
    found = conn.execute(_WHOSE, {"ids": [row.id for row in rows]})
    _hold(conn, rows, {each.contribution: each for each in found}, now)
    if conn.execute(_SUSPENDED, {"ids": owners}).first() is not None:
        raise Conflict("an account was suspended while it was paid")


def withhold(conn: Connection, rows: Sequence[ContributionRow], now: float) -> None:
    """Give back the pending credit of contributions that are not to be paid."""
    post_void_many(conn, [Payment.of(row) for row in rows], now)


def vest_due(conn: Connection, volunteer_id: str, now: float) -> int:
    """Vest what enough later work of an account stands behind; how many.

    For who has just counted an accepted contribution: one indexed query where nothing is due.
    """
    return _vest(conn, conn.execute(_DUE, {"its_volunteer_id": volunteer_id}), now)


def vest_aged(conn: Connection, now: float) -> int:
    """Vest what is old enough and of accounts that passed a check since; how many."""
    old = _FREE.where(_E.since <= now - VEST_DAYS * DAY_S, _E.passed < _V.passed)
    return _vest(conn, conn.execute(old.order_by(_E.since).limit(AGED_MAX)), now)


def vest_all(conn: Connection, volunteer_id: str, now: float) -> int:
    """Vest all of an account that is vouched for by now; how many."""
    return _vest(conn, conn.execute(_OF_ONE, {"its_volunteer_id": volunteer_id}), now)


def waiting(conn: Connection, volunteer_id: str) -> list[Payment]:
    """Return what an account has in escrow, in the order of its contributions."""
    found = conn.execute(_OF_ONE, {"its_volunteer_id": volunteer_id})
    return [_payment(row) for row in found]


def forfeit(conn: Connection, rows: Sequence[Payment], now: float, memo: str = "") -> None:
    """Take back what is in escrow; each must be there."""
    post_forfeit_many(conn, rows, now, memo)
    _remove(conn, rows)


def _why_unpaid(account: Any, row: ContributionRow) -> str:
    """Return why a contribution is not paid; "" if it is."""
    if account.standing == "suspended":
        return SUSPENDED
    if not account.invited and account.trust < TRUST_MIN:
        return DISTRUSTED
    return WEIGHTLESS if row.weight == 0.0 else ""


def _hold(
    conn: Connection, rows: Sequence[ContributionRow], whose: dict[int, Any], now: float
) -> None:
    """Put pay into escrow, with the counters of its accounts."""
    if not rows:
        return
    post_escrow_many(conn, [Payment.of(row) for row in rows], now)
    lines = [
        {
            "contribution_id": row.id,
            "volunteer_id": row.volunteer_id,
            "run_id": row.run_id,
            "amount_micro": row.price_micro,
            "accepted": whose[row.id].accepted,
            "passed": whose[row.id].passed,
            "since": now,
        }
        for row in rows
    ]
    conn.execute(_ADD, lines)


def _earn(conn: Connection, rows: Sequence[Payment], now: float) -> None:
    if rows:
        post_earned_many(conn, rows, now)
        _settle(conn, rows, now)


def _vest(conn: Connection, found: Iterable[Any], now: float) -> int:
    """Vest those that the rule says are earned now."""
    rows = [
        _payment(row)
        for row in found
        if vested(
            invited=row.invited,
            accepted_since=row.accepted_since,
            age_s=now - row.since,
            passed_since=row.passed_since > 0,
        )
    ]
    if rows:
        post_vested_many(conn, rows, now)
        _remove(conn, rows)
        _settle(conn, rows, now)
    return len(rows)


def _settle(conn: Connection, rows: Sequence[Payment], now: float) -> None:
    """Settle debts from what was earned just now."""
    debts.repay(conn, {row.volunteer_id: f"repay:{row.contribution_id}" for row in rows}, now)


def _remove(conn: Connection, rows: Sequence[Payment]) -> None:
    if rows:
        conn.execute(_REMOVE, {"ids": [row.contribution_id for row in rows]})


def _payment(row: Any) -> Payment:
    return Payment(
        volunteer_id=row.volunteer_id,
        contribution_id=row.contribution_id,
        run_id=row.run_id,
        amount_micro=int(row.amount_micro),
    )
