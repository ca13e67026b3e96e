"""Tables of volunteers, their workers, invite and link codes, and consents."""

from __future__ import annotations

import sqlalchemy as sa

from coordinator.database.tables.base import Key, metadata

volunteers = sa.Table(
    "volunteers",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),  # made by the client
    sa.Column("nickname", sa.String(64), nullable=False),
    # common form of names that look alike, so that they collide
    sa.Column("nickname_key", sa.String(128), nullable=False, unique=True),
    sa.Column("state", sa.String(16), nullable=False),  # active, banned, forgotten
    sa.Column("public", sa.Boolean, nullable=False),
    sa.Column("invite_id", Key, nullable=True),
    sa.Column("created_at", sa.Double, nullable=False),
    # probation, vetted, suspended; see rules/standing.py
    sa.Column("standing", sa.String(16), nullable=False, server_default="vetted"),
    # the organiser vouched for the account
    sa.Column("invited", sa.Boolean, nullable=False, server_default=sa.true()),
    # network from which the account was registered
    sa.Column("network", sa.String(64), nullable=False, server_default=""),
    # number of accepted contributions
    sa.Column("accepted", sa.BigInteger, nullable=False, server_default="0"),
    # pay of the accepted contributions
    sa.Column("accepted_micro", sa.BigInteger, nullable=False, server_default="0"),
    # draws that were made, and passed draws of different tasks since the last draw that did not
    # pass
    sa.Column("draws", sa.Integer, nullable=False, server_default="0"),
    sa.Column("proofs", sa.Integer, nullable=False, server_default="0"),
    # no later draw frees the pay of contributions up to this one
    sa.Column("unproved_to", Key, nullable=False, server_default="0"),
    sa.Column("suspended_reason", sa.Text, nullable=False, server_default=""),
    # recomputes in a row that proved nothing, and the end of the account's rest after them
    sa.Column("unproven", sa.Integer, nullable=False, server_default="0"),
    sa.Column("rest_until", sa.Double, nullable=True),
)

sa.Index("ix_volunteers_network", volunteers.c.network, volunteers.c.created_at)

workers = sa.Table(
    "workers",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),  # made by the client
    sa.Column("volunteer_id", sa.ForeignKey("volunteers.id"), nullable=False, index=True),
    sa.Column("secret_hash", sa.String(64), nullable=False),  # SHA-256 of a 256-bit secret
    sa.Column("hostname", sa.String(255), nullable=False),
    sa.Column("hardware", sa.Text, nullable=False),
    sa.Column("benchmark", sa.Text, nullable=False),
    sa.Column("step_flops", sa.Double, nullable=False),
    sa.Column("software", sa.String(64), nullable=False),
    sa.Column("workloads", sa.Text, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # online, training, paused, offline, left
    sa.Column("last_seen_at", sa.Double, nullable=False),
    # from the worker's last heartbeat: steps a second of all tasks, and °C of the hottest device
    sa.Column("rate", sa.Double, nullable=True),
    sa.Column("celsius", sa.Double, nullable=True),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("revoked_at", sa.Double, nullable=True),
    # time until which the worker gets no task of a run, by the run's number (JSON); set after the
    # worker gave back tasks of the run as failed
    sa.Column("rests", sa.Text, nullable=False, server_default="{}"),
    # the owner's order from another machine: pause, resume or finish
    sa.Column("ordered", sa.String(16), nullable=False, server_default=""),
    sa.Column("ordered_at", sa.Double, nullable=True),
)
sa.Index("ix_workers_ordered_at", workers.c.ordered_at)

codes = sa.Table(
    "codes",
    metadata,
    sa.Column("id", Key, primary_key=True, autoincrement=True),
    sa.Column("code_hash", sa.String(64), nullable=False, unique=True),
    sa.Column("kind", sa.String(16), nullable=False),  # invite, link
    sa.Column("label", sa.String(255), nullable=False),  # recipient's name
    sa.Column(
        "volunteer_id", sa.ForeignKey("volunteers.id"), nullable=True
    ),  # link codes: the account
    sa.Column("uses_left", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=True),
    sa.Column("revoked_at", sa.Double, nullable=True),
)

consents = sa.Table(
    "consents",
    metadata,
    sa.Column("volunteer_id", sa.ForeignKey("volunteers.id"), primary_key=True),
    sa.Column("run_id", sa.ForeignKey("runs.id"), primary_key=True),
    sa.Column("licence", sa.String(255), nullable=False),
    sa.Column("given_at", sa.Double, nullable=False),
)
