"""Merges, and the jobs of merges in shards."""

from __future__ import annotations

import sqlalchemy as sa

from coordinator.database.tables.base import Key, lease_columns, metadata

merges = sa.Table(
    "merges",
    metadata,
    sa.Column("id", Key, primary_key=True, autoincrement=True),
    sa.Column("run_id", sa.ForeignKey("runs.id"), nullable=False, index=True),
    sa.Column("base", sa.Integer, nullable=False),  # head that the merge starts from
    sa.Column("shard", sa.Integer, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # leased, committed, failed, abandoned
    sa.Column("contributions", sa.Text, nullable=False),  # JSON list of ids
    *lease_columns(),
    sa.Column("failures", sa.Integer, nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    # MergeTerms of merging/merge_recipe.py, as JSON
    sa.Column("terms", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("ended_at", sa.Double, nullable=True),
    sa.UniqueConstraint("run_id", "base", "shard"),
)

# Jobs of a merge in shards, one for each shard and phase; deleted at its end, or by a later sweep.
merge_parts = sa.Table(
    "merge_parts",
    metadata,
    sa.Column("id", Key, primary_key=True, autoincrement=True),
    sa.Column("merge_id", sa.ForeignKey("merges.id"), nullable=False),
    sa.Column("phase", sa.String(16), nullable=False),  # survey (rules that need distances), merge
    sa.Column("shard", sa.Integer, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # see PartRow
    *lease_columns(),
    # faults of disks and networks; after bad content the job fails at once
    sa.Column("failures", sa.Integer, nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("result", sa.Text, nullable=False),  # MergedPart, as JSON
    sa.UniqueConstraint("merge_id", "phase", "shard"),
)
sa.Index("ix_merge_parts_open", merge_parts.c.state, merge_parts.c.merge_id)

# Files of a server-optimiser state in shards, by the hash of the list that versions refer to.
state_parts = sa.Table(
    "state_parts",
    metadata,
    sa.Column("state_sha256", sa.String(64), primary_key=True),
    sa.Column("shard", sa.Integer, primary_key=True),
    sa.Column("sha256", sa.String(64), nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
)
