"""Queue: tasks, and their failures and timeouts."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
)

from coordinator.database.tables.base import Key, metadata

tasks = Table(
    "tasks",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("pass_no", Integer, nullable=False),
    Column("start", BigInteger, nullable=False),
    Column("stop", BigInteger, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("batch_size", Integer, nullable=False),
    Column("price_micro", BigInteger, nullable=False),  # price of the whole task
    Column("state", String(16), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("claim_id", String(64), nullable=True, unique=True),
    Column("worker_id", ForeignKey("workers.id"), nullable=True),
    Column("volunteer_id", String(64), nullable=True),
    Column("device", String(32), nullable=False),
    Column("claimed_at", Double, nullable=True),
    Column("begun_at", Double, nullable=True),
    Column("base_version", Integer, nullable=True),
    Column("renew_by", Double, nullable=True),
    Column("finish_by", Double, nullable=True),
    Column("finish_limit", Double, nullable=True),  # pausing may move finish_by up to here
    Column("returned", Boolean, nullable=False),  # expired, but the holder may still submit late
    Column("failures", Integer, nullable=False),
    Column("timeouts", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("ended_at", Double, nullable=True),
    Column("options", Text, nullable=False),  # options of the workload, JSON
    # Terms of the lease: the kind of update ("" = by the kind of task), and the steps of a part (0
    # = one submission at the end).
    Column("update_kind", String(16), nullable=False, server_default=""),
    Column("part_steps", Integer, nullable=False, server_default="0"),
    # Contribution of an accepted part that was split off; it was submitted for the task that holds
    # the rest.
    Column("contribution_id", Key, nullable=True, index=True),
    CheckConstraint("stop > start", name="range"),
)
Index("ix_tasks_pick", tasks.c.run_id, tasks.c.state, tasks.c.id)
Index("ix_tasks_holder", tasks.c.worker_id, tasks.c.state)
# Indexes that every claim reads: the open tasks of a run, and their holders.
Index(
    "ix_tasks_open",
    tasks.c.run_id,
    tasks.c.state,
    tasks.c.steps,
    tasks.c.kind,
    tasks.c.worker_id,
    sqlite_where=tasks.c.state.in_(("todo", "doing")),
    postgresql_where=tasks.c.state.in_(("todo", "doing")),
)
Index(
    "ix_tasks_held",
    tasks.c.volunteer_id,
    tasks.c.worker_id,
    tasks.c.device,
    sqlite_where=tasks.c.state == "doing",
    postgresql_where=tasks.c.state == "doing",
)
Index("ix_tasks_renew", tasks.c.state, tasks.c.renew_by)
Index(
    "ix_tasks_beside",
    tasks.c.run_id,
    tasks.c.kind,
    sqlite_where=tasks.c.pass_no == 0,
    postgresql_where=tasks.c.pass_no == 0,
)

Index(
    "ix_tasks_audits",
    tasks.c.volunteer_id,
    sqlite_where=tasks.c.kind == "audit",
    postgresql_where=tasks.c.kind == "audit",
)

failures = Table(
    "failures",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("task_id", ForeignKey("tasks.id"), nullable=False, index=True),
    Column("attempt", Integer, nullable=False),
    Column("worker_id", String(64), nullable=False),
    Column("kind", String(16), nullable=False),  # failure (content, crash), timeout, forgiven
    Column("message", Text, nullable=False),
    Column("at", Double, nullable=False),
)
