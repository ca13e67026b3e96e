"""Merkle tree over the ledger and the record: one tree for both.

One head covers all entries, so that one number and one hash in each manifest stand for the whole
record. Both tables only grow; size and root of the tree are the value `tree` of `meta`.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    LargeBinary,
    SmallInteger,
    String,
    Table,
    UniqueConstraint,
)

from coordinator.database.tables.base import metadata

# Rows of both logs by their place in the tree.
merkle_leaves = Table(
    "merkle_leaves",
    metadata,
    Column("place", BigInteger, primary_key=True, autoincrement=False),
    Column("log", String(16), nullable=False),  # events or record
    Column("row_id", BigInteger, nullable=False),
    UniqueConstraint("log", "row_id"),
)

# Complete subtrees, leaves included: (level, place) covers 2^level leaves from place * 2^level on.
merkle_nodes = Table(
    "merkle_nodes",
    metadata,
    Column("level", SmallInteger, primary_key=True, autoincrement=False),
    Column("place", BigInteger, primary_key=True, autoincrement=False),
    Column("hash", LargeBinary(32), nullable=False),
)
