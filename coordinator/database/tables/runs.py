"""Runs."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Integer, String, Table, Text

from coordinator.database.tables.base import Key, metadata

runs = Table(
    "runs",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("name", String(128), nullable=False, unique=True),
    Column("state", String(16), nullable=False),
    # run file, validated, with every default filled in (JSON)
    Column("file", Text, nullable=False),
    Column("workload", String(64), nullable=False),
    Column("workload_version", Integer, nullable=False),
    Column("dataset_id", ForeignKey("datasets.id"), nullable=True),
    Column("seed", BigInteger, nullable=False),
    Column("head", Integer, nullable=False),  # newest version; -1 before start
    Column("best", Integer, nullable=True),
    Column("global_step", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    # index of the plan's phase at the head
    Column("phase", Integer, nullable=False, server_default="0"),
    Column("parameters", BigInteger, nullable=False),
    Column("samples_total", BigInteger, nullable=False),  # samples of one pass
    Column("samples_per_chunk", Text, nullable=False),  # JSON list, for the order of the pass
    Column("sample_size", BigInteger, nullable=False),  # tokens (or pixels) of one sample
    Column("pass_no", Integer, nullable=False),
    Column("cursor", BigInteger, nullable=False),  # next uncut position of the pass
    Column("step_flops", Double, nullable=False),  # one step of the reference batch
    Column("price_micro", BigInteger, nullable=False),  # price of one such step
    Column("weight", Double, nullable=False),  # share among runs
    Column("stop_reason", Text, nullable=True),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double, nullable=True),
    Column("ended_at", Double, nullable=True),
)
