"""Versions have scores on task suites."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

Key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

revision = "0094"
down_revision = "0060"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "suite_scores",
        sa.Column("run_id", Key, sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("suite", sa.String(64), primary_key=True),
        sa.Column("version", sa.Integer(), primary_key=True),
        sa.Column("correct", sa.Integer(), nullable=False),
        sa.Column("examples", sa.Integer(), nullable=False),
        sa.Column("cut", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
    )
