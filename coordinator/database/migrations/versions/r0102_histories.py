"""A machine's newest contributions, and the audits of an account, are found without its history."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0102"
down_revision = "0101"
branch_labels = None
depends_on = None

AUDITS, KEPT = sa.text("kind = 'audit'"), sa.text("state != 'rejected'")


def upgrade() -> None:
    op.create_index(
        "ix_contributions_machine",
        "contributions",
        ["worker_id", "run_id", "id"],
        sqlite_where=KEPT,
        postgresql_where=KEPT,
    )
    op.create_index(
        "ix_tasks_audits",
        "tasks",
        ["volunteer_id"],
        sqlite_where=AUDITS,
        postgresql_where=AUDITS,
    )
