"""Versions that the server publishes on a model hub by itself."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0009"
branch_labels = None
depends_on = None

KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "publications",
        sa.Column("run_id", KEY, nullable=False),
        sa.Column("mode", sa.String(8), nullable=False),
        sa.Column("every", sa.Integer(), nullable=False),
        sa.Column("repository", sa.String(200), nullable=False),
        sa.Column("format", sa.String(32), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("published_at", sa.Double(), nullable=True),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("next_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_publications_run_id"),
        sa.PrimaryKeyConstraint("run_id", name="pk_publications"),
    )
