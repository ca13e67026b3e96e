"""Sketches of updates."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "sketches",
        sa.Column("contribution_id", KEY, autoincrement=False, nullable=False),
        sa.Column("run_id", KEY, nullable=False),
        sa.Column("base_version", sa.Integer(), nullable=False),
        sa.Column("sketch", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["contribution_id"], ["contributions.id"], name="fk_sketches_contribution_id"
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_sketches_run_id"),
        sa.PrimaryKeyConstraint("contribution_id", name="pk_sketches"),
    )
    op.create_index("ix_sketches_run", "sketches", ["run_id", "contribution_id"])
    op.create_index("ix_sketches_base", "sketches", ["run_id", "base_version"])
