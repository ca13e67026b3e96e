"""Pay of finished contributions: earned at once, or put at stake.

    vouched for       pending -> earned
    not vouched for   pending -> escrow; after a later draw that passed: escrow -> earned,
                      after one that failed: escrow -> mint
    suspended, or of no weight in a merge: pending -> mint

Besides the ledger's events, which stay, each stake has a row in `escrow` until it is freed or
forfeited. Earned credit settles the debt of its account first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, String, bindparam, cast, exists, func, insert, select

from coordinator.database import recomputes, verdicts
from coordinator.database import volunteers as accounts
from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.statements import among, deletion, equals
from coordinator.database.ledger import debts
from coordinator.database.ledger.payments import Payment, balances, post_step
from coordinator.database.recomputes import NO_ID, Proven
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.ledger import events
from coordinator.database.tables.trust import escrow
from coordinator.database.volunteers import VolunteerRow
from coordinator.rules import draws
from shared.errors import Conflict

SUSPENDED = "not paid: this account is suspended"
WEIGHTLESS = "not paid: it counts nothing in a merge"

_V, _E, _C = volunteers.c, escrow.c, contributions.c
# Events after which a contribution is no longer pending; each is looked up by its unique key.
_SETTLED = exists().where(
    events.c.key.in_(
        [f"{kind}:" + cast(_C.id, String) for kind in ("earn", "void", "escrow", "forfeit")]
    )
)
_ACCOUNTS = (
    select(_C.id.label("contribution"), _SETTLED.label("settled"))
    .add_columns(_V.standing, _V.invited)
    .join(volunteers, _V.id == _C.volunteer_id)
    .where(among(_C.id, "ids"))
)
_SUSPENDED = select(_V.id).where(among(_V.id, "ids"), _V.standing == "suspended").limit(1)
_ADD = insert(escrow)
_OF_ONE = select(escrow).where(equals(_E.volunteer_id)).order_by(_E.contribution_id)
_BETWEEN = (_E.contribution_id > bindparam("after")) & (_E.contribution_id <= bindparam("last"))
_SUM = select(func.coalesce(func.sum(_E.amount_micro), 0)).where(equals(_E.volunteer_id), _BETWEEN)
_REMOVE = deletion(escrow, "settled").where(among(_E.contribution_id, "ids"))


def pay(conn: Connection, rows: Sequence[ContributionRow], now: float) -> None:
    """Pay contributions that are merged, or need no merge. Each contribution must be pending, its
    verdict recorded, and its account locked. Pay is put at stake, and at once freed where passed
    draws prove the work: no later draw may come.

    Hundreds of contributions take a few statements. No credit is paid for weight 0, or to a
    suspended account; pay that was posted or taken back before stays so. Raises Conflict if an
    account is suspended at this moment.
    """
    if not rows:
        return
    account_rows = conn.execute(_ACCOUNTS, {"ids": [row.id for row in rows]})
    accounts_of = {row.contribution: row for row in account_rows if not row.settled}
    earned: list[ContributionRow] = []
    uninvited: list[ContributionRow] = []
    unpaid: dict[str, list[ContributionRow]] = {}
    for row in (row for row in rows if row.id in accounts_of):
        account = accounts_of[row.id]
        if why := _why_unpaid(account, row):
            unpaid.setdefault(why, []).append(row)
        else:
            (earned if account.invited else uninvited).append(row)
    for why, withheld in unpaid.items():
        withhold(conn, withheld, now)
        verdicts.note_unpaid(conn, [row.id for row in withheld], why)
    if earned:
        paid = [Payment.of(row) for row in earned]
        post_step(conn, "earn", paid, now)
        _settle(conn, paid, now)
    _hold(conn, uninvited, now)
    _not_suspended(conn, (*earned, *uninvited))
    _free_proven(conn, [row.id for row in uninvited], now)


def hold(conn: Connection, rows: Sequence[ContributionRow], now: float) -> None:
    """Put the pending credit of contributions at stake. Raises Conflict if an account of theirs is
    suspended.
    """
    _hold(conn, rows, now)
    _not_suspended(conn, rows)


def withhold(conn: Connection, rows: Sequence[ContributionRow], now: float) -> None:
    """Void the pending credit of contributions that are not paid."""
    post_step(conn, "void", [Payment.of(row) for row in rows], now)


def free(conn: Connection, volunteer_id: str, proven: Proven, bond: int, now: float) -> None:
    """Free an account's stake that its draws prove, oldest first.

    The bond (micro-credits) stays, and must come from work before the account's oldest open draw:
    an account that knows that it will fail that draw may have faked all later work.
    """
    free_micro = at_stake(conn, volunteer_id, proven.before - 1, proven.after) - bond
    values = {"where_volunteer_id": volunteer_id, "after": proven.after, "last": proven.last}
    rows = []
    for row in conn.execute(_OF_ONE.where(_BETWEEN), values):
        free_micro -= int(row.amount_micro)
        if free_micro < 0:
            break
        rows.append(_payment(row))
    _free(conn, rows, now)


def _free_proven(conn: Connection, ids: Sequence[int], now: float) -> None:
    """Free the pay of contributions that was just put at stake although passed draws prove the work
    that it pays for. The bond is kept back from that pay, since pay for work after the newest
    passed draw does not count as bond.
    """
    for volunteer_id in recomputes.proven_owners(conn, ids):
        account = accounts.existing(conn, volunteer_id)
        proven = recomputes.proven(conn, account.id, account.unproved_to)
        if account.standing != "suspended" and proven.last:
            proven = msgspec.structs.replace(proven, before=proven.last + 1)
            free(conn, account.id, proven, bond_and_debt(conn, account), now)


def bond_and_debt(conn: Connection, account: VolunteerRow) -> int:
    """Return the sum of an account's bond and debt, in micro-credits; its open draws do not lower
    the bond yet.
    """
    waiting = len(recomputes.open_of(conn, account.id))
    mean = account.accepted_micro / max(1, account.accepted)
    bond = draws.bond(account.draws - waiting, mean)
    return bond + balances(conn, account.id).debt_micro


def free_all(conn: Connection, volunteer_id: str, now: float) -> int:
    """Free the whole stake of a vouched-for account; return the number of contributions."""
    rows = waiting(conn, volunteer_id)
    _free(conn, rows, now)
    return len(rows)


def at_stake(conn: Connection, volunteer_id: str, last: int = NO_ID, after: int = 0) -> int:
    """Return an account's stake in micro-credits, of contributions above `after` up to `last`."""
    values = {"where_volunteer_id": volunteer_id, "after": after, "last": last}
    return int(conn.execute(_SUM, values).scalar_one())


def waiting(conn: Connection, volunteer_id: str) -> list[Payment]:
    """Return an account's stake in the order of its contributions."""
    rows = conn.execute(_OF_ONE, {"where_volunteer_id": volunteer_id})
    return [_payment(row) for row in rows]


def forfeit(conn: Connection, rows: Sequence[Payment], now: float, memo: str = "") -> None:
    """Forfeit stakes, each of which must exist."""
    post_step(conn, "forfeit", rows, now, memo)
    _remove(conn, rows)


def _why_unpaid(account: Any, row: ContributionRow) -> str:
    """Return why a contribution is not paid; "" if it is paid."""
    if account.standing == "suspended":
        return SUSPENDED
    return WEIGHTLESS if row.weight == 0.0 else ""


def _free(conn: Connection, rows: Sequence[Payment], now: float) -> None:
    if rows:
        post_step(conn, "vest", rows, now)
        _remove(conn, rows)
        _settle(conn, rows, now)


def _not_suspended(conn: Connection, rows: Sequence[ContributionRow]) -> None:
    """Raise Conflict if an account was suspended during its payment: its ledger accounts are locked
    by now, so that a suspension is either seen here or sees this payment.
    """
    paid = sorted({row.volunteer_id for row in rows})
    if paid and conn.execute(_SUSPENDED, {"ids": paid}).first() is not None:
        raise Conflict("an account was suspended while it was paid")


def _hold(conn: Connection, rows: Sequence[ContributionRow], now: float) -> None:
    if not rows:
        return
    post_step(conn, "escrow", [Payment.of(row) for row in rows], now)
    lines = [
        {
            "contribution_id": row.id,
            "volunteer_id": row.volunteer_id,
            "run_id": row.run_id,
            "amount_micro": row.price_micro,
        }
        for row in rows
    ]
    conn.execute(_ADD, lines)


def _settle(conn: Connection, rows: Sequence[Payment], now: float) -> None:
    """Repay debts from the credits earned just now."""
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
