"""The tables. Instants (`*_at`) are UTC epoch seconds as doubles, from the Clock; money is integer micro-credits; JSON is text
written by msgspec. Rows that must never change (postings, events, audit, versions) have triggers against it, made by the
migrations. SQLite and PostgreSQL share every statement.
"""

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
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)  # fmt: skip

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}
metadata = MetaData(naming_convention=NAMING)

# 64-bit keys that SQLite still numbers by itself.
Key = BigInteger().with_variant(Integer, "sqlite")

# --- who ---

volunteers = Table(
    "volunteers",
    metadata,
    Column("id", String(64), primary_key=True),  # made by the client
    Column("nickname", String(64), nullable=False),
    # skeleton: lookalikes collide
    Column("nickname_key", String(128), nullable=False, unique=True),
    Column("state", String(16), nullable=False),  # active, banned, forgotten
    Column("public", Boolean, nullable=False),
    Column("trust", Double, nullable=False),
    Column("invite_id", Key, nullable=True),
    Column("created_at", Double, nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("id", String(64), primary_key=True),  # made by the client
    Column("volunteer_id", ForeignKey("volunteers.id"), nullable=False, index=True),
    Column("secret_hash", String(64), nullable=False),  # SHA-256 of a 256-bit secret
    Column("hostname", String(255), nullable=False),
    Column("hardware", Text, nullable=False),
    Column("benchmark", Text, nullable=False),
    Column("step_flops", Double, nullable=False),
    Column("software", String(64), nullable=False),
    Column("protocol", Integer, nullable=False),
    Column("workloads", Text, nullable=False),
    Column("state", String(16), nullable=False),  # online, training, paused, offline, left
    Column("last_seen_at", Double, nullable=False),
    # accepted in a row, see trust.py
    Column("streak", Integer, nullable=False, server_default="0"),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double, nullable=True),
)

codes = Table(
    "codes",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("code_hash", String(64), nullable=False, unique=True),
    Column("kind", String(16), nullable=False),  # invite, link
    Column("label", String(255), nullable=False),  # whom it is for
    Column("volunteer_id", ForeignKey("volunteers.id"), nullable=True),  # link codes: whose account
    Column("uses_left", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=True),
    Column("revoked_at", Double, nullable=True),
)

consents = Table(
    "consents",
    metadata,
    Column("volunteer_id", ForeignKey("volunteers.id"), primary_key=True),
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("licence", String(255), nullable=False),
    Column("given_at", Double, nullable=False),
)

# --- what ---

blobs = Table(
    "blobs",
    metadata,
    Column("sha256", String(64), primary_key=True),
    Column("size", BigInteger, nullable=False),
    # chunk, heldout, asset, weights, state, update, games, sample, manifest
    Column("kind", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
)

datasets = Table(
    "datasets",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("name", String(128), nullable=False, unique=True),
    Column("kind", String(32), nullable=False),
    Column("manifest", Text, nullable=False),  # whole, with the held-out split
    Column("manifest_sha256", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
)

# Which blobs a dataset keeps alive, and whether a volunteer may fetch them.
dataset_blobs = Table(
    "dataset_blobs",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("sha256", String(64), primary_key=True, index=True),
    Column("served", Boolean, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("name", String(128), nullable=False, unique=True),
    Column("state", String(16), nullable=False),
    # the run file, validated, with every default written out (JSON)
    Column("file", Text, nullable=False),
    Column("workload", String(64), nullable=False),
    Column("workload_version", Integer, nullable=False),
    Column("dataset_id", ForeignKey("datasets.id"), nullable=True),
    Column("seed", BigInteger, nullable=False),
    Column("head", Integer, nullable=False),  # newest version; -1 before start
    Column("best", Integer, nullable=True),
    Column("global_step", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    # index of the phase of the plan that holds at the head
    Column("phase", Integer, nullable=False, server_default="0"),
    Column("parameters", BigInteger, nullable=False),
    Column("samples_total", BigInteger, nullable=False),  # in one pass
    Column("samples_per_chunk", Text, nullable=False),  # JSON list, for the order of the pass
    Column("sample_size", BigInteger, nullable=False),  # tokens (or pixels) of one sample
    Column("pass_no", Integer, nullable=False),
    Column("pass_seed", BigInteger, nullable=False),
    Column("cursor", BigInteger, nullable=False),  # next uncut position of the pass
    Column("step_flops", Double, nullable=False),  # one step of the reference batch
    Column("price_micro", BigInteger, nullable=False),  # of one such step
    Column("weight", Double, nullable=False),  # share among runs
    Column("median_task_s", Double, nullable=True),
    Column("last_merge_at", Double, nullable=True),
    Column("stop_reason", Text, nullable=True),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double, nullable=True),
    Column("ended_at", Double, nullable=True),
)

# --- the queue ---

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
    Column("price_micro", BigInteger, nullable=False),  # of the whole task
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
    Column("options", Text, nullable=False),  # workload's own, JSON
    # What its lease asks for: the kind of update ("" = by the kind of task), and after how many steps one is handed in
    # (0 = at the end).
    Column("update_kind", String(16), nullable=False, server_default=""),
    Column("part_steps", Integer, nullable=False, server_default="0"),
    # Of a part that was split off when it was accepted: its contribution, whose own task is the rest.
    Column("contribution_id", Key, nullable=True, index=True),
    CheckConstraint("stop > start", name="range"),
)
Index("ix_tasks_pick", tasks.c.run_id, tasks.c.state, tasks.c.id)
Index("ix_tasks_holder", tasks.c.worker_id, tasks.c.state)
# What every claim looks at, kept small: how much of a run is open, and who holds what.
Index(
    "ix_tasks_open",
    tasks.c.run_id,
    tasks.c.state,
    tasks.c.steps,
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

failures = Table(
    "failures",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("task_id", ForeignKey("tasks.id"), nullable=False, index=True),
    Column("attempt", Integer, nullable=False),
    Column("worker_id", String(64), nullable=False),
    Column("kind", String(16), nullable=False),  # failure (content or crash), timeout
    Column("message", Text, nullable=False),
    Column("at", Double, nullable=False),
)

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
    # of the submit message: same key, other digest = 409
    Column("digest", String(64), nullable=False),
    Column("kind", String(16), nullable=False),  # delta, gradient, games, evaluation
    Column("codec", String(32), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("base_version", Integer, nullable=False),
    Column("steps", Integer, nullable=False),  # from the task
    Column("samples", BigInteger, nullable=False),  # from the task
    Column("price_micro", BigInteger, nullable=False),
    Column("loss_first", Double, nullable=True),  # reported
    Column("loss_last", Double, nullable=True),
    Column("train_s", Double, nullable=False),
    Column("norm", Double, nullable=True),  # measured
    Column("clip", Double, nullable=False),  # factor <= 1 that bounds it to its cohort
    Column("weight", Double, nullable=True),  # staleness x trust, used at the merge
    Column("state", String(16), nullable=False),
    Column("reason", String(32), nullable=False),
    Column("message", Text, nullable=False),
    Column("version", Integer, nullable=True),  # merged into
    Column("report", Text, nullable=False),  # JSON of metrics
    Column("received_at", Double, nullable=False),
    Column("decided_at", Double, nullable=True),
    Column("merged_at", Double, nullable=True),
    UniqueConstraint("task_id", "attempt", "part", "tries"),
)
_c = contributions.c
Index("ix_contributions_pending", _c.state, _c.run_id, _c.id)
# Every decision compares with the newest of its kind, and looks whether the same bytes came before.
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

# Every change of a contribution's state, in order: what a volunteer's history is made of.
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

# --- versions ---

versions = Table(
    "versions",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("kind", String(16), nullable=False),  # initial, merge, rollback
    Column("parent", Integer, nullable=True),
    Column("master_sha256", String(64), nullable=False),
    Column("published_sha256", String(64), nullable=False, index=True),
    Column("size", BigInteger, nullable=False),  # published
    Column("state_sha256", String(64), nullable=True),  # server-optimiser state
    Column("manifest", Text, nullable=False),  # canonical JSON that was signed
    Column("signature", String(128), nullable=False),
    Column("contributions", Text, nullable=False),  # JSON list of ids, in merge order
    Column("global_step", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    # index of the phase that holds from it to the next version
    Column("phase", Integer, nullable=False, server_default="0"),
    Column("update_norm", Double, nullable=True),
    Column("merge_s", Double, nullable=False),
    Column("created_at", Double, nullable=False),
)

# What became known of a version afterwards; unlike versions, rows here change.
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
    Column("pruned", Boolean, nullable=False),  # its blobs are gone (retention)
)
_e = evaluations.c
Index("ix_evaluations_waiting", _e.state, _e.run_id, _e.version)
Index("ix_evaluations_best", _e.run_id, _e.loss, _e.version)
# Retention looks at the few versions whose blobs are there.
Index(
    "ix_evaluations_kept",
    _e.run_id,
    _e.version,
    sqlite_where=~_e.pruned,
    postgresql_where=~_e.pruned,
)

merges = Table(
    "merges",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False, index=True),
    Column("base", Integer, nullable=False),  # head it starts from
    Column("shard", Integer, nullable=False),
    Column("state", String(16), nullable=False),  # leased, committed, failed, abandoned
    Column("contributions", Text, nullable=False),  # JSON list of ids
    Column("owner", String(64), nullable=False),
    Column("fence", Integer, nullable=False),
    Column("lease_until", Double, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("message", Text, nullable=False),
    Column("terms", Text, nullable=False),  # JSON: workers and shards it began with
    Column("created_at", Double, nullable=False),
    Column("ended_at", Double, nullable=True),
    UniqueConstraint("run_id", "base", "shard"),
)
