"""Pay of contributions that are done: earned at once, or through an escrow.

    invited, vouched for   pending -> earned
    everybody else         pending -> escrow; after so much later work, or time: escrow -> earned
    suspended, no weight   pending -> mint; and at a suspension escrow -> mint

A row of `escrow` stands for what is not earned yet, beside the ledger's events, which stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, delete, insert, select, update

from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.statements import among, its
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
from coordinator.database.tables.trust import escrow
from coordinator.rules.standing import DAY_S, TRUST_MIN, VEST_AFTER, VEST_DAYS

AGED_MAX = 1000  # vested by their age in one transaction

_V, _E = volunteers.c, escrow.c
_WHO = select(_V.id, _V.standing, _V.invited, _V.trust, _V.accepted, _V.passed).where(
    among(_V.id, "ids")
)
_ADD = insert(escrow)
_BASE = select(_E.contribution_id, _E.volunteer_id, _E.run_id, _E.amount_micro)
_DUE = _BASE.join(volunteers, _V.id == _E.volunteer_id).where(
    among(_E.volunteer_id, "ids"),
    _V.standing != "suspended",
    _E.accepted <= _V.accepted - VEST_AFTER,
)
_REMOVE = delete(escrow).where(among(_E.contribution_id, "ids"))


class Paid(msgspec.Struct, frozen=True, kw_only=True):
    """Contributions by what became of their pay."""

    earned: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    unpaid: tuple[int, ...] = ()


def pay(conn: Connection, rows: Sequence[ContributionRow], now: float) -> Paid:
    """Pay contributions that are merged, or need no merge; each must be pending.

    A handful of statements for hundreds of contributions. Nothing is paid for weight 0, to a
    suspended account, or below the least trust to one that nobody vouched for.
    """
    if not rows:
        return Paid()
    found = conn.execute(_WHO, {"ids": sorted({row.volunteer_id for row in rows})})
    who = {row.id: row for row in found}
    unpaid: list[ContributionRow] = []
    earned: list[ContributionRow] = []
    held: list[ContributionRow] = []
    for row in rows:
        account = who[row.volunteer_id]
        distrusted = not account.invited and account.trust < TRUST_MIN
        if account.standing == "suspended" or distrusted or row.weight == 0.0:
            unpaid.append(row)
        else:
            (earned if account.invited else held).append(row)
    post_void_many(conn, [Payment.of(row) for row in unpaid], now)
    post_earned_many(conn, [Payment.of(row) for row in earned], now)
    if held:
        post_escrow_many(conn, [Payment.of(row) for row in held], now)
        lines = [
            {
                "contribution_id": row.id,
                "volunteer_id": row.volunteer_id,
                "run_id": row.run_id,
                "amount_micro": row.price_micro,
                "accepted": who[row.volunteer_id].accepted,
                "passed": who[row.volunteer_id].passed,
                "since": now,
            }
            for row in held
        ]
        conn.execute(_ADD, lines)
        _vest(conn, [*conn.execute(_DUE, {"ids": sorted({row.volunteer_id for row in held})})], now)
    return Paid(
        earned=tuple(row.id for row in earned),
        held=tuple(row.id for row in held),
        unpaid=tuple(row.id for row in unpaid),
    )


def vest_aged(conn: Connection, now: float) -> int:
    """Vest what is old enough and of accounts that passed a check since; how many."""
    query = _BASE.join(volunteers, _V.id == _E.volunteer_id).where(
        _E.since <= now - VEST_DAYS * DAY_S, _E.passed < _V.passed, _V.standing != "suspended"
    )
    rows = conn.execute(query.order_by(_E.since).limit(AGED_MAX)).all()
    _vest(conn, rows, now)
    return len(rows)


def vest_all(conn: Connection, volunteer_id: str, now: float) -> int:
    """Vest all of an account that is vouched for from now on; how many."""
    rows = conn.execute(_BASE.where(_E.volunteer_id == volunteer_id)).all()
    _vest(conn, rows, now)
    return len(rows)


def forfeit(conn: Connection, volunteer_id: str, now: float) -> int:
    """Take back what a suspended account has in escrow, in micro-credits, and the weight of what
    it has waiting for a merge.
    """
    rows = conn.execute(_BASE.where(_E.volunteer_id == volunteer_id)).all()
    post_forfeit_many(conn, [_payment(row) for row in rows], now)
    _remove(conn, rows)
    c = contributions.c
    waiting = update(contributions).where(its(c.volunteer_id), c.state == "accepted")
    conn.execute(waiting, {"its_volunteer_id": volunteer_id, "weight": 0.0})
    return sum(int(row.amount_micro) for row in rows)


def _vest(conn: Connection, rows: Sequence[Any], now: float) -> None:
    post_vested_many(conn, [_payment(row) for row in rows], now)
    _remove(conn, rows)


def _remove(conn: Connection, rows: Sequence[Any]) -> None:
    if rows:
        conn.execute(_REMOVE, {"ids": [_payment(row).contribution_id for row in rows]})


def _payment(row: Any) -> Payment:
    return Payment(
        volunteer_id=row.volunteer_id,
        contribution_id=row.contribution_id,
        run_id=row.run_id,
        amount_micro=int(row.amount_micro),
    )
