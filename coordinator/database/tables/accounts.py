"""Tables of volunteers, their workers, invite and link codes, and consents."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    true,
)

from coordinator.database.tables.base import Key, metadata

volunteers = Table(
    "volunteers",
    metadata,
    Column("id", String(64), primary_key=True),  # made by the client
    Column("nickname", String(64), nullable=False),
    # common form of names that look alike, so that they collide
    Column("nickname_key", String(128), nullable=False, unique=True),
    Column("state", String(16), nullable=False),  # active, banned, forgotten
    Column("public", Boolean, nullable=False),
    Column("trust", Double, nullable=False),
    Column("invite_id", Key, nullable=True),
    Column("created_at", Double, nullable=False),
    # probation, vetted, suspended; see rules/standing.py
    Column("standing", String(16), nullable=False, server_default="vetted"),
    # the organiser vouched for the account
    Column("invited", Boolean, nullable=False, server_default=true()),
    # network of its registration
    Column("network", String(64), nullable=False, server_default=""),
    # number of accepted contributions
    Column("accepted", BigInteger, nullable=False, server_default="0"),
    # pay of the accepted contributions
    Column("accepted_micro", BigInteger, nullable=False, server_default="0"),
    # draws that were made, and passed draws of different tasks since the last one that did not pass
    Column("draws", Integer, nullable=False, server_default="0"),
    Column("proofs", Integer, nullable=False, server_default="0"),
    # the stake of contributions up to this one was forfeited
    Column("lost_to", Key, nullable=False, server_default="0"),
    Column("suspended_reason", Text, nullable=False, server_default=""),
)

Index("ix_volunteers_network", volunteers.c.network, volunteers.c.created_at)

workers = Table(
    "workers",
    metadata,
    Column("id", String(64), primary_key=True),  # made by the client
    Column("volunteer_id", ForeignKey("volunteers.id"), nullable=False, index=True),
    Column("secret_hash", String(64), nullable=False),  # SHA-256 of a 256-bit secret
    Column("hostname", String(255), nullable=False),
    Column("hardware", Text, nullable=False),
    Column("benchmark", Text, nullable=False),
    Column("step_flops", Double, nullable=False),
    Column("software", String(64), nullable=False),
    Column("protocol", Integer, nullable=False),
    Column("workloads", Text, nullable=False),
    Column("state", String(16), nullable=False),  # online, training, paused, offline, left
    Column("last_seen_at", Double, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double, nullable=True),
    # no task is leased before this time; set after tasks were given back as failed
    Column("rest_until", Double, nullable=True),
    # the owner's order from another machine: pause, resume or finish
    Column("ordered", String(16), nullable=False, server_default=""),
    Column("ordered_at", Double, nullable=True),
)
Index("ix_workers_ordered_at", workers.c.ordered_at)

codes = Table(
    "codes",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("code_hash", String(64), nullable=False, unique=True),
    Column("kind", String(16), nullable=False),  # invite, link
    Column("label", String(255), nullable=False),  # recipient's name
    Column("volunteer_id", ForeignKey("volunteers.id"), nullable=True),  # link codes: the account
    Column("uses_left", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=True),
    Column("revoked_at", Double, nullable=True),
)

consents = Table(
    "consents",
    metadata,
    Column("volunteer_id", ForeignKey("volunteers.id"), primary_key=True),
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("licence", String(255), nullable=False),
    Column("given_at", Double, nullable=False),
)
