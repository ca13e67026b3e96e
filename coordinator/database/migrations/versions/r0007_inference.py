"""Keys of the OpenAI-compatible interface, and what each request used."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", KEY, autoincrement=True, nullable=False),
        sa.Column("volunteer_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("key_hash", sa.String(64), nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("cap_micro", sa.BigInteger(), nullable=True),
        sa.Column("spent_micro", sa.BigInteger(), nullable=False),
        sa.Column("runs", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["volunteer_id"], ["volunteers.id"], name="fk_api_keys_volunteer_id"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("key_hash", name="uq_api_keys_key_hash"),
    )
    op.create_index("ix_api_keys_volunteer_id", "api_keys", ["volunteer_id"])
    op.create_table(
        "usage",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("volunteer_id", sa.String(64), nullable=False),
        sa.Column("key_id", KEY, nullable=True),
        sa.Column("run_id", KEY, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(160), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("free", sa.Boolean(), nullable=False),
        sa.Column("unit_nano", sa.BigInteger(), nullable=False),
        sa.Column("tokens_in", sa.BigInteger(), nullable=False),
        sa.Column("tokens_max", sa.BigInteger(), nullable=False),
        sa.Column("tokens_out", sa.BigInteger(), nullable=False),
        sa.Column("held_micro", sa.BigInteger(), nullable=False),
        sa.Column("cost_micro", sa.BigInteger(), nullable=False),
        sa.Column("replica", sa.String(64), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("beat_at", sa.Double(), nullable=False),
        sa.Column("first_token_s", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["volunteer_id"], ["volunteers.id"], name="fk_usage_volunteer_id"),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_usage_key_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_usage_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_usage"),
    )
    op.create_index("ix_usage_volunteer", "usage", ["volunteer_id", "at"])
    op.create_index("ix_usage_key", "usage", ["key_id"])
    opened = sa.text("state = 'open'")
    op.create_index(
        "ix_usage_open", "usage", ["beat_at"], sqlite_where=opened, postgresql_where=opened
    )
