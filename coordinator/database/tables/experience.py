"""Experience of actors: harvests, sums over answers, chunks of the replay window, matches and
metrics.
"""

from __future__ import annotations

import sqlalchemy as sa

from coordinator.database.tables.base import Key, metadata

# Good episodes of one accepted contribution, before and after they are sealed into a chunk.
harvests = sa.Table(
    "harvests",
    metadata,
    sa.Column("contribution_id", sa.ForeignKey("contributions.id"), primary_key=True),
    sa.Column("run_id", sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("sha256", sa.String(64), nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("episodes", sa.Integer, nullable=False),
    sa.Column("samples", sa.Integer, nullable=False),
    sa.Column("chunk", sa.Integer, nullable=True),  # number of its chunk after sealing
    sa.Column("at", sa.Double, nullable=False),
)
sa.Index("ix_harvests_open", harvests.c.run_id, harvests.c.chunk)

# Sums over the judged answers of each version of a run of rollouts.
rollout_sums = sa.Table(
    "rollout_sums",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("answers", sa.BigInteger, nullable=False),
    sa.Column("reward", sa.Double, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("surprise", sa.Double, nullable=False),
    sa.Column("cut", sa.BigInteger, nullable=False),
)

# Replay window: immutable files of episodes, in the order of sealing. No row is ever deleted.
chunks = sa.Table(
    "chunks",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("sha256", sa.String(64), nullable=False, index=True),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("episodes", sa.Integer, nullable=False),
    sa.Column("samples", sa.Integer, nullable=False),
    sa.Column("sealed_at", sa.Double, nullable=False),
    sa.Column(
        "retired_at", sa.Double, nullable=True
    ),  # when it left the window; its file is deleted a day later
)

# Checked matches between versions of a run.
matches = sa.Table(
    "matches",
    metadata,
    sa.Column("contribution_id", sa.ForeignKey("contributions.id"), primary_key=True),
    sa.Column("run_id", sa.ForeignKey("runs.id"), nullable=False, index=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("against", sa.Integer, nullable=False),
    sa.Column("wins", sa.Integer, nullable=False),
    sa.Column("draws", sa.Integer, nullable=False),
    sa.Column("losses", sa.Integer, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
)

# Ratings of a run's versions, computed from its matches.
metrics = sa.Table(
    "metrics",
    metadata,
    sa.Column("id", Key, primary_key=True, autoincrement=True),
    sa.Column("run_id", sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("name", sa.String(64), nullable=False),
    sa.Column("version", sa.Integer, nullable=True),
    sa.Column("value", sa.Double, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
)
sa.Index("ix_metrics_read", metrics.c.run_id, metrics.c.name, metrics.c.id)
