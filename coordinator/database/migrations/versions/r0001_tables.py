"""Every table of the first release, written out as it stood: never changed with the code."""

from __future__ import annotations

from alembic import op
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
)

from coordinator.database.migrations import triggers

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)
Key = BigInteger().with_variant(Integer, "sqlite")

volunteers = Table(
    "volunteers",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("nickname", String(64), nullable=False),
    Column("nickname_key", String(128), nullable=False, unique=True),
    Column("state", String(16), nullable=False),
    Column("public", Boolean, nullable=False),
    Column("trust", Double, nullable=False),
    Column("invite_id", Key, nullable=True),
    Column("created_at", Double, nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("volunteer_id", ForeignKey("volunteers.id"), nullable=False, index=True),
    Column("secret_hash", String(64), nullable=False),
    Column("hostname", String(255), nullable=False),
    Column("hardware", Text, nullable=False),
    Column("benchmark", Text, nullable=False),
    Column("step_flops", Double, nullable=False),
    Column("software", String(64), nullable=False),
    Column("protocol", Integer, nullable=False),
    Column("workloads", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("last_seen_at", Double, nullable=False),
    Column("streak", Integer, nullable=False, server_default="0"),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double, nullable=True),
)

codes = Table(
    "codes",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("code_hash", String(64), nullable=False, unique=True),
    Column("kind", String(16), nullable=False),
    Column("label", String(255), nullable=False),
    Column("volunteer_id", ForeignKey("volunteers.id"), nullable=True),
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
    Column("digest", String(64), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("codec", String(32), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("base_version", Integer, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("samples", BigInteger, nullable=False),
    Column("price_micro", BigInteger, nullable=False),
    Column("loss_first", Double, nullable=True),
    Column("loss_last", Double, nullable=True),
    Column("train_s", Double, nullable=False),
    Column("norm", Double, nullable=True),
    Column("clip", Double, nullable=False),
    Column("weight", Double, nullable=True),
    Column("state", String(16), nullable=False),
    Column("reason", String(32), nullable=False),
    Column("message", Text, nullable=False),
    Column("version", Integer, nullable=True),
    Column("report", Text, nullable=False),
    Column("received_at", Double, nullable=False),
    Column("decided_at", Double, nullable=True),
    Column("merged_at", Double, nullable=True),
    UniqueConstraint("task_id", "attempt", "part", "tries"),
)
_c = contributions.c
Index("ix_contributions_pending", _c.state, _c.run_id, _c.id)
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

blobs = Table(
    "blobs",
    metadata,
    Column("sha256", String(64), primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
)

datasets = Table(
    "datasets",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("name", String(128), nullable=False, unique=True),
    Column("kind", String(32), nullable=False),
    Column("manifest", Text, nullable=False),
    Column("manifest_sha256", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
)
dataset_blobs = Table(
    "dataset_blobs",
    metadata,
    Column("dataset_id", ForeignKey("datasets.id"), primary_key=True),
    Column("sha256", String(64), primary_key=True, index=True),
    Column("served", Boolean, nullable=False),
)

harvests = Table(
    "harvests",
    metadata,
    Column("contribution_id", ForeignKey("contributions.id"), primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("games", Integer, nullable=False),
    Column("positions", Integer, nullable=False),
    Column("chunk", Integer, nullable=True),
    Column("at", Double, nullable=False),
)
Index("ix_harvests_open", harvests.c.run_id, harvests.c.chunk)
chunks = Table(
    "chunks",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("sha256", String(64), nullable=False, index=True),
    Column("size", BigInteger, nullable=False),
    Column("games", Integer, nullable=False),
    Column("positions", Integer, nullable=False),
    Column("sealed_at", Double, nullable=False),
    Column("retired_at", Double, nullable=True),
)
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

accounts = Table(
    "accounts",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("owner", String(64), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("balance_micro", BigInteger, nullable=False),
    UniqueConstraint("owner", "kind"),
    CheckConstraint("balance_micro >= 0 OR kind = 'mint'", name="balance"),
)

events = Table(
    "events",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("key", String(128), nullable=False, unique=True),
    Column("digest", String(64), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("run_id", Key, nullable=True),
    Column("contribution_id", Key, nullable=True),
    Column("memo", Text, nullable=False),
    Column("at", Double, nullable=False, index=True),
    Column("chain", String(64), nullable=True),
)

postings = Table(
    "postings",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("event_id", ForeignKey("events.id"), nullable=False, index=True),
    Column("account_id", ForeignKey("accounts.id"), nullable=False),
    Column("amount_micro", BigInteger, nullable=False),
)
Index("ix_postings_history", postings.c.account_id, postings.c.event_id)

merges = Table(
    "merges",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False, index=True),
    Column("base", Integer, nullable=False),
    Column("shard", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("contributions", Text, nullable=False),
    Column("owner", String(64), nullable=False),
    Column("fence", Integer, nullable=False),
    Column("lease_until", Double, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("message", Text, nullable=False),
    Column("terms", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("ended_at", Double, nullable=True),
    UniqueConstraint("run_id", "base", "shard"),
)
merge_parts = Table(
    "merge_parts",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("merge_id", ForeignKey("merges.id"), nullable=False),
    Column("phase", String(16), nullable=False),
    Column("shard", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("owner", String(64), nullable=False),
    Column("fence", Integer, nullable=False),
    Column("lease_until", Double, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("message", Text, nullable=False),
    Column("result", Text, nullable=False),
    UniqueConstraint("merge_id", "phase", "shard"),
)
Index("ix_merge_parts_open", merge_parts.c.state, merge_parts.c.merge_id)
state_parts = Table(
    "state_parts",
    metadata,
    Column("state_sha256", String(64), primary_key=True),
    Column("shard", Integer, primary_key=True),
    Column("sha256", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
)

audit = Table(
    "audit",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("actor", String(64), nullable=False),
    Column("action", String(64), nullable=False),
    Column("subject", String(255), nullable=False),
    Column("detail", Text, nullable=False),
    Column("chain", String(64), nullable=True),
)

meta = Table(
    "meta",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("name", String(128), nullable=False, unique=True),
    Column("state", String(16), nullable=False),
    Column("file", Text, nullable=False),
    Column("workload", String(64), nullable=False),
    Column("workload_version", Integer, nullable=False),
    Column("dataset_id", ForeignKey("datasets.id"), nullable=True),
    Column("seed", BigInteger, nullable=False),
    Column("head", Integer, nullable=False),
    Column("best", Integer, nullable=True),
    Column("global_step", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("phase", Integer, nullable=False, server_default="0"),
    Column("parameters", BigInteger, nullable=False),
    Column("samples_total", BigInteger, nullable=False),
    Column("samples_per_chunk", Text, nullable=False),
    Column("sample_size", BigInteger, nullable=False),
    Column("pass_no", Integer, nullable=False),
    Column("pass_seed", BigInteger, nullable=False),
    Column("cursor", BigInteger, nullable=False),
    Column("step_flops", Double, nullable=False),
    Column("price_micro", BigInteger, nullable=False),
    Column("weight", Double, nullable=False),
    Column("median_task_s", Double, nullable=True),
    Column("last_merge_at", Double, nullable=True),
    Column("stop_reason", Text, nullable=True),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double, nullable=True),
    Column("ended_at", Double, nullable=True),
)

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
    Column("price_micro", BigInteger, nullable=False),
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
    Column("finish_limit", Double, nullable=True),
    Column("returned", Boolean, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("timeouts", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("ended_at", Double, nullable=True),
    Column("options", Text, nullable=False),
    Column("update_kind", String(16), nullable=False, server_default=""),
    Column("part_steps", Integer, nullable=False, server_default="0"),
    Column("contribution_id", Key, nullable=True, index=True),
    CheckConstraint("stop > start", name="range"),
)
Index("ix_tasks_pick", tasks.c.run_id, tasks.c.state, tasks.c.id)
Index("ix_tasks_holder", tasks.c.worker_id, tasks.c.state)
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
    Column("kind", String(16), nullable=False),
    Column("message", Text, nullable=False),
    Column("at", Double, nullable=False),
)

versions = Table(
    "versions",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("parent", Integer, nullable=True),
    Column("master_sha256", String(64), nullable=False),
    Column("published_sha256", String(64), nullable=False, index=True),
    Column("size", BigInteger, nullable=False),
    Column("state_sha256", String(64), nullable=True),
    Column("manifest", Text, nullable=False),
    Column("signature", String(128), nullable=False),
    Column("contributions", Text, nullable=False),
    Column("global_step", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("phase", Integer, nullable=False, server_default="0"),
    Column("update_norm", Double, nullable=True),
    Column("merge_s", Double, nullable=False),
    Column("created_at", Double, nullable=False),
)
evaluations = Table(
    "evaluations",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("state", String(16), nullable=False),
    Column("loss", Double, nullable=True),
    Column("metrics", Text, nullable=False),
    Column("sample", Text, nullable=False),
    Column("sample_sha256", String(64), nullable=True, index=True),
    Column("message", Text, nullable=False),
    Column("at", Double, nullable=True),
    Column("pruned", Boolean, nullable=False),
)
_e = evaluations.c
Index("ix_evaluations_waiting", _e.state, _e.run_id, _e.version)
Index("ix_evaluations_best", _e.run_id, _e.loss, _e.version)
Index(
    "ix_evaluations_kept",
    _e.run_id,
    _e.version,
    sqlite_where=~_e.pruned,
    postgresql_where=~_e.pruned,
)
version_blobs = Table(
    "version_blobs",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("sha256", String(64), primary_key=True, index=True),
)


def upgrade() -> None:
    metadata.create_all(op.get_bind())
    triggers.create(op.get_bind())
