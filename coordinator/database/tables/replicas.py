"""Table of serving processes: their start, their last sign of life, and their figures."""

from __future__ import annotations

from sqlalchemy import Column, Double, String, Table, Text

from coordinator.database.tables.base import metadata

replicas = Table(
    "replicas",
    metadata,
    Column("id", String(64), primary_key=True),
    # machine and data directory: a process that restarts there replaces the previous one
    Column("place", String(255), nullable=False),
    Column("started_at", Double, nullable=False),
    Column("beat_at", Double, nullable=False),
    Column("figures", Text, nullable=False),  # ReplicaFigures, JSON
)
