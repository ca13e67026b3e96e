"""Debts: reversed credits that were already spent, and work that draws showed to be missing. No
account but the mint is ever below zero.

    debt     mint   -> earned    the missing credit, so that it can be reversed;
             mint   -> debt      the same amount is owed from now on
    short    mint   -> debt      a draw showed only a share of the paid work
    offset   mint   -> earned    that work's whole pay is taken back: its charge is repaid
    repay    earned -> mint      later pay settles the debt first;
             debt   -> mint      that much less is owed

An account that owes has nothing in `earned`: all credit that arrives there repays its debt at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, select

from coordinator.database.engine.statements import among
from coordinator.database.ledger.payments import Payment
from coordinator.database.ledger.postings import MINT, SYSTEM, EventDraft, Move, lock, post
from coordinator.database.tables.ledger import accounts, events, postings

_A = accounts.c
_OWING = select(_A.owner).where(among(_A.owner, "owners"), _A.kind == "debt", _A.balance_micro > 0)
_CHARGES = (
    select(events.c.key, postings.c.amount_micro)
    .join_from(events, postings, postings.c.event_id == events.c.id)
    .join(accounts, _A.id == postings.c.account_id)
    .where(among(events.c.key, "keys"), _A.kind == "debt")
)


def owe(conn: Connection, owner: str, key: str, amount_micro: int, memo: str, now: float) -> None:
    """Lend an account the spent part of a reversal in this transaction."""
    if amount_micro <= 0:
        return
    moves = (
        Move(owner, "debt", amount_micro),
        Move(owner, "earned", amount_micro),
        Move(SYSTEM, MINT, -2 * amount_micro),
    )
    post(conn, [EventDraft(key=f"debt:{key}", kind="debt", moves=moves, memo=memo)], now)


def charge(
    conn: Connection, owner: str, contribution_id: int, amount_micro: int, memo: str, now: float
) -> None:
    """Charge an account for work that a draw showed to be missing."""
    if amount_micro <= 0:
        return
    moves = (Move(owner, "debt", amount_micro), Move(SYSTEM, MINT, -amount_micro))
    key = _charge_key(contribution_id)
    post(conn, [EventDraft(key=key, kind="short", moves=moves, memo=memo)], now)
    repay(conn, {owner: f"repay:{key}"}, now)


def _charge_key(contribution_id: int) -> str:
    return f"short:{contribution_id}"


def offset(conn: Connection, payments: Sequence[Payment], memo: str, now: float) -> int:
    """Pay back the charges for contributions whose whole pay is taken back in this transaction, at
    most the pay; return the sum in micro-credits.
    """
    by_key = {_charge_key(payment.contribution_id): payment for payment in payments}
    drafts: list[EventDraft] = []
    total_micro = 0
    for key, charged_micro in conn.execute(_CHARGES, {"keys": sorted(by_key)}):
        payment = by_key[key]
        amount_micro = min(int(charged_micro), payment.amount_micro)
        moves = (
            Move(payment.volunteer_id, "earned", amount_micro),
            Move(SYSTEM, MINT, -amount_micro),
        )
        name = f"offset:{payment.contribution_id}"
        drafts.append(EventDraft(key=name, kind="offset", moves=moves, memo=memo))
        total_micro += amount_micro
    post(conn, drafts, now)
    return total_micro


def repay(conn: Connection, keys: Mapping[str, str], now: float) -> None:
    """Repay accounts' debts from their earnings. `keys` has a key for each account's
    repayment, named after an event of this transaction.

    One statement suffices if no account owes anything.
    """
    owing = [row.owner for row in conn.execute(_OWING, {"owners": sorted(keys)})]
    if not owing:
        return
    names = [(owner, kind) for owner in owing for kind in ("debt", "earned")]
    balances_held = lock(conn, [*names, (SYSTEM, MINT)])
    drafts: list[EventDraft] = []
    for owner in owing:
        amount = min(balances_held[owner, "debt"], balances_held[owner, "earned"])
        moves = (
            Move(owner, "debt", -amount),
            Move(owner, "earned", -amount),
            Move(SYSTEM, MINT, 2 * amount),
        )
        if amount > 0:
            drafts.append(EventDraft(key=keys[owner], kind="repay", moves=moves))
    post(conn, drafts, now)
