"""Teams and memberships."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

Key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

revision = "0060"
down_revision = "0050"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "teams",
        sa.Column("id", Key, primary_key=True, autoincrement=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("name_key", sa.String(128), nullable=False, unique=True),
        sa.Column("code", sa.String(32), nullable=False, unique=True),
        sa.Column("founder_id", sa.String(64), sa.ForeignKey("volunteers.id"), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
    op.create_index("ix_teams_founder_id", "teams", ["founder_id"])
    op.create_table(
        "memberships",
        sa.Column("id", Key, primary_key=True, autoincrement=True),
        sa.Column("team_id", Key, sa.ForeignKey("teams.id"), nullable=False),
        sa.Column("volunteer_id", sa.String(64), sa.ForeignKey("volunteers.id"), nullable=False),
        sa.Column("joined_at", sa.Double(), nullable=False),
        sa.Column("left_at", sa.Double(), nullable=True),
    )
    op.create_index("ix_memberships_team_id", "memberships", ["team_id"])
    op.create_index("ix_memberships_volunteer", "memberships", ["volunteer_id", "joined_at"])
    op.create_index(
        "ix_memberships_one",
        "memberships",
        ["volunteer_id"],
        unique=True,
        sqlite_where=sa.text("left_at IS NULL"),
        postgresql_where=sa.text("left_at IS NULL"),
    )
