"""Tables of API keys, requests, and the pay of answering volunteers. No prompt is kept."""

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
    UniqueConstraint,
)

from coordinator.database.tables.base import Key, metadata

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),
    Column("volunteer_id", ForeignKey("volunteers.id"), nullable=False, index=True),
    Column("name", String(64), nullable=False),
    Column("key_hash", String(64), nullable=False, unique=True),  # SHA-256 of a 256-bit secret
    Column("prefix", String(16), nullable=False),
    Column("cap_micro", BigInteger, nullable=True),
    Column("spent_micro", BigInteger, nullable=False),  # settled
    Column("runs", Text, nullable=False),  # JSON list of names; [] = every run
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=True),
    Column("revoked_at", Double, nullable=True),
)

usage = Table(
    "usage",
    metadata,
    Column("id", String(64), primary_key=True),  # also the name of the hold
    Column("volunteer_id", ForeignKey("volunteers.id"), nullable=False),
    Column("key_id", ForeignKey("api_keys.id"), nullable=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("version", Integer, nullable=False),
    Column("model", String(160), nullable=False),  # name in the request
    Column("kind", String(16), nullable=False),  # completion, chat, image
    Column("state", String(16), nullable=False),  # open, done
    Column("free", Boolean, nullable=False),  # True within the run's free quota: nothing is held
    Column("unit_nano", BigInteger, nullable=False),  # thousandths of a micro-credit a token
    Column("tokens_in", BigInteger, nullable=False),
    Column("tokens_max", BigInteger, nullable=False),  # most tokens to generate or score
    Column("tokens_out", BigInteger, nullable=False),  # so far
    Column("held_micro", BigInteger, nullable=False),
    Column("cost_micro", BigInteger, nullable=False),
    Column("replica", String(64), nullable=False),  # answering process
    Column("at", Double, nullable=False),
    # last beat of that process
    Column("beat_at", Double, nullable=False),
    Column("first_token_s", Double, nullable=True),
    Column("ended_at", Double, nullable=True),
    # Tokens that volunteers' machines generated, by account, as JSON; and the house's share.
    Column("answered", Text, nullable=False, server_default="{}"),
    Column("house_share", Double, nullable=False, server_default="0"),
)
_u = usage.c
Index("ix_usage_volunteer", _u.volunteer_id, _u.at)
Index("ix_usage_key", _u.key_id)
_open = _u.state == "open"
Index("ix_usage_open", _u.beat_at, sqlite_where=_open, postgresql_where=_open)

# Counts of an account's answers and draws.
answerers = Table(
    "answerers",
    metadata,
    Column("volunteer_id", ForeignKey("volunteers.id"), primary_key=True),
    Column("answers", BigInteger, nullable=False),  # answers that were paid
    Column("paid_micro", BigInteger, nullable=False),  # pay of the answers, at stake or free
    Column("agreed", Integer, nullable=False),  # draws that agreed since the last that did not
    # Compared tokens, and the wrong ones among them; both are halved when they grow large.
    Column("looked", BigInteger, nullable=False),
    Column("wrong", BigInteger, nullable=False),
)

# Pay of answers at stake; a row is deleted when its pay is earned or forfeited. The ledger's events
# stay.
answer_stakes = Table(
    "answer_stakes",
    metadata,
    Column("id", Key, primary_key=True, autoincrement=True),  # numbered in the order of the answers
    Column("request_id", String(64), nullable=False),
    Column("volunteer_id", ForeignKey("volunteers.id"), nullable=False),  # volunteer who answered
    Column("asker_id", ForeignKey("volunteers.id"), nullable=False),
    Column("run_id", Key, nullable=False),  # a run that may be deleted by now
    Column("amount_micro", BigInteger, nullable=False),
    # "": not drawn; drawn: its comparison waits in the process `replica`, which was alive at
    # `beat_at`; agreed; untold: that process could not compare it
    Column("state", String(16), nullable=False),
    Column("replica", String(64), nullable=False),
    Column("beat_at", Double, nullable=False),
    UniqueConstraint("request_id", "volunteer_id"),
)
_s = answer_stakes.c
Index("ix_answer_stakes_volunteer", _s.volunteer_id, _s.id)
_drawn = _s.state == "drawn"
Index("ix_answer_stakes_drawn", _s.beat_at, sqlite_where=_drawn, postgresql_where=_drawn)
