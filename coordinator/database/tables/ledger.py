"""Double-entry ledger: accounts, events, postings. Events and postings are only ever added."""

from __future__ import annotations

import sqlalchemy as sa

from coordinator.database.tables.base import Key, metadata

accounts = sa.Table(
    "accounts",
    metadata,
    sa.Column("id", Key, primary_key=True, autoincrement=True),
    sa.Column("owner", sa.String(64), nullable=False),  # volunteer id, or "system"
    # mint, burn, pending, escrow, earned, held, debt
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("balance_micro", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("owner", "kind"),
    sa.CheckConstraint("balance_micro >= 0 OR kind = 'mint'", name="balance"),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("id", Key, primary_key=True, autoincrement=True),
    sa.Column("key", sa.String(128), nullable=False, unique=True),  # e.g. "earn:42"
    sa.Column("digest", sa.String(64), nullable=False),  # same key with other content = 409
    # pending, earn, void, escrow, vest, forfeit, reverse, debt, short, offset, repay, hold, settle,
    # release, grant, give, answer, answered, unanswer, refund
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("run_id", Key, nullable=True),
    sa.Column("contribution_id", Key, nullable=True),
    sa.Column("memo", sa.Text, nullable=False),
    sa.Column("at", sa.Double, nullable=False, index=True),
)

postings = sa.Table(
    "postings",
    metadata,
    sa.Column("id", Key, primary_key=True, autoincrement=True),
    sa.Column("event_id", sa.ForeignKey("events.id"), nullable=False, index=True),
    sa.Column("account_id", sa.ForeignKey("accounts.id"), nullable=False),
    sa.Column("amount_micro", sa.BigInteger, nullable=False),
)
sa.Index("ix_postings_history", postings.c.account_id, postings.c.event_id)
