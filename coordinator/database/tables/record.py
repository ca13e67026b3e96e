"""Record, and single values by key."""

from __future__ import annotations

import sqlalchemy as sa

from coordinator.database.tables.base import Key, metadata

record_lines = sa.Table(
    "record",
    metadata,
    sa.Column("id", Key, primary_key=True, autoincrement=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("actor", sa.String(64), nullable=False),
    sa.Column("action", sa.String(64), nullable=False),
    sa.Column("subject", sa.String(255), nullable=False),
    sa.Column("detail", sa.Text, nullable=False),
)
RECORD_SEALED = (
    record_lines.c.at,
    record_lines.c.actor,
    record_lines.c.action,
    record_lines.c.subject,
    record_lines.c.detail,
)

# Organisers' words about accounts, which the record and the ledger name; they can be forgotten.
reasons = sa.Table(
    "reasons",
    metadata,
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("volunteer_id", sa.String(64), nullable=False, index=True),
    sa.Column("text", sa.Text, nullable=False),
)

meta = sa.Table(
    "meta",
    metadata,
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
