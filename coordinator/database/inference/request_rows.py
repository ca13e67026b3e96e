"""Requests for answers. A request and the hold of its price begin in one transaction; its end and
the settlement of the hold are another.

If a request's process stops beating, any process ends it, at the price of the tokens last stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Select, bindparam, case, func, insert, select, update

from coordinator.database import volunteers as accounts
from coordinator.database.engine.statements import deletion, equals
from coordinator.database.inference import api_key_rows
from coordinator.database.ledger import answer_pay, spending
from coordinator.database.tables.inference import api_keys, usage
from coordinator.rules.answer_prices import cost_micro
from shared.decoding import decode
from shared.errors import NotFound
from shared.protocol.inference import UsageRow

PAGE = 500
RECOVERED_MAX = 500  # most abandoned requests that one transaction ends

_u = usage.c


class OpenRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `usage` as it begins; see the table."""

    id: str
    volunteer_id: str
    key_id: int | None
    run_id: int
    version: int
    model: str
    kind: str
    free: bool
    unit_nano: int
    tokens_in: int
    tokens_max: int
    held_micro: int
    replica: str
    at: float
    house_share: float


_ADD = insert(usage)
_LOCKED = select(usage).where(equals(_u.id)).with_for_update()
_SET = update(usage).where(equals(_u.id))
_BEAT = (
    update(usage)
    .where(equals(_u.id), _u.state == "open")
    .values(tokens_out=bindparam("out"), answered=bindparam("by_others"), beat_at=bindparam("beat"))
)


def begin(conn: Connection, row: OpenRow, memo: str) -> None:
    """Hold a request's highest price and insert the request. Raises Forbidden for too little
    credit.
    """
    if row.held_micro:
        spending.hold(conn, row.volunteer_id, row.id, row.held_micro, memo, row.at)
    zero = {"state": "open", "tokens_out": 0, "cost_micro": 0, "beat_at": row.at}
    conn.execute(_ADD, msgspec.structs.asdict(row) | zero)


class StreamProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Number of tokens that a request has streamed: in all, and by account of the volunteers that
    generated them.
    """

    out: int
    answered: Mapping[str, int] = {}


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """End of a request. `roll` returns a draw's random number; `replica` is the process that can
    compare the answers.
    """

    now: float
    roll: Callable[[], float]
    first_s: float | None = None
    replica: str = ""  # "": the answering process is gone, so that nobody can compare


def end(conn: Connection, request_id: str, streamed: StreamProgress, ending: Ending) -> int:
    """Settle a request for its generated tokens, release the rest of its hold, and put its
    volunteers' pay at stake; return the price. A repeated call changes nothing.

    Raises NotFound for a request that was never begun.
    """
    accounts.lock(conn, streamed.answered)
    row = conn.execute(_LOCKED, {"where_id": request_id}).mappings().first()
    if row is None:
        raise NotFound(f"there is no request {request_id}")
    if row["state"] != "open":
        return int(row["cost_micro"])
    out = max(0, min(streamed.out, row["tokens_max"]))
    units = row["tokens_in"] + out
    # a request for 0 tokens is complete once its prompt is scored
    is_answered = out or not row["tokens_max"]
    cost = min(row["held_micro"], cost_micro(row["unit_nano"], units)) if is_answered else 0
    pays, now = shares(cost, out, streamed.answered, row["house_share"]), ending.now
    if cost:
        spending.settle(conn, row["volunteer_id"], request_id, cost, now)
    elif row["held_micro"]:
        spending.release(conn, row["volunteer_id"], request_id, now)
    done = {"state": "done", "tokens_out": out, "cost_micro": cost, "ended_at": now}
    by_others = msgspec.json.encode(streamed.answered).decode()
    progress = {"first_token_s": ending.first_s, "answered": by_others}
    conn.execute(_SET, {"where_id": request_id} | progress | done)
    if cost and row["key_id"] is not None:
        api_key_rows.charge(conn, row["key_id"], cost)
    if pays:
        answered_request = answer_pay.AnsweredRequest(
            id=request_id,
            run_id=row["run_id"],
            asker_id=row["volunteer_id"],
            replica=ending.replica,
        )
        answer_pay.pay(conn, answered_request, pays, ending.roll, now)
    return cost


def shares(cost: int, out: int, answered: Mapping[str, int], house_share: float) -> dict[str, int]:
    """Return each account's micro-credits of a price, in proportion to its tokens, after the
    `house_share` that volunteers do not get.
    """
    whole = math.floor(cost * (1 - house_share))
    left = out
    amounts: dict[str, int] = {}
    for who in sorted(answered):
        tokens = min(max(0, answered[who]), left)
        left -= tokens
        if amount := whole * tokens // max(1, out):
            amounts[who] = amount
    return amounts


def beat(conn: Connection, streamed: Mapping[str, StreamProgress], now: float) -> None:
    """Store how many tokens each running request has streamed."""
    rows = [
        {
            "where_id": request_id,
            "out": streamed[request_id].out,
            "by_others": msgspec.json.encode(streamed[request_id].answered).decode(),
            "beat": now,
        }
        for request_id in sorted(streamed)
    ]
    if rows:
        conn.execute(_BEAT, rows)


def abandoned(conn: Connection, before: float) -> dict[str, StreamProgress]:
    """Return open requests without a beat since an instant, with their stored tokens."""
    query = select(_u.id, _u.tokens_out, _u.answered).where(_u.state == "open", _u.beat_at < before)
    return _streamed(conn, query.order_by(_u.beat_at).limit(RECOVERED_MAX))


def still_open(conn: Connection, ids: Sequence[str]) -> dict[str, StreamProgress]:
    """Return the stored progress of the requests among `ids` that are open, by request."""
    query = select(_u.id, _u.tokens_out, _u.answered).where(_u.state == "open", _u.id.in_(ids))
    return _streamed(conn, query) if ids else {}


def _streamed(conn: Connection, query: Select[object]) -> dict[str, StreamProgress]:
    return {
        row.id: StreamProgress(
            out=int(row.tokens_out), answered=decode(row.answered, dict[str, int])
        )
        for row in conn.execute(query)
    }


class UnderWay(msgspec.Struct, frozen=True, kw_only=True):
    """Sum of an account's open requests, each at its highest price."""

    tokens: int
    key_micro: int  # held for requests with this key


def under_way(conn: Connection, volunteer_id: str, key_id: int | None) -> UnderWay:
    """Sum up an account's open requests."""
    sums: list[Any] = [
        func.sum(_u.tokens_max),
        func.sum(case((_u.key_id == key_id, _u.held_micro), else_=0)),
    ]
    query = select(*sums).where(_u.state == "open", _u.volunteer_id == volunteer_id)
    tokens, held_micro = (int(value or 0) for value in conn.execute(query).one())
    return UnderWay(tokens=tokens, key_micro=held_micro)


def recent(
    conn: Connection, volunteer_id: str, run_id: int, since: float, most: int
) -> float | None:
    """Return when an account's `most`-th newest request to a run began; None if before `since`."""
    query = (
        select(_u.at)
        .where(_u.volunteer_id == volunteer_id, _u.at > since, _u.run_id == run_id)
        .order_by(_u.at.desc())
        .offset(most - 1)
        .limit(1)
    )
    value = conn.execute(query).scalar()
    return None if value is None else float(value)


def spent_since(conn: Connection, volunteer_id: str, since: float) -> int:
    """Return an account's spending and holds for requests since an instant, in micro-credits."""
    amount = case((_u.state == "open", _u.held_micro), else_=_u.cost_micro)
    query = select(func.sum(amount)).where(_u.volunteer_id == volunteer_id, _u.at >= since)
    return int(conn.execute(query).scalar() or 0)


def free_since(conn: Connection, volunteer_id: str, run_id: int, since: float) -> int:
    """Return how many free tokens of a run an account used or reserved since an instant."""
    out = case((_u.state == "open", _u.tokens_max), else_=_u.tokens_out)
    query = select(func.sum(_u.tokens_in + out)).where(
        _u.volunteer_id == volunteer_id, _u.at >= since, _u.run_id == run_id, _u.free
    )
    return int(conn.execute(query).scalar() or 0)


def prune(conn: Connection, before: float) -> int:
    """Delete ended requests that began before an instant; return their number."""
    old = deletion(usage, "expired").where(_u.at < before, _u.state == "done")
    return int(conn.execute(old).rowcount)


def listing(conn: Connection, volunteer_id: str, key_id: int | None) -> list[UsageRow]:
    """Return the newest 500 requests of an account or of one of its keys, newest first."""
    query = (
        select(usage, api_keys.c.prefix)
        .join(api_keys, api_keys.c.id == _u.key_id, isouter=True)
        .where(_u.volunteer_id == volunteer_id)
        .order_by(_u.at.desc(), _u.id)
        .limit(PAGE)
    )
    if key_id is not None:
        query = query.where(_u.key_id == key_id)
    return [_row(row) for row in conn.execute(query).mappings()]


def _row(row: Any) -> UsageRow:
    ended = row["ended_at"]
    return UsageRow(
        id=row["id"],
        at=row["at"],
        model=row["model"],
        kind=row["kind"],
        tokens_in=row["tokens_in"],
        tokens_out=row["tokens_out"],
        cost_micro=row["cost_micro"],
        free=row["free"],
        first_token_s=row["first_token_s"],
        key=row["prefix"] or "",
        latency_s=None if ended is None else max(0.0, ended - row["at"]),
    )
