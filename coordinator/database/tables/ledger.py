"""Double-entry ledger: accounts, events, postings. Events and postings are only ever added."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from coordinator.database.tables.base import Key, metadata

accounts = Table(
    "accounts",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("owner", String(64), nullable=False),  # volunteer id, or "system"
    # mint, burn, pending, escrow, earned, held, debt
    Column("kind", String(16), nullable=False),
    Column("balance_micro", BigInteger, nullable=False),
    UniqueConstraint("owner", "kind"),
    CheckConstraint("balance_micro >= 0 OR kind = 'mint'", name="balance"),
)

events = Table(
    "events",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("key", String(128), nullable=False, unique=True),  # e.g. "earn:42"
    Column("digest", String(64), nullable=False),  # same key with other content = 409
    # pending, earn, void, escrow, vest, forfeit, reverse, debt, short, repay, hold, settle,
    # release, grant, give, answer, answered, unanswer, refund
    Column("kind", String(16), nullable=False),
    Column("run_id", Key, nullable=True),
    Column("contribution_id", Key, nullable=True),
    Column("memo", Text, nullable=False),
    Column("at", Double, nullable=False, index=True),
)

postings = Table(
    "postings",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("event_id", ForeignKey("events.id"), nullable=False, index=True),
    Column("account_id", ForeignKey("accounts.id"), nullable=False),
    Column("amount_micro", BigInteger, nullable=False),
)
Index("ix_postings_history", postings.c.account_id, postings.c.event_id)
