"""Table of serving processes: their start, their last sign of life, and their figures."""

from __future__ import annotations

import sqlalchemy as sa

from coordinator.database.tables.base import metadata

replicas = sa.Table(
    "replicas",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    # machine and data directory: a process that restarts there replaces the previous process
    sa.Column("place", sa.String(255), nullable=False),
    sa.Column("started_at", sa.Double, nullable=False),
    sa.Column("beat_at", sa.Double, nullable=False),
    sa.Column("figures", sa.Text, nullable=False),  # ReplicaFigures, as JSON
)
