"""Runs."""

from __future__ import annotations

import sqlalchemy as sa

from coordinator.database.tables.base import Key, metadata

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", Key, primary_key=True, autoincrement=True),
    sa.Column("name", sa.String(128), nullable=False, unique=True),
    sa.Column("state", sa.String(16), nullable=False),
    # run file, validated, with every default filled in (JSON)
    sa.Column("file", sa.Text, nullable=False),
    sa.Column("workload", sa.String(64), nullable=False),
    sa.Column("workload_version", sa.Integer, nullable=False),
    sa.Column("dataset_id", sa.ForeignKey("datasets.id"), nullable=True),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("head", sa.Integer, nullable=False),  # newest version; -1 before start
    sa.Column("best", sa.Integer, nullable=True),
    sa.Column("global_step", sa.BigInteger, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("parameters", sa.BigInteger, nullable=False),
    sa.Column("samples_total", sa.BigInteger, nullable=False),  # samples of one pass
    sa.Column("samples_per_chunk", sa.Text, nullable=False),  # JSON list, for the order of the pass
    sa.Column("sample_size", sa.BigInteger, nullable=False),  # tokens (or pixels) of one sample
    sa.Column("pass_no", sa.Integer, nullable=False),
    sa.Column("cursor", sa.BigInteger, nullable=False),  # next uncut position of the pass
    sa.Column(
        "step_flops", sa.Double, nullable=False
    ),  # operations of one training step with the run's batch_size
    sa.Column("price_micro", sa.BigInteger, nullable=False),  # price of one such step
    sa.Column("weight", sa.Double, nullable=False),  # share among runs
    # most steps of a task that a recompute can prove (0 = no bound), the drift of a task and the
    # version at which it was measured last
    sa.Column("steps_provable", sa.Integer, nullable=False, server_default="0"),
    sa.Column("drift", sa.Double, nullable=True),
    sa.Column("drift_version", sa.Integer, nullable=True),
    # since when the run is in its state, by whom ("organiser", "coordinator", "run"), and why
    sa.Column("state_since", sa.Double, nullable=True),
    sa.Column("state_actor", sa.String(16), nullable=False, server_default=""),
    sa.Column("state_reason", sa.Text, nullable=False, server_default=""),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("started_at", sa.Double, nullable=True),
    sa.Column("ended_at", sa.Double, nullable=True),
    # seconds since the start in which the run was paused, or was completed before it was extended
    sa.Column("idle_s", sa.Double, nullable=False, server_default="0"),
)

# Data that machines keep for a run: its numbers, and the machine's own pass over it.
members = sa.Table(
    "members",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("worker_id", sa.ForeignKey("workers.id"), primary_key=True),
    sa.Column("volunteer_id", sa.ForeignKey("volunteers.id"), nullable=False),
    sa.Column("samples", sa.BigInteger, nullable=False),  # samples of one pass
    sa.Column("items", sa.BigInteger, nullable=False),  # learnt tokens, or pictures
    sa.Column("heldout", sa.BigInteger, nullable=False),  # held-out samples
    # name of the data; changed data has another name
    sa.Column("edition", sa.Text, nullable=False),
    sa.Column("pass_no", sa.Integer, nullable=False),
    sa.Column("cursor", sa.BigInteger, nullable=False),  # next uncut position of the pass
    sa.Column("first_pass", sa.Integer, nullable=False),  # first pass over the present data
    sa.Column("declared_at", sa.Double, nullable=True),  # NULL: the data is withdrawn
)

# Seconds of a run's devices by the hour: present for the run, in training, and in training whose
# results were merged.
machine_hours = sa.Table(
    "machine_hours",
    metadata,
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("hour", sa.BigInteger, primary_key=True, autoincrement=False),  # since 1970
    sa.Column("present_s", sa.Double, nullable=False),
    sa.Column("trained_s", sa.Double, nullable=False),
    sa.Column("merged_s", sa.Double, nullable=False),
)
