"""Pay at stake, draws, and the organiser's checkers."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
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

# Pay at stake; a row is deleted when it is freed or forfeited. The ledger's events stay.
escrow = Table(
    "escrow",
    metadata,
    Column("contribution_id", ForeignKey("contributions.id"), primary_key=True),
    Column("volunteer_id", ForeignKey("volunteers.id"), nullable=False),
    Column("run_id", Key, nullable=False),
    Column("amount_micro", BigInteger, nullable=False),
)
Index("ix_escrow_volunteer", escrow.c.volunteer_id, escrow.c.contribution_id)

# Draws: contributions that the server, a checker or an auditor recomputes, one row each.
recomputes = Table(
    "recomputes",
    metadata,
    Column("contribution_id", ForeignKey("contributions.id"), primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("task_id", ForeignKey("tasks.id"), nullable=False),
    Column("volunteer_id", String(64), nullable=False),  # account of the contribution
    Column("worker_id", String(64), nullable=False),  # machine of the contribution
    Column("state", String(16), nullable=False),  # asked, revealed, done
    Column("wanted", Text, nullable=False),  # SHA-256 of the files to reveal, JSON
    # StoredCase of the task as it was leased; the task's row changes afterwards
    Column("work", Text, nullable=False),
    Column("flops", Double, nullable=False),  # operations of the task
    Column("kind", String(16), nullable=False),  # class of the task's device
    Column("result", String(16), nullable=False),  # Result of rules/checks.py; "" until it is done
    Column("measured", Text, nullable=False),  # Redone, JSON; "{}" without a measurement
    Column("message", Text, nullable=False),  # sentence on the result, or why the recompute waits
    Column("asked_at", Double, nullable=False),
    Column("due_at", Double, nullable=False),
    Column("ended_at", Double, nullable=True),
    # name under which a checker holds it; "" = none
    Column("hold", String(32), nullable=False, server_default=""),
    Column("held_until", Double, nullable=False, server_default="0"),
    Column("tries", Integer, nullable=False, server_default="0"),  # failed tries of checkers
    Column("seed", BigInteger, nullable=False),  # seed of an audit's sums; 0: must not be audited
    # task of the auditing volunteer
    Column("audit_id", ForeignKey("tasks.id"), nullable=True, unique=True),
    # accounts that gave the audit back, JSON
    Column("declined", Text, nullable=False, server_default="[]"),
    Column("answer_id", Key, nullable=True),  # contribution with the sums
    Column("auditor_id", String(64), nullable=False, server_default="", index=True),
    Column("sums", LargeBinary, nullable=True),
    Column("agrees", Boolean, nullable=True),  # True if the auditor's answer agrees with the update
)
Index("ix_recomputes_open", recomputes.c.state, recomputes.c.contribution_id)
Index(
    "ix_recomputes_account",
    recomputes.c.volunteer_id,
    recomputes.c.state,
    recomputes.c.contribution_id,
)
Index("ix_recomputes_machine", recomputes.c.worker_id, recomputes.c.state)
Index("ix_recomputes_ended", recomputes.c.ended_at)

# The organiser's own machines that make recomputes, by machine and device.
checkers = Table(
    "checkers",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("kind", String(16), nullable=False),  # class of its device
    Column("seen_at", Double, nullable=False),
)
