"""Gifts: credit that an account gets without work.

    grant    mint     -> earned    the organiser gives it, for a reason
    give     earned   -> earned    another volunteer gives from its earnings

Credit for an account with a debt settles the debt first (debts.py).
"""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from coordinator.database.ledger import debts
from coordinator.database.ledger.postings import (
    AMOUNT_MAX,
    MINT,
    SYSTEM,
    EventDraft,
    Move,
    digests,
    post,
)
from coordinator.database.tables.ledger import accounts, events, postings
from shared.errors import BadRequest


def grant(conn: Connection, owner: str, key: str, amount_micro: int, memo: str, now: float) -> None:
    """Give credit from the mint. Raises BadRequest for the amount, Conflict for a used key."""
    _check(amount_micro)
    moves = (Move(owner, "earned", amount_micro), Move(SYSTEM, MINT, -amount_micro))
    post(conn, [EventDraft(key=f"grant:{key}", kind="grant", moves=moves, memo=memo)], now)
    debts.repay(conn, {owner: f"repaid:grant:{key}"}, now)


def give(
    conn: Connection, sides: tuple[str, str], gift: str, amount_micro: int, now: float
) -> bool:
    """Move earned credit from the first account to the second; return False if this gift was made
    before.

    Raises BadRequest for the amount, Forbidden if the giver has too little, Conflict if this gift
    was made before with another amount or taker.
    """
    _check(amount_micro)
    giver, taker = sides
    key = f"give:{giver}:{gift}"
    moves = (Move(giver, "earned", -amount_micro), Move(taker, "earned", amount_micro))
    draft = EventDraft(key=key, kind="give", moves=moves, memo=f"from {giver} to {taker}")
    new = not digests(conn, [key])
    post(conn, [draft], now)
    if new:
        # named after giver and gift, since givers may choose the same id
        debts.repay(conn, {taker: f"repaid:{key}"}, now)
    return new


def given_since(conn: Connection, giver: str, at: float) -> tuple[int, int]:
    """Return the sum and the number of an account's gifts from `at` on."""
    query = (
        select(func.coalesce(func.sum(postings.c.amount_micro), 0), func.count())
        .join(events, events.c.id == postings.c.event_id)
        .join(accounts, accounts.c.id == postings.c.account_id)
        .where(accounts.c.owner == giver, accounts.c.kind == "earned")
        .where(events.c.kind == "give", events.c.at >= at, postings.c.amount_micro < 0)
    )
    micro, count = conn.execute(query).one()
    return -int(micro), int(count)


def _check(amount_micro: int) -> None:
    if not 0 < amount_micro <= AMOUNT_MAX:
        raise BadRequest("a gift must be above 0 and at most 9 billion credits")
