"""Uploads, contributions, and every verdict on them."""

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
    UniqueConstraint,
    false,
    true,
)

from coordinator.database.tables.base import Key, metadata

uploads = Table(
    "uploads",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("task_id", ForeignKey("tasks.id"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("part", Integer, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("worker_id", String(64), nullable=False, index=True),
    Column("sha256", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("complete", Boolean, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    # contribution that the upload is evidence for; NULL for a contribution's own update
    Column("evidence_of", Key, nullable=True),
    UniqueConstraint("task_id", "attempt", "part", "tries", "sha256"),
)

contributions = Table(
    "contributions",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("task_id", ForeignKey("tasks.id"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("part", Integer, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("worker_id", String(64), nullable=False),
    Column("volunteer_id", String(64), nullable=False),
    # digest of the submit message: the same key with another digest gives 409
    Column("digest", String(64), nullable=False),
    Column("kind", String(16), nullable=False),  # delta, gradient, experience, evaluation, audit
    Column("codec", String(32), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("base_version", Integer, nullable=False),
    Column("steps", Integer, nullable=False),  # fixed by the task
    Column("samples", BigInteger, nullable=False),  # fixed by the task
    Column("price_micro", BigInteger, nullable=False),
    Column("loss_first", Double, nullable=True),  # losses as reported
    Column("loss_last", Double, nullable=True),
    Column("train_s", Double, nullable=False),
    Column("norm", Double, nullable=True),  # norm as measured
    Column("clip", Double, nullable=False),  # factor <= 1 that scales it to its cohort
    Column("weight", Double, nullable=True),  # staleness x trust, used at the merge
    Column("state", String(16), nullable=False),
    Column("reason", String(32), nullable=False),
    Column("message", Text, nullable=False),
    Column("version", Integer, nullable=True),  # version that it was merged into
    Column("report", Text, nullable=False),  # SubmitRequest, JSON
    Column("received_at", Double, nullable=False),
    Column("decided_at", Double, nullable=True),
    Column("merged_at", Double, nullable=True),
    # whether its account is vetted, fixed at the merge; kept here, so that reads need no join
    Column("vetted", Boolean, nullable=False, server_default=true()),
    Column("network", String(64), nullable=False, server_default=""),
    # drawn from an account on probation, and merged only once its recompute has passed
    Column("unproven", Boolean, nullable=False, server_default=false()),
    # duration of its checks
    Column("checked_s", Double, nullable=False, server_default="0"),
    UniqueConstraint("task_id", "attempt", "part", "tries"),
)
_c = contributions.c
Index("ix_contributions_pending", _c.state, _c.run_id, _c.id)
# Every decision compares a contribution with the newest of its kind, and searches for the same
# bytes.
Index(
    "ix_contributions_newest",
    _c.run_id,
    _c.kind,
    _c.id,
    sqlite_where=_c.norm.is_not(None),
    postgresql_where=_c.norm.is_not(None),
)
Index("ix_contributions_seen", _c.sha256, _c.run_id)
Index("ix_contributions_volunteer", _c.volunteer_id, _c.run_id, _c.version)
# Search of a machine's optimiser states; partial, or SQLite would use this index to search uploads,
# too.
Index(
    "ix_contributions_machine",
    _c.worker_id,
    _c.run_id,
    _c.id,
    sqlite_where=_c.state != "rejected",
    postgresql_where=_c.state != "rejected",
)

# Every change of a contribution's state, in order: the history that its volunteer reads.
verdicts = Table(
    "verdicts",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("contribution_id", ForeignKey("contributions.id"), nullable=False, index=True),
    Column("worker_id", String(64), nullable=False),
    Column("volunteer_id", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", String(32), nullable=False),
    Column("message", Text, nullable=False),
    Column("version", Integer, nullable=True),
    Column("at", Double, nullable=False),
)
Index("ix_verdicts_news", verdicts.c.worker_id, verdicts.c.id)
Index("ix_verdicts_history", verdicts.c.volunteer_id, verdicts.c.id)
