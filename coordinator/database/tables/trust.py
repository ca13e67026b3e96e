"""Pay in escrow, checks of contributions, sketches of updates, and the nodes of the public log's
Merkle trees.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
)

from coordinator.database.tables.base import Key, metadata

# Pay that is not earned yet; a row goes when it is vested or forfeit. The ledger's events stay.
escrow = Table(
    "escrow",
    metadata,
    Column("contribution_id", ForeignKey("contributions.id"), primary_key=True),
    Column("volunteer_id", ForeignKey("volunteers.id"), nullable=False),
    Column("run_id", Key, nullable=False),
    Column("amount_micro", BigInteger, nullable=False),
    # contributions accepted and checks passed of the account, when it was put here
    Column("accepted", BigInteger, nullable=False),
    Column("passed", Integer, nullable=False),
    Column("since", Double, nullable=False, index=True),
)
Index("ix_escrow_volunteer", escrow.c.volunteer_id, escrow.c.contribution_id)

checks = Table(
    "checks",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("contribution_id", ForeignKey("contributions.id"), nullable=False, index=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("volunteer_id", String(64), nullable=False),  # who is checked
    Column("kind", String(16), nullable=False),  # forward, recompute
    Column("state", String(16), nullable=False),  # waiting, running, revealing, done, expired
    # passed, failed, unclear; "" until it is done
    Column("result", String(16), nullable=False, server_default=""),
    Column("reason", Text, nullable=False, server_default=""),
    Column("measured", Text, nullable=False, server_default="{}"),  # JSON
    Column("chosen_at", Double, nullable=False),
    Column("due_at", Double, nullable=True),
    Column("ended_at", Double, nullable=True),
    # volunteer that recomputes; "" for the coordinator itself
    Column("auditor", String(64), nullable=False, server_default=""),
)
Index("ix_checks_queue", checks.c.state, checks.c.id)
Index("ix_checks_newest", checks.c.run_id, checks.c.kind, checks.c.id)

# Random projections of updates, compared to find copies.
sketches = Table(
    "sketches",
    metadata,
    Column("contribution_id", ForeignKey("contributions.id"), primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("version", Integer, nullable=False),
    Column("volunteer_id", String(64), nullable=False),
    Column("data", LargeBinary, nullable=False),
)
Index("ix_sketches_newest", sketches.c.run_id, sketches.c.contribution_id)

# Full nodes of the Merkle tree over a log (RFC 6962): 32 bytes of SHA-256 each.
merkle_nodes = Table(
    "merkle_nodes",
    metadata,
    Column("log", String(16), primary_key=True),
    Column("level", Integer, primary_key=True, autoincrement=False),  # 0 is the leaves
    Column("number", BigInteger, primary_key=True, autoincrement=False),  # from 0, left to right
    Column("hash", LargeBinary(32), nullable=False),
)
