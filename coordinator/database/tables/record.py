"""Record, and single values by key."""

from __future__ import annotations

from sqlalchemy import Column, Double, String, Table, Text

from coordinator.database.tables.base import Key, metadata

record_lines = Table(
    "record",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("actor", String(64), nullable=False),
    Column("action", String(64), nullable=False),
    Column("subject", String(255), nullable=False),
    Column("detail", Text, nullable=False),
)
RECORD_SEALED = (
    record_lines.c.at,
    record_lines.c.actor,
    record_lines.c.action,
    record_lines.c.subject,
    record_lines.c.detail,
)

# Organisers' words about accounts, which the record and the ledger name; they can be forgotten.
reasons = Table(
    "reasons",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("volunteer_id", String(64), nullable=False, index=True),
    Column("text", Text, nullable=False),
)

meta = Table(
    "meta",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)
