"""Recomputes of contributions, and the evidence that is revealed for them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    for name in ("recompute_streak", "unproven"):
        column = sa.Column(name, sa.Integer(), nullable=False, server_default="0")
        op.add_column("volunteers", column)
    op.add_column("uploads", sa.Column("evidence_of", KEY, nullable=True))
    op.create_table(
        "recomputes",
        sa.Column("contribution_id", KEY, autoincrement=False, nullable=False),
        sa.Column("run_id", KEY, nullable=False),
        sa.Column("volunteer_id", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("wanted", sa.Text(), nullable=False),
        sa.Column("work", sa.Text(), nullable=False),
        sa.Column("withheld", sa.Boolean(), nullable=False),
        sa.Column("result", sa.String(16), nullable=False),
        sa.Column("measured", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("asked_at", sa.Double(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["contribution_id"], ["contributions.id"], name="fk_recomputes_contribution_id"
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_recomputes_run_id"),
        sa.PrimaryKeyConstraint("contribution_id", name="pk_recomputes"),
    )
    op.create_index("ix_recomputes_open", "recomputes", ["state", "contribution_id"])
