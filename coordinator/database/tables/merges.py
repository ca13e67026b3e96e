"""Merges, and the jobs of merges in shards."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from coordinator.database.tables.base import Key, metadata

merges = Table(
    "merges",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False, index=True),
    Column("base", Integer, nullable=False),  # head that the merge starts from
    Column("shard", Integer, nullable=False),
    Column("state", String(16), nullable=False),  # leased, committed, failed, abandoned
    Column("contributions", Text, nullable=False),  # JSON list of ids
    Column("owner", String(64), nullable=False),
    Column("fence", Integer, nullable=False),
    Column("lease_until", Double, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("message", Text, nullable=False),
    # MergeTerms of merging/recipe.py, JSON
    Column("terms", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("ended_at", Double, nullable=True),
    UniqueConstraint("run_id", "base", "shard"),
)

# Jobs of a merge in shards, one for each shard and phase; deleted at its end, or by a later sweep.
merge_parts = Table(
    "merge_parts",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("merge_id", ForeignKey("merges.id"), nullable=False),
    Column("phase", String(16), nullable=False),  # survey (rules that need distances), merge
    Column("shard", Integer, nullable=False),
    Column("state", String(16), nullable=False),  # see PartRow
    Column("owner", String(64), nullable=False),
    Column("fence", Integer, nullable=False),
    Column("lease_until", Double, nullable=False),
    Column("failures", Integer, nullable=False),  # of disks and networks; bad content fails at once
    Column("message", Text, nullable=False),
    Column("result", Text, nullable=False),  # JSON of the files that the job made
    UniqueConstraint("merge_id", "phase", "shard"),
)
Index("ix_merge_parts_open", merge_parts.c.state, merge_parts.c.merge_id)

# Files of a server-optimiser state in shards, by the hash of the list that versions refer to.
state_parts = Table(
    "state_parts",
    metadata,
    Column("state_sha256", String(64), primary_key=True),
    Column("shard", Integer, primary_key=True),
    Column("sha256", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
)
