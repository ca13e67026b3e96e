"""Experience of actors: harvests, the chunks of the replay window, matches and metrics."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Index, Integer, String, Table

from coordinator.database.tables.base import Key, metadata

# Good episodes of one accepted contribution, before and after they are sealed into a chunk.
harvests = Table(
    "harvests",
    metadata,
    Column("contribution_id", ForeignKey("contributions.id"), primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("episodes", Integer, nullable=False),
    Column("samples", Integer, nullable=False),
    Column("chunk", Integer, nullable=True),  # number of its chunk after sealing
    Column("at", Double, nullable=False),
)
Index("ix_harvests_open", harvests.c.run_id, harvests.c.chunk)

# Replay window: immutable files of episodes, in the order of sealing. No row is ever deleted.
chunks = Table(
    "chunks",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("sha256", String(64), nullable=False, index=True),
    Column("size", BigInteger, nullable=False),
    Column("episodes", Integer, nullable=False),
    Column("samples", Integer, nullable=False),
    Column("sealed_at", Double, nullable=False),
    Column("retired_at", Double, nullable=True),  # out of the window; the file goes a day later
)

# Checked matches between versions of a run.
matches = Table(
    "matches",
    metadata,
    Column("contribution_id", ForeignKey("contributions.id"), primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False, index=True),
    Column("version", Integer, nullable=False),
    Column("against", Integer, nullable=False),
    Column("wins", Integer, nullable=False),
    Column("draws", Integer, nullable=False),
    Column("losses", Integer, nullable=False),
    Column("at", Double, nullable=False),
)

# Ratings of a run's versions, computed from its matches.
metrics = Table(
    "metrics",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("name", String(64), nullable=False),
    Column("version", Integer, nullable=True),
    Column("value", Double, nullable=False),
    Column("at", Double, nullable=False),
)
Index("ix_metrics_read", metrics.c.run_id, metrics.c.name, metrics.c.id)
