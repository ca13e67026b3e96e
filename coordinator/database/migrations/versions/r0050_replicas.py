"""Beats of serving processes; the index of open tasks covers what the overview counts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0050"
down_revision = "0080"
branch_labels = None
depends_on = None

OPEN = sa.text("state IN ('todo', 'doing')")


def upgrade() -> None:
    op.create_table(
        "replicas",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("place", sa.String(255), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("beat_at", sa.Double(), nullable=False),
        sa.Column("figures", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_replicas"),
    )
    op.drop_index("ix_tasks_open", table_name="tasks")
    op.create_index(
        "ix_tasks_open",
        "tasks",
        ["run_id", "state", "steps", "kind", "worker_id"],
        sqlite_where=OPEN,
        postgresql_where=OPEN,
    )
