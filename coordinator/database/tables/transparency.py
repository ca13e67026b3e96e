"""Merkle tree over the ledger and the record: one tree for both.

One head covers all entries, so that one number and one hash in each manifest stand for the whole
record. Both tables only grow; size and root of the tree are the value `tree` of `meta`.
"""

from __future__ import annotations

import sqlalchemy as sa

from coordinator.database.tables.base import metadata

# Rows of both logs by their place in the tree.
merkle_leaves = sa.Table(
    "merkle_leaves",
    metadata,
    sa.Column("place", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("log", sa.String(16), nullable=False),  # events or record
    sa.Column("row_id", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("log", "row_id"),
)

# Complete subtrees, leaves included: (level, place) covers 2^level leaves from place * 2^level on.
merkle_nodes = sa.Table(
    "merkle_nodes",
    metadata,
    sa.Column("level", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("place", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("hash", sa.LargeBinary(32), nullable=False),
)
