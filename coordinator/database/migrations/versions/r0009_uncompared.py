"""Recomputes of an account that the server could not compare, since one of its checks passed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column("uncompared", sa.Integer(), nullable=False, server_default="0")
    op.add_column("volunteers", column)
