"""Tables of API keys, requests, and the pay of answering volunteers. No prompt is kept."""

from __future__ import annotations

import sqlalchemy as sa

from coordinator.database.tables.base import Key, metadata

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("id", Key, primary_key=True, autoincrement=True),
    sa.Column("volunteer_id", sa.ForeignKey("volunteers.id"), nullable=False, index=True),
    sa.Column("name", sa.String(64), nullable=False),
    sa.Column(
        "key_hash", sa.String(64), nullable=False, unique=True
    ),  # SHA-256 of a 256-bit secret
    sa.Column("prefix", sa.String(16), nullable=False),
    sa.Column("cap_micro", sa.BigInteger, nullable=True),
    sa.Column("spent_micro", sa.BigInteger, nullable=False),  # settled
    sa.Column("runs", sa.Text, nullable=False),  # JSON list of names; [] = every run
    sa.Column("organiser", sa.Boolean, nullable=False),  # prompts are free and without a tier
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=True),
    sa.Column("revoked_at", sa.Double, nullable=True),
)

usage = sa.Table(
    "usage",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),  # also the name of the hold
    sa.Column("volunteer_id", sa.ForeignKey("volunteers.id"), nullable=False),
    sa.Column("key_id", sa.ForeignKey("api_keys.id"), nullable=True),
    sa.Column("run_id", sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("model", sa.String(160), nullable=False),  # name in the request
    sa.Column("kind", sa.String(16), nullable=False),  # completion, chat, image
    sa.Column("state", sa.String(16), nullable=False),  # open, done
    sa.Column(
        "free", sa.Boolean, nullable=False
    ),  # True within the run's free quota: nothing is held
    sa.Column("unit_nano", sa.BigInteger, nullable=False),  # thousandths of a micro-credit a token
    sa.Column("tokens_in", sa.BigInteger, nullable=False),
    sa.Column("tokens_max", sa.BigInteger, nullable=False),  # most tokens to generate or score
    sa.Column("tokens_out", sa.BigInteger, nullable=False),  # so far
    sa.Column("held_micro", sa.BigInteger, nullable=False),
    sa.Column("cost_micro", sa.BigInteger, nullable=False),
    sa.Column("replica", sa.String(64), nullable=False),  # answering process
    sa.Column("at", sa.Double, nullable=False),
    # last beat of the answering process
    sa.Column("beat_at", sa.Double, nullable=False),
    sa.Column("first_token_s", sa.Double, nullable=True),
    sa.Column("ended_at", sa.Double, nullable=True),
    # Tokens that volunteers' machines generated, by account, as JSON; and the share of the price
    # that volunteers do not get.
    sa.Column("answered", sa.Text, nullable=False, server_default="{}"),
    sa.Column("house_share", sa.Double, nullable=False, server_default="0"),
)
_u = usage.c
sa.Index("ix_usage_volunteer", _u.volunteer_id, _u.at)
sa.Index("ix_usage_key", _u.key_id)
_open = _u.state == "open"
sa.Index("ix_usage_open", _u.beat_at, sqlite_where=_open, postgresql_where=_open)

# Counts of an account's answers and draws.
answerers = sa.Table(
    "answerers",
    metadata,
    sa.Column("volunteer_id", sa.ForeignKey("volunteers.id"), primary_key=True),
    sa.Column("answers", sa.BigInteger, nullable=False),  # answers that were paid
    sa.Column("paid_micro", sa.BigInteger, nullable=False),  # pay of the answers, at stake or free
    # draws that agreed since the account's stake for answers was last forfeited
    sa.Column("agreed", sa.Integer, nullable=False),
    # Compared tokens, and the wrong ones among them; both are halved when they grow large.
    sa.Column("looked", sa.BigInteger, nullable=False),
    sa.Column("wrong", sa.BigInteger, nullable=False),
)

# Pay of answers at stake; a row is deleted when its pay is earned or forfeited. The ledger's events
# stay.
answer_stakes = sa.Table(
    "answer_stakes",
    metadata,
    sa.Column(
        "id", Key, primary_key=True, autoincrement=True
    ),  # numbered in the order of the answers
    sa.Column("request_id", sa.String(64), nullable=False),
    sa.Column(
        "volunteer_id", sa.ForeignKey("volunteers.id"), nullable=False
    ),  # volunteer who answered
    sa.Column("asker_id", sa.ForeignKey("volunteers.id"), nullable=False),
    sa.Column("run_id", Key, nullable=False),  # a run that may be deleted by now
    sa.Column("amount_micro", sa.BigInteger, nullable=False),
    # "": not drawn; drawn: its comparison waits in the process `replica`, which was alive at
    # `beat_at`; agreed; untold: that process could not compare the answer
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("replica", sa.String(64), nullable=False),
    sa.Column("beat_at", sa.Double, nullable=False),
    sa.UniqueConstraint("request_id", "volunteer_id"),
)
_s = answer_stakes.c
sa.Index("ix_answer_stakes_volunteer", _s.volunteer_id, _s.id)
_drawn = _s.state == "drawn"
sa.Index("ix_answer_stakes_drawn", _s.beat_at, sqlite_where=_drawn, postgresql_where=_drawn)
