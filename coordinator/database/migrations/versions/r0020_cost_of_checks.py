"""Seconds that the checks of a contribution took, beside those of the work."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "contributions", sa.Column("checked_s", sa.Double(), nullable=False, server_default="0")
    )
