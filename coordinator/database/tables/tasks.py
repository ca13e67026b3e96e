"""Queue: tasks, and their failures and timeouts."""

from __future__ import annotations

import sqlalchemy as sa

from coordinator.database.tables.base import Key, metadata

tasks = sa.Table(
    "tasks",
    metadata,
    sa.Column("id", Key, primary_key=True, autoincrement=True),
    sa.Column("run_id", sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("pass_no", sa.Integer, nullable=False),
    sa.Column("start", sa.BigInteger, nullable=False),
    sa.Column("stop", sa.BigInteger, nullable=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("steps", sa.Integer, nullable=False),
    sa.Column("batch_size", sa.Integer, nullable=False),
    sa.Column("price_micro", sa.BigInteger, nullable=False),  # price of the whole task
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("claim_id", sa.String(64), nullable=True, unique=True),
    sa.Column("worker_id", sa.ForeignKey("workers.id"), nullable=True),
    sa.Column("volunteer_id", sa.String(64), nullable=True),
    sa.Column("device", sa.String(32), nullable=False),
    # operations a second of the device by its claim, times the share of time that its owner gives;
    # 0 = unknown
    sa.Column("flops", sa.Double, nullable=False, server_default="0"),
    sa.Column("claimed_at", sa.Double, nullable=True),
    sa.Column("begun_at", sa.Double, nullable=True),
    sa.Column("base_version", sa.Integer, nullable=True),
    sa.Column("renew_by", sa.Double, nullable=True),
    sa.Column("finish_by", sa.Double, nullable=True),
    sa.Column("finish_limit", sa.Double, nullable=True),  # pausing may move finish_by up to here
    sa.Column(
        "returned", sa.Boolean, nullable=False
    ),  # expired, but the holder may still submit late
    sa.Column("failures", sa.Integer, nullable=False),
    sa.Column("timeouts", sa.Integer, nullable=False),
    sa.Column("ended_at", sa.Double, nullable=True),
    sa.Column("options", sa.Text, nullable=False),  # options of the workload, JSON
    # Terms of the lease: the kind of update ("" = by the kind of task), and the steps of a part (0
    # = one submission at the end).
    sa.Column("update_kind", sa.String(16), nullable=False, server_default=""),
    sa.Column("part_steps", sa.Integer, nullable=False, server_default="0"),
    # Accepted contribution over the range of the task. The contribution of a part that was split
    # off was submitted for the task that now has the remaining range.
    sa.Column("contribution_id", Key, nullable=True, index=True),
    # Worker over whose own data the task goes; "" = the task goes over the run's dataset.
    sa.Column("home", sa.String(64), nullable=False, server_default=""),
    sa.CheckConstraint("stop > start", name="range"),
)
sa.Index("ix_tasks_pick", tasks.c.run_id, tasks.c.state, tasks.c.id)
sa.Index("ix_tasks_holder", tasks.c.worker_id, tasks.c.state)
# Indexes that every claim reads: the open tasks of a run, and their holders.
sa.Index(
    "ix_tasks_open",
    tasks.c.run_id,
    tasks.c.state,
    tasks.c.steps,
    tasks.c.kind,
    tasks.c.worker_id,
    sqlite_where=tasks.c.state.in_(("todo", "doing")),
    postgresql_where=tasks.c.state.in_(("todo", "doing")),
)
sa.Index(
    "ix_tasks_held",
    tasks.c.volunteer_id,
    tasks.c.worker_id,
    tasks.c.device,
    sqlite_where=tasks.c.state == "doing",
    postgresql_where=tasks.c.state == "doing",
)
sa.Index("ix_tasks_renew", tasks.c.state, tasks.c.renew_by)
sa.Index(
    "ix_tasks_beside",
    tasks.c.run_id,
    tasks.c.kind,
    sqlite_where=tasks.c.pass_no == 0,
    postgresql_where=tasks.c.pass_no == 0,
)

sa.Index(
    "ix_tasks_audits",
    tasks.c.volunteer_id,
    sqlite_where=tasks.c.kind == "audit",
    postgresql_where=tasks.c.kind == "audit",
)

failures = sa.Table(
    "failures",
    metadata,
    sa.Column("id", Key, primary_key=True, autoincrement=True),
    sa.Column("task_id", sa.ForeignKey("tasks.id"), nullable=False, index=True),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("worker_id", sa.String(64), nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),  # failure (content, crash), timeout, forgiven
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
)
