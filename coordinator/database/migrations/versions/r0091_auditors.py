"""Auditors of the organiser's own, and the recomputes that they hold."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0091"
down_revision = "0094"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for column in (
        sa.Column("kind", sa.String(16), nullable=False, server_default=""),
        sa.Column("hold", sa.String(32), nullable=False, server_default=""),
        sa.Column("held_until", sa.Double(), nullable=False, server_default="0"),
        sa.Column("tries", sa.Integer(), nullable=False, server_default="0"),
    ):
        op.add_column("recomputes", column)
    op.create_table(
        "auditors",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_auditors"),
    )
