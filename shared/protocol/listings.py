"""Rows of listings: leaderboard, losses, ledger."""

from __future__ import annotations

from shared.protocol.base import Message


class LeaderRow(Message):
    rank: int
    nickname: str
    earned_micro: int
    accepted: int
    device_s: float
    workers: int
    me: bool = False


class LossPoint(Message):
    version: int
    loss: float
    at: float


class LedgerRow(Message):
    """One line of a volunteer's ledger."""

    id: int
    at: float
    run: str
    kind: str  # such as "pending", "earned", "reversed", "spent"
    amount_micro: int
    contribution: int | None
    memo: str
