"""Versions, the blobs they keep alive, and their evaluations."""

from __future__ import annotations

import sqlalchemy as sa

from coordinator.database.tables.base import lease_columns, metadata

versions = sa.Table(
    "versions",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),  # initial, merge, rollback
    sa.Column("parent", sa.Integer, nullable=True),
    sa.Column("master_sha256", sa.String(64), nullable=False),
    sa.Column("published_sha256", sa.String(64), nullable=False, index=True),
    sa.Column("size", sa.BigInteger, nullable=False),  # bytes of the published weights
    sa.Column("state_sha256", sa.String(64), nullable=True),  # server-optimiser state
    sa.Column("manifest", sa.Text, nullable=False),  # canonical JSON that was signed
    sa.Column("signature", sa.String(128), nullable=False),
    sa.Column("contributions", sa.Text, nullable=False),  # JSON list of ids, in merge order
    sa.Column("global_step", sa.BigInteger, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("update_norm", sa.Double, nullable=True),
    sa.Column("created_at", sa.Double, nullable=False),
)

# Evaluation and retention of a version; rows here change, rows of `versions` do not.
evaluations = sa.Table(
    "evaluations",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("state", sa.String(16), nullable=False),  # waiting, running, done, skipped, failed
    *lease_columns(),
    sa.Column("loss", sa.Double, nullable=True),
    sa.Column("metrics", sa.Text, nullable=False),
    sa.Column("sample", sa.Text, nullable=False),
    sa.Column("sample_sha256", sa.String(64), nullable=True, index=True),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("at", sa.Double, nullable=True),
    sa.Column("pruned", sa.Boolean, nullable=False),  # its files may be deleted (retention)
)
_e = evaluations.c
sa.Index("ix_evaluations_waiting", _e.state, _e.run_id, _e.version)
sa.Index("ix_evaluations_best", _e.run_id, _e.loss, _e.version)
# Retention reads the few versions that still have their blobs.
sa.Index(
    "ix_evaluations_kept",
    _e.run_id,
    _e.version,
    sqlite_where=~_e.pruned,
    postgresql_where=~_e.pruned,
)

# Losses of versions on the held-out data of members.
heldout_sums = sa.Table(
    "heldout_sums",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("worker_id", sa.ForeignKey("workers.id"), primary_key=True),
    sa.Column("volunteer_id", sa.ForeignKey("volunteers.id"), nullable=False),
    sa.Column("loss_sum", sa.Double, nullable=False),
    sa.Column("items", sa.BigInteger, nullable=False),
)

# Scores of versions on the task suites of their run.
suite_scores = sa.Table(
    "suite_scores",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("suite", sa.String(64), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("correct", sa.Integer, nullable=False),
    sa.Column("examples", sa.Integer, nullable=False),  # number of answered examples
    sa.Column("cut", sa.Integer, nullable=False),  # examples that are too long for the model
    sa.Column("at", sa.Double, nullable=False),
)

# Shorter routes to a version's published weights (links, snapshots), as its manifest lists them;
# they are deleted with it.
version_blobs = sa.Table(
    "version_blobs",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("sha256", sa.String(64), primary_key=True, index=True),
)
