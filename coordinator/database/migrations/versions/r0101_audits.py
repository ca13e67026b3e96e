"""Tasks that volunteers do again for others."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

revision = "0101"
down_revision = "0091"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audits",
        sa.Column("contribution_id", KEY, autoincrement=False, nullable=False),
        sa.Column("run_id", KEY, nullable=False),
        sa.Column("volunteer_id", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("task_id", KEY, nullable=True),
        sa.Column("work", sa.Text(), nullable=False),
        sa.Column("answer_id", KEY, nullable=True),
        sa.Column("auditor_id", sa.String(64), nullable=False, server_default=""),
        sa.Column("sums", sa.LargeBinary(), nullable=True),
        sa.Column("result", sa.String(16), nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["contribution_id"], ["contributions.id"], name="fk_audits_contribution_id"
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_audits_run_id"),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name="fk_audits_task_id"),
        sa.PrimaryKeyConstraint("contribution_id", name="pk_audits"),
        sa.UniqueConstraint("task_id", name="uq_audits_task_id"),
    )
    op.create_index("ix_audits_state", "audits", ["state", "contribution_id"])
    op.create_index("ix_audits_auditor_id", "audits", ["auditor_id"])
