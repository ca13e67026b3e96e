"""Answers by machines of volunteers: who made how many tokens of a request."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("usage", sa.Column("answered", sa.Text(), nullable=False, server_default="{}"))
    op.add_column(
        "usage", sa.Column("house_share", sa.Double(), nullable=False, server_default="0")
    )
