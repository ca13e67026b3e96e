"""The Merkle tree over the ledger and the audit log.

What was sealed before becomes leaves when the next sealing finds the tree behind: batch by batch
beside the work of the server, so that a long history neither holds this transaction up nor fills
the memory.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from coordinator.database.migrations import triggers

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "merkle_leaves",
        sa.Column("place", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("log", sa.String(16), nullable=False),
        sa.Column("row_id", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("place", name="pk_merkle_leaves"),
        sa.UniqueConstraint("log", "row_id", name="uq_merkle_leaves_log_row_id"),
    )
    op.create_table(
        "merkle_nodes",
        sa.Column("level", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("place", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("hash", sa.LargeBinary(32), nullable=False),
        sa.PrimaryKeyConstraint("level", "place", name="pk_merkle_nodes"),
    )
    triggers.freeze(op.get_bind(), triggers.TREE)
