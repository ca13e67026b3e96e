"""Standing and network of an account, pay in escrow, and checks of contributions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    for column in (
        sa.Column("standing", sa.String(16), nullable=False, server_default="vetted"),
        sa.Column("invited", sa.Boolean(), nullable=False, server_default=sa.true()),
        sa.Column("passed", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("accepted", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("forward_streak", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("network", sa.String(64), nullable=False, server_default=""),
        sa.Column("suspended_reason", sa.Text(), nullable=False, server_default=""),
    ):
        op.add_column("volunteers", column)
    op.create_index("ix_volunteers_network", "volunteers", ["network", "created_at"])
    for column in (
        sa.Column("vetted", sa.Boolean(), nullable=False, server_default=sa.true()),
        sa.Column("network", sa.String(64), nullable=False, server_default=""),
    ):
        op.add_column("contributions", column)
    op.add_column("workers", sa.Column("rest_until", sa.Double(), nullable=True))
    _escrow()
    _checks()


def _escrow() -> None:
    op.create_table(
        "escrow",
        sa.Column("contribution_id", KEY, autoincrement=False, nullable=False),
        sa.Column("volunteer_id", sa.String(64), nullable=False),
        sa.Column("run_id", KEY, nullable=False),
        sa.Column("amount_micro", sa.BigInteger(), nullable=False),
        sa.Column("accepted", sa.BigInteger(), nullable=False),
        sa.Column("passed", sa.Integer(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["contribution_id"], ["contributions.id"], name="fk_escrow_contribution_id"
        ),
        sa.ForeignKeyConstraint(["volunteer_id"], ["volunteers.id"], name="fk_escrow_volunteer_id"),
        sa.PrimaryKeyConstraint("contribution_id", name="pk_escrow"),
    )
    op.create_index("ix_escrow_volunteer", "escrow", ["volunteer_id", "contribution_id"])
    op.create_index("ix_escrow_since", "escrow", ["since"])


def _checks() -> None:
    op.create_table(
        "checks",
        sa.Column("id", KEY, autoincrement=True, nullable=False),
        sa.Column("contribution_id", KEY, nullable=False),
        sa.Column("run_id", KEY, nullable=False),
        sa.Column("volunteer_id", sa.String(64), nullable=False),
        sa.Column("result", sa.String(16), nullable=False),
        sa.Column("measured", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["contribution_id"], ["contributions.id"], name="fk_checks_contribution_id"
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_checks_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_checks"),
        sa.UniqueConstraint("contribution_id", name="uq_checks_contribution_id"),
    )
    op.create_index("ix_checks_newest", "checks", ["run_id", "id"])
