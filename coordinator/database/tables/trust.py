"""Pay in escrow, forward checks, recomputes and sketches of contributions."""

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

# Sketches of accepted updates, by which near copies are found (shared/tensors/sketch.py); those of
# bases long past go.
sketches = Table(
    "sketches",
    metadata,
    Column("contribution_id", ForeignKey("contributions.id"), primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("base_version", Integer, nullable=False),
    Column("sketch", LargeBinary, nullable=False),  # float32
)
Index("ix_sketches_run", sketches.c.run_id, sketches.c.contribution_id)
Index("ix_sketches_base", sketches.c.run_id, sketches.c.base_version)

# Forward checks of updates, one each.
checks = Table(
    "checks",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("contribution_id", ForeignKey("contributions.id"), nullable=False, unique=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("volunteer_id", String(64), nullable=False),  # whose it is
    Column("result", String(16), nullable=False),  # passed, failed, unclear
    Column("measured", Text, nullable=False),  # ForwardFigures, JSON
    Column("at", Double, nullable=False),
)
Index("ix_checks_newest", checks.c.run_id, checks.c.id)

# Tasks that the coordinator does again, one row a contribution.
recomputes = Table(
    "recomputes",
    metadata,
    Column("contribution_id", ForeignKey("contributions.id"), primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("volunteer_id", String(64), nullable=False),  # whose it is
    Column("state", String(16), nullable=False),  # asked, revealed, done
    Column("wanted", Text, nullable=False),  # SHA-256 of the files to reveal, JSON
    # of checking/case.py, as it was: the row of the task moves on
    Column("work", Text, nullable=False),
    Column("withheld", Boolean, nullable=False),  # its pay waits for the result
    Column("result", String(16), nullable=False),  # of rules/checks.py; "" until it is done
    Column("measured", Text, nullable=False),  # Redone, JSON; "{}" where nothing was measured
    Column("message", Text, nullable=False),
    Column("asked_at", Double, nullable=False),
    Column("due_at", Double, nullable=False),
    Column("ended_at", Double, nullable=True),
    Column("kind", String(16), nullable=False, server_default=""),  # class of the task's device
    Column("hold", String(32), nullable=False, server_default=""),  # of the auditor that took it
    Column("held_until", Double, nullable=False, server_default="0"),
    Column("tries", Integer, nullable=False, server_default="0"),  # of auditors, in vain
)
Index("ix_recomputes_open", recomputes.c.state, recomputes.c.contribution_id)

# Tasks that volunteers do again for others, one row a contribution that is checked.
audits = Table(
    "audits",
    metadata,
    Column("contribution_id", ForeignKey("contributions.id"), primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("volunteer_id", String(64), nullable=False),  # whose work is checked
    Column("state", String(16), nullable=False),  # ordered, open, answered, done
    Column("seed", BigInteger, nullable=False),
    Column("task_id", ForeignKey("tasks.id"), nullable=True, unique=True),
    Column("work", Text, nullable=False),  # of its lease, JSON; "" until it is open
    Column("answer_id", Key, nullable=True),  # the contribution with the sums
    Column("auditor_id", String(64), nullable=False, server_default="", index=True),
    Column("sums", LargeBinary, nullable=True),
    Column("result", String(16), nullable=False),  # of the answer; "" until it is settled
    Column("opened_at", Double, nullable=True),
)
Index("ix_audits_state", audits.c.state, audits.c.contribution_id)

# Auditors of the organiser's own, by machine and device.
auditors = Table(
    "auditors",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("kind", String(16), nullable=False),  # class of its device
    Column("seen_at", Double, nullable=False),
)
