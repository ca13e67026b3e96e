"""Reversals: all pay posted or promised for a contribution returns to the mint.

    pending, in escrow   an event "forfeit"
    earned               an event "reverse"; its spent part becomes a debt first (debts.py)

If a draw charged the account for missing work in such a contribution, the charge is paid back,
since the contribution's whole pay is taken back. Pay that was taken back before, or never posted,
is unchanged, so that repeating an interrupted reversal finishes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection

from coordinator.database.ledger import debts, escrow, payments
from coordinator.database.ledger.payments import Payment
from coordinator.database.ledger.postings import MINT, SYSTEM, lock

TOUCHED = ("debt", "earned", "escrow", "pending")  # kinds of accounts
OVER = frozenset({"void", "forfeit", "reverse"})  # events after which nothing can be taken back


class TakenBack(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts that were taken back, by ledger account."""

    contributions: int = 0
    pending_micro: int = 0
    escrow_micro: int = 0
    earned_micro: int = 0
    debt_micro: int = 0  # part of the earned credits that was spent, and is owed from now on

    def __add__(self, other: TakenBack) -> TakenBack:
        return TakenBack(
            **{
                name: getattr(self, name) + getattr(other, name)
                for name in TakenBack.__struct_fields__
            }
        )


def take_back(conn: Connection, rows: Sequence[Payment], memo: str, now: float) -> TakenBack:
    """Reverse the pay of a volunteer's contributions, with a memo, in a few statements."""
    if not rows:
        return TakenBack()
    owner = rows[0].volunteer_id
    balances_held = lock(conn, [*((owner, kind) for kind in TOUCHED), (SYSTEM, MINT)])
    steps = payments.steps_of(conn, [row.contribution_id for row in rows])
    live = [row for row in rows if not steps[row.contribution_id] & OVER]
    earned = [row for row in live if steps[row.contribution_id] & {"earn", "vest"}]
    held_back = [row for row in live if steps[row.contribution_id] == {"pending", "escrow"}]
    pending = [row for row in live if steps[row.contribution_id] == {"pending"}]
    payments.post_step(conn, "withdraw", pending, now, memo)
    escrow.forfeit(conn, held_back, now, memo)
    offset_micro = debts.offset(conn, live, memo, now)
    missing = max(0, _sum(earned) - balances_held[owner, "earned"] - offset_micro)
    if earned:
        # Each contribution is reversed once, so the debt can be named after the last of them.
        last = max(row.contribution_id for row in earned)
        debts.owe(conn, owner, str(last), missing, memo, now)
        payments.post_step(conn, "reverse", earned, now, memo)
    if offset_micro:
        debts.repay(conn, {owner: f"repay:offset:{live[0].contribution_id}"}, now)
    return TakenBack(
        contributions=len(pending) + len(held_back) + len(earned),
        pending_micro=_sum(pending),
        escrow_micro=_sum(held_back),
        earned_micro=_sum(earned),
        debt_micro=missing,
    )


def _sum(rows: Sequence[Payment]) -> int:
    return sum(row.amount_micro for row in rows)
