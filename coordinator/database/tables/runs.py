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
    Column("cursor", BigInteger, nullable=False),  # next uncut position of the pass
    Column("step_flops", Double, nullable=False),  # one step of the reference batch
    Column("price_micro", BigInteger, nullable=False),  # of one such step
    Column("weight", Double, nullable=False),  # share among runs
    Column("stop_reason", Text, nullable=True),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double, nullable=True),
    Column("ended_at", Double, nullable=True),
)

# What the server publishes on a model hub by itself, and how that went. The token lies elsewhere.
publications = Table(
    "publications",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("mode", String(8), nullable=False),  # every, best, off
    Column("every", Integer, nullable=False),  # versions between two; 0 of the other modes
    Column("repository", String(200), nullable=False),
    Column("format", String(32), nullable=False),
    Column("version", Integer, nullable=True),  # published last
    Column("published_at", Double, nullable=True),
    Column("url", Text, nullable=False),
    Column("failures", Integer, nullable=False),  # since then
    Column("error", Text, nullable=False),  # of the last of them
    Column("next_at", Double, nullable=False),  # not tried before; meanwhile a lease of who tries
)
