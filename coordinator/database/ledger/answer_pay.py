"""Pay of answers: what an asker paid is burnt, and who computed it earns its share at once.

    answer       mint   -> earned    tokens of a request were made on this account's machine
    unanswer     earned -> mint      they were not those of the model

Of vetted accounts only, so nothing waits in escrow. Each step may be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, select

from coordinator.database.ledger import debts
from coordinator.database.ledger.postings import MINT, SYSTEM, Draft, Move, digests, lock, post
from coordinator.database.tables.ledger import accounts, events, postings


def pay(
    conn: Connection, request_id: str, run_id: int, amounts: Mapping[str, int], now: float
) -> None:
    """Pay volunteers, by account, for their parts of a request."""
    drafts = [
        Draft(
            key=f"answer:{request_id}:{who}",
            kind="answer",
            moves=(Move(SYSTEM, MINT, -amount), Move(who, "earned", amount)),
            run_id=run_id,
        )
        for who, amount in amounts.items()
    ]
    post(conn, drafts, now)
    debts.repay(conn, {who: f"repaid:{request_id}:{who}" for who in amounts}, now)


def take_back(conn: Connection, request_id: str, who: str, memo: str, now: float) -> int:
    """Take the pay of a part of a request back; the amount, 0 where it earned nothing."""
    amount = _paid(conn, request_id, who)
    key = f"unanswer:{request_id}:{who}"
    if not amount or digests(conn, [key]):
        return amount
    held = lock(conn, [(who, "debt"), (who, "earned"), (SYSTEM, MINT)])
    missing = max(0, amount - held[who, "earned"])
    debts.owe(conn, who, f"{request_id}:{who}", missing, memo, now)
    moves = (Move(who, "earned", -amount), Move(SYSTEM, MINT, amount))
    post(conn, [Draft(key=key, kind="unanswer", moves=moves, memo=memo)], now)
    return amount


def _paid(conn: Connection, request_id: str, who: str) -> int:
    query = (
        select(postings.c.amount_micro)
        .join(events, events.c.id == postings.c.event_id)
        .join(accounts, accounts.c.id == postings.c.account_id)
        .where(events.c.key == f"answer:{request_id}:{who}", accounts.c.owner == who)
    )
    return int(conn.execute(query).scalar() or 0)
