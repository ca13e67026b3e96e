"""Versions know how their update lay to the momentum, and the part of the outer rate they took."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0080"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("versions", sa.Column("heading", sa.Double(), nullable=True))
    op.add_column(
        "versions", sa.Column("outer_scale", sa.Double(), nullable=False, server_default="1")
    )
