"""Spending: credit is held before a delivery, and settled or released afterwards.

    hold            earned  -> held      a delivery is about to be paid
    settle          held    -> burn      it was delivered; the rest of the hold returns to earned
    release         held    -> earned    it was not delivered

The caller chooses the id of a hold, so that each step may be repeated; other numbers under the same
id are refused. Credit released to an account settles its debt (debts.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, select

from coordinator.database.ledger import debts
from coordinator.database.ledger.payments import balances
from coordinator.database.ledger.postings import AMOUNT_MAX, EventDraft, Move, digests, post
from coordinator.database.tables.ledger import accounts, events, postings
from shared.errors import BadRequest, Conflict, Forbidden, NotFound


def hold(
    conn: Connection, volunteer_id: str, hold_id: str, amount_micro: int, memo: str, now: float
) -> None:
    """Hold credit for a delivery. Raises Forbidden for too little credit, BadRequest, Conflict."""
    if not 0 < amount_micro <= AMOUNT_MAX:
        raise BadRequest(f"a hold is between 1 and {AMOUNT_MAX} micro-credits")
    have = balances(conn, volunteer_id).earned_micro
    key = f"hold:{hold_id}"
    if have < amount_micro and not digests(conn, [key]):
        raise Forbidden(
            f"this costs {amount_micro / 1e6:g} credits, and there are {have / 1e6:g} to spend"
        )
    moves = (Move(volunteer_id, "earned", -amount_micro), Move(volunteer_id, "held", amount_micro))
    post(conn, [EventDraft(key=key, kind="hold", moves=moves, memo=memo)], now)


def settle(conn: Connection, volunteer_id: str, hold_id: str, cost_micro: int, now: float) -> None:
    """Settle a delivered request for `cost_micro`, at most its hold; the rest is released. Raises
    BadRequest for a higher cost.
    """
    held_micro = _held(conn, volunteer_id, hold_id)
    if not 0 <= cost_micro <= held_micro:
        raise BadRequest(
            f"hold {hold_id} is {held_micro} micro-credits, so it cannot pay {cost_micro}"
        )
    moves = [Move(volunteer_id, "held", -held_micro), Move(volunteer_id, "burn", cost_micro)]
    if held_micro > cost_micro:
        moves.append(Move(volunteer_id, "earned", held_micro - cost_micro))
    _end(
        conn,
        EventDraft(key=f"settle:{hold_id}", kind="settle", moves=tuple(moves)),
        f"release:{hold_id}",
        now,
    )


def release(conn: Connection, volunteer_id: str, hold_id: str, now: float) -> None:
    """Release the whole hold of an undelivered request."""
    held_micro = _held(conn, volunteer_id, hold_id)
    moves = (Move(volunteer_id, "held", -held_micro), Move(volunteer_id, "earned", held_micro))
    _end(
        conn,
        EventDraft(key=f"release:{hold_id}", kind="release", moves=moves),
        f"settle:{hold_id}",
        now,
    )


def _end(conn: Connection, draft: EventDraft, never: str, now: float) -> None:
    def allowed(new: Sequence[EventDraft]) -> None:
        if digests(conn, [never]):
            raise Conflict(f'"{draft.key}" comes too late: "{never}" was posted before')

    post(conn, [draft], now, allowed)
    owner, hold_id = draft.moves[0].owner, draft.key.partition(":")[2]
    debts.repay(conn, {owner: f"repaid:{hold_id}"}, now)


def _held(conn: Connection, volunteer_id: str, hold_id: str) -> int:
    query = (
        select(postings.c.amount_micro)
        .join(events, events.c.id == postings.c.event_id)
        .join(accounts, accounts.c.id == postings.c.account_id)
        .where(events.c.key == f"hold:{hold_id}", accounts.c.kind == "held")
        .where(accounts.c.owner == volunteer_id)
    )
    amount = conn.execute(query).scalar()
    if amount is None:
        raise NotFound(f'there is no hold "{hold_id}" of yours')
    return int(amount)
