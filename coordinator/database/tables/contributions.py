"""Uploads, contributions, and every verdict on them."""

from __future__ import annotations

import sqlalchemy as sa

from coordinator.database.tables.base import Key, metadata

uploads = sa.Table(
    "uploads",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("task_id", sa.ForeignKey("tasks.id"), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("part", sa.Integer, nullable=False),
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("worker_id", sa.String(64), nullable=False, index=True),
    sa.Column("sha256", sa.String(64), nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("complete", sa.Boolean, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=False),
    sa.UniqueConstraint("task_id", "attempt", "part", "tries", "sha256"),
)

contributions = sa.Table(
    "contributions",
    metadata,
    sa.Column("id", Key, primary_key=True, autoincrement=True),
    sa.Column("run_id", sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("task_id", sa.ForeignKey("tasks.id"), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("part", sa.Integer, nullable=False),
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("worker_id", sa.String(64), nullable=False),
    sa.Column("volunteer_id", sa.String(64), nullable=False),
    # digest of the submit message: the same key with another digest gives 409
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column(
        "kind", sa.String(16), nullable=False
    ),  # delta, gradient, experience, evaluation, audit
    sa.Column("codec", sa.String(32), nullable=False),
    sa.Column("sha256", sa.String(64), nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("base_version", sa.Integer, nullable=False),
    sa.Column("steps", sa.Integer, nullable=False),  # fixed by the task
    sa.Column("samples", sa.BigInteger, nullable=False),  # fixed by the task
    sa.Column("price_micro", sa.BigInteger, nullable=False),
    sa.Column("loss_first", sa.Double, nullable=True),  # losses as reported
    sa.Column("loss_last", sa.Double, nullable=True),
    sa.Column("train_s", sa.Double, nullable=False),
    sa.Column("norm", sa.Double, nullable=True),  # norm as measured
    sa.Column("clip", sa.Double, nullable=False),  # factor <= 1 by which its cohort limits its norm
    sa.Column("weight", sa.Double, nullable=True),  # by staleness, used at the merge
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("reason", sa.String(32), nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("version", sa.Integer, nullable=True),  # version that it was merged into
    sa.Column("report", sa.Text, nullable=False),  # SubmitRequest, as JSON
    sa.Column("received_at", sa.Double, nullable=False),
    sa.Column("decided_at", sa.Double, nullable=True),
    sa.Column("merged_at", sa.Double, nullable=True),
    # whether the contribution's account is vetted, fixed at the merge; kept here, so that reads
    # need no join
    sa.Column("vetted", sa.Boolean, nullable=False, server_default=sa.true()),
    sa.Column("network", sa.String(64), nullable=False, server_default=""),
    # drawn from an account on probation, and merged only once its recompute has passed
    sa.Column("unproven", sa.Boolean, nullable=False, server_default=sa.false()),
    # duration of its checks
    sa.Column("checked_s", sa.Double, nullable=False, server_default="0"),
    sa.UniqueConstraint("task_id", "attempt", "part", "tries"),
)
_c = contributions.c
sa.Index("ix_contributions_pending", _c.state, _c.run_id, _c.id)
# Every decision compares a contribution with the newest of its kind, and searches for the same
# bytes.
sa.Index(
    "ix_contributions_newest",
    _c.run_id,
    _c.kind,
    _c.id,
    sqlite_where=_c.norm.is_not(None),
    postgresql_where=_c.norm.is_not(None),
)
sa.Index("ix_contributions_seen", _c.sha256, _c.run_id)
sa.Index("ix_contributions_volunteer", _c.volunteer_id, _c.run_id, _c.version)
# Search of a worker's updates that wait for a merge; rejected updates never wait.
sa.Index(
    "ix_contributions_machine",
    _c.worker_id,
    _c.run_id,
    _c.id,
    sqlite_where=_c.state != "rejected",
    postgresql_where=_c.state != "rejected",
)

# Every change of a contribution's state, in order: the history that its volunteer reads.
verdicts = sa.Table(
    "verdicts",
    metadata,
    sa.Column("id", Key, primary_key=True, autoincrement=True),
    sa.Column("contribution_id", sa.ForeignKey("contributions.id"), nullable=False, index=True),
    sa.Column("worker_id", sa.String(64), nullable=False),
    sa.Column("volunteer_id", sa.String(64), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("reason", sa.String(32), nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("version", sa.Integer, nullable=True),
    sa.Column("at", sa.Double, nullable=False),
)
sa.Index("ix_verdicts_news", verdicts.c.worker_id, verdicts.c.id)
sa.Index("ix_verdicts_history", verdicts.c.volunteer_id, verdicts.c.id)
