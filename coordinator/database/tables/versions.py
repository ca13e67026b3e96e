"""Versions, the blobs they keep alive, and their evaluations."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
)

from coordinator.database.tables.base import metadata

versions = Table(
    "versions",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("kind", String(16), nullable=False),  # initial, merge, rollback
    Column("parent", Integer, nullable=True),
    Column("master_sha256", String(64), nullable=False),
    Column("published_sha256", String(64), nullable=False, index=True),
    Column("size", BigInteger, nullable=False),  # bytes of the published weights
    Column("state_sha256", String(64), nullable=True),  # server-optimiser state
    Column("manifest", Text, nullable=False),  # canonical JSON that was signed
    Column("signature", String(128), nullable=False),
    Column("contributions", Text, nullable=False),  # JSON list of ids, in merge order
    Column("global_step", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    # index of the plan's phase from this version to the next
    Column("phase", Integer, nullable=False, server_default="0"),
    Column("update_norm", Double, nullable=True),
    Column("heading", Double, nullable=True),  # cosine of the update with the momentum before it
    # share of the plan's outer rate that the merge used
    Column("outer_scale", Double, nullable=False, server_default="1"),
    Column("created_at", Double, nullable=False),
)

# Evaluation and retention of a version; rows here change, rows of `versions` do not.
evaluations = Table(
    "evaluations",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("state", String(16), nullable=False),  # waiting, running, done, skipped, failed
    Column("loss", Double, nullable=True),
    Column("metrics", Text, nullable=False),
    Column("sample", Text, nullable=False),
    Column("sample_sha256", String(64), nullable=True, index=True),
    Column("message", Text, nullable=False),
    Column("at", Double, nullable=True),
    Column("pruned", Boolean, nullable=False),  # its blobs were deleted (retention)
)
_e = evaluations.c
Index("ix_evaluations_waiting", _e.state, _e.run_id, _e.version)
Index("ix_evaluations_best", _e.run_id, _e.loss, _e.version)
# Retention reads the few versions that still have their blobs.
Index(
    "ix_evaluations_kept",
    _e.run_id,
    _e.version,
    sqlite_where=~_e.pruned,
    postgresql_where=~_e.pruned,
)

# Scores of versions on the task suites of their run.
suite_scores = Table(
    "suite_scores",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("suite", String(64), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("correct", Integer, nullable=False),
    Column("examples", Integer, nullable=False),  # number of answered examples
    Column("cut", Integer, nullable=False),  # examples that are too long for the model
    Column("at", Double, nullable=False),
)

# Shorter routes to a version's published weights (links, snapshots), as its manifest lists them;
# they are deleted with it.
version_blobs = Table(
    "version_blobs",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("sha256", String(64), primary_key=True, index=True),
)
