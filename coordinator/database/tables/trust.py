"""Pay at stake, draws, and the organiser's checkers."""

from __future__ import annotations

import sqlalchemy as sa

from coordinator.database.tables.base import Key, lease_columns, metadata

# Pay at stake; a row is deleted when it is freed or forfeited. The ledger's events stay.
escrow = sa.Table(
    "escrow",
    metadata,
    sa.Column("contribution_id", sa.ForeignKey("contributions.id"), primary_key=True),
    sa.Column("volunteer_id", sa.ForeignKey("volunteers.id"), nullable=False),
    sa.Column("run_id", Key, nullable=False),
    sa.Column("amount_micro", sa.BigInteger, nullable=False),
)
sa.Index("ix_escrow_volunteer", escrow.c.volunteer_id, escrow.c.contribution_id)

# Draws, and refused updates: contributions that the server, a checker or an auditor recomputes, one
# row each.
recomputes = sa.Table(
    "recomputes",
    metadata,
    sa.Column("contribution_id", sa.ForeignKey("contributions.id"), primary_key=True),
    sa.Column("run_id", sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("task_id", sa.ForeignKey("tasks.id"), nullable=False),
    sa.Column("volunteer_id", sa.String(64), nullable=False),  # account of the contribution
    sa.Column("worker_id", sa.String(64), nullable=False),  # machine of the contribution
    sa.Column("state", sa.String(16), nullable=False),  # waiting, leased, done
    # StoredCase of the task as it was leased; the task's row changes afterwards
    sa.Column("work", sa.Text, nullable=False),
    # reason of a refusal, which the recompute may repeat; "" for a draw
    sa.Column("refusal", sa.String(32), nullable=False, server_default=""),
    sa.Column("flops", sa.Double, nullable=False),  # operations of the task
    sa.Column("kind", sa.String(16), nullable=False),  # class of the task's device
    sa.Column(
        "result", sa.String(16), nullable=False
    ),  # Result of rules/draws.py; "" until it is done
    # Redone of rules/draws.py, as JSON; "{}" without a measurement
    sa.Column("measured", sa.Text, nullable=False),
    sa.Column(
        "message", sa.Text, nullable=False
    ),  # sentence on the result, or why the recompute waits
    sa.Column("drawn_at", sa.Double, nullable=False),
    sa.Column("ended_at", sa.Double, nullable=True),
    *lease_columns(),
    sa.Column("tries", sa.Integer, nullable=False, server_default="0"),  # failed tries of checkers
    sa.Column(
        "seed", sa.BigInteger, nullable=False
    ),  # seed of an audit's sums; 0: must not be audited
    # task of the auditing volunteer
    sa.Column("audit_id", sa.ForeignKey("tasks.id"), nullable=True, unique=True),
    # accounts that gave the audit back, JSON
    sa.Column("declined", sa.Text, nullable=False, server_default="[]"),
    sa.Column("answer_id", Key, nullable=True),  # contribution with the sums
    sa.Column("auditor_id", sa.String(64), nullable=False, server_default="", index=True),
    sa.Column("sums", sa.LargeBinary, nullable=True),
    sa.Column(
        "agrees", sa.Boolean, nullable=True
    ),  # True if the auditor's answer agrees with the update
)
sa.Index("ix_recomputes_open", recomputes.c.state, recomputes.c.contribution_id)
sa.Index(
    "ix_recomputes_account",
    recomputes.c.volunteer_id,
    recomputes.c.state,
    recomputes.c.contribution_id,
)
sa.Index("ix_recomputes_ended", recomputes.c.ended_at)

# The organiser's own machines that make recomputes, by machine and device.
checkers = sa.Table(
    "checkers",
    metadata,
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),  # class of its device
    sa.Column("seen_at", sa.Double, nullable=False),
)
