"""Pay of answers: the asker's credits are burnt; each computing volunteer's share is paid once a
draw agrees.

    answer       mint   -> escrow    a machine of this account computed tokens of a request
    answered     escrow -> earned    this answer or a later one of the account was drawn and agreed
    unanswer     escrow -> mint      a drawn answer did not agree, or the account was suspended: the
                                     whole stake is forfeited
    refund       burn   -> earned    the asker gets its credits back, with each "unanswer"

Nothing else frees the stake. Besides the ledger's events, each stake has a row in `answer_stakes`.
A drawn answer waits until it is compared. A drawn answer that its process cannot compare ("untold")
frees nothing, and the next answer of the account is certainly drawn.

A change of an account's stakes locks its row of `volunteers` first, like a suspension.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, bindparam, exists, insert, select, update

from coordinator.database import volunteers as accounts
from coordinator.database.engine.statements import among, deletion, equals, insert_new
from coordinator.database.ledger import debts
from coordinator.database.ledger.postings import MINT, SYSTEM, EventDraft, Move, post
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.inference import answer_stakes, answerers, api_keys, usage
from coordinator.rules.draws import chance
from coordinator.rules.recompute_result import DRAWN_SHARE, is_of_model, is_other_model

TALLY_MAX = 1024  # compared tokens of an account above which the tally is halved

_A, _S, _U, _V = answerers.c, answer_stakes.c, usage.c, volunteers.c
_UNTOLD = exists().where(_S.volunteer_id == _V.id, _S.state == "untold")
_TALLIES = (
    select(answerers, _V.standing, _UNTOLD.label("untold"))
    .join(volunteers, _V.id == _A.volunteer_id)
    .where(among(_A.volunteer_id, "ids"))
)
_SET_TALLY = update(answerers).where(equals(_A.volunteer_id))
_ADD = insert(answer_stakes)
_OF_ONE = select(answer_stakes).where(equals(_S.volunteer_id)).order_by(_S.id)
_END_DRAW = (
    update(answer_stakes)
    .where(equals(_S.volunteer_id), equals(_S.request_id), _S.state == "drawn")
    .values(state=bindparam("outcome"))
)
_REMOVE = deletion(answer_stakes, "settled").where(among(_S.id, "ids"))
_CHEAPER = (
    update(usage)
    .where(equals(_U.id))
    .values(cost_micro=_U.cost_micro - bindparam("amount"))
    .returning(_U.key_id)
)
_UNSPEND = (
    update(api_keys)
    .where(equals(api_keys.c.id))
    .values(spent_micro=api_keys.c.spent_micro - bindparam("amount"))
)


class AnsweredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request that volunteers answered."""

    id: str
    run_id: int
    asker_id: str
    # process that can compare the answer; "": the process ended, and the prompt was lost with it
    replica: str


def pay(
    conn: Connection,
    request: AnsweredRequest,
    amounts: Mapping[str, int],
    roll: Callable[[], float],
    now: float,
) -> None:
    """Put each locked account's pay for a request at stake; `roll` gives a draw's random number."""
    tallies = _tallies(conn, amounts)
    drafts, stakes = [], []
    for who, amount in amounts.items():
        tally = tallies[who]
        mean = tally.paid_micro / tally.answers if tally.answers else amount
        drawn = tally.untold or roll() < chance(tally.agreed, amount, mean, DRAWN_SHARE)
        moves = (Move(SYSTEM, MINT, -amount), Move(who, "escrow", amount))
        key = f"answer:{request.id}:{who}"
        drafts.append(EventDraft(key=key, kind="answer", moves=moves, run_id=request.run_id))
        drawn_state = "drawn" if request.replica else "untold"
        stakes.append(
            {
                "request_id": request.id,
                "volunteer_id": who,
                "asker_id": request.asker_id,
                "run_id": request.run_id,
                "amount_micro": amount,
                "state": drawn_state if drawn else "",
                "replica": request.replica,
                "beat_at": now,
            }
        )
        sums = {"answers": tally.answers + 1, "paid_micro": tally.paid_micro + amount}
        conn.execute(_SET_TALLY, {"where_volunteer_id": who} | sums)
    conn.execute(_ADD, stakes)
    post(conn, drafts, now)
    for who in sorted(amounts):
        if tallies[who].standing == "suspended":  # suspended while it answered
            forfeit(conn, who, "this account was suspended", now)


def record_comparison(
    conn: Connection, request_id: str, who: str, comparison: tuple[int, int], memo: str, now: float
) -> bool:
    """Record a `comparison` of an answer: the number of compared tokens, and of the wrong ones.

    An answer that agrees frees its pay and the pay before it, up to a waiting draw; an answer that
    differs forfeits all pay at stake. Return True if the account is proven to use another model.
    """
    accounts.lock(conn, [who])
    tally, (looked, wrong) = _tallies(conn, [who])[who], comparison
    sums = tally.looked + looked, tally.wrong + wrong
    if sums[0] > TALLY_MAX:
        sums = sums[0] // 2, sums[1] // 2
    values = {"looked": sums[0], "wrong": sums[1]}
    if agrees := is_of_model(looked, wrong, sums):
        values["agreed"] = tally.agreed + _end_draw(conn, request_id, who, "agreed", now)
    else:
        forfeit(conn, who, memo, now)
    conn.execute(_SET_TALLY, {"where_volunteer_id": who} | values)
    return not agrees and (is_other_model(looked, wrong) or is_other_model(*sums))


def mark_untold(conn: Connection, request_id: str, who: str, now: float) -> None:
    """Record that a drawn answer cannot be compared any more."""
    accounts.lock(conn, [who])
    _end_draw(conn, request_id, who, "untold", now)


def forfeit(conn: Connection, who: str, memo: str, now: float) -> int:
    """Forfeit a locked account's stake for answers and refund the askers; return the amount."""
    rows = conn.execute(_OF_ONE, {"where_volunteer_id": who}).all()
    if not rows:
        return 0
    drafts = []
    for row in rows:
        amount = row.amount_micro
        forfeiture = (Move(who, "escrow", -amount), Move(SYSTEM, MINT, amount))
        refund = (Move(row.asker_id, "burn", -amount), Move(row.asker_id, "earned", amount))
        drafts += [_draft("unanswer", row, forfeiture, memo), _draft("refund", row, refund)]
    post(conn, drafts, now)
    _remove(conn, rows)
    conn.execute(_SET_TALLY, {"where_volunteer_id": who, "agreed": 0})
    for row in rows:
        refund_values = {"where_id": row.request_id, "amount": row.amount_micro}
        if (key_id := conn.execute(_CHEAPER, refund_values).scalar()) is not None:
            conn.execute(_UNSPEND, {"where_id": key_id, "amount": row.amount_micro})
    debts.repay(conn, {row.asker_id: f"repaid:{row.request_id}:{who}:back" for row in rows}, now)
    return sum(int(row.amount_micro) for row in rows)


def _end_draw(conn: Connection, request_id: str, who: str, outcome: str, now: float) -> int:
    """End a waiting draw and free the pay that it held; return the ended draws, 0 or 1."""
    values = {"where_request_id": request_id, "where_volunteer_id": who, "outcome": outcome}
    ended = conn.execute(_END_DRAW, values).rowcount
    _free(conn, who, now)
    return int(ended)


def _free(conn: Connection, who: str, now: float) -> None:
    """Post an account's pay of answers as earned, oldest first, up to the newest answer whose draw
    agreed, but not beyond an answer whose draw waits; then repay the account's debt.
    """
    rows = conn.execute(_OF_ONE, {"where_volunteer_id": who}).all()
    agreed = [n for n, row in enumerate(rows) if row.state == "agreed"]
    waiting = [n for n, row in enumerate(rows) if row.state == "drawn"]
    free = rows[: min([max(agreed, default=-1) + 1, *waiting])]
    if not free:
        return
    drafts = []
    for row in free:
        moves = (Move(who, "escrow", -row.amount_micro), Move(who, "earned", row.amount_micro))
        drafts.append(_draft("answered", row, moves))
    post(conn, drafts, now)
    _remove(conn, free)
    debts.repay(conn, {who: f"repaid:{free[-1].request_id}:{who}"}, now)


def _draft(kind: str, row: Any, moves: tuple[Move, ...], memo: str = "") -> EventDraft:
    key = f"{kind}:{row.request_id}:{row.volunteer_id}"
    return EventDraft(key=key, kind=kind, moves=moves, run_id=row.run_id, memo=memo)


def _tallies(conn: Connection, who: Collection[str]) -> dict[str, Any]:
    """Return the tallies of answering accounts, by account; missing rows are inserted."""
    zero = dict.fromkeys(("answers", "paid_micro", "agreed", "looked", "wrong"), 0)
    rows = [{"volunteer_id": account} | zero for account in sorted(who)]
    conn.execute(insert_new(conn, answerers, "volunteer_id"), rows)
    return {row.volunteer_id: row for row in conn.execute(_TALLIES, {"ids": sorted(who)})}


def _remove(conn: Connection, rows: Sequence[Any]) -> None:
    conn.execute(_REMOVE, {"ids": [row.id for row in rows]})


# --- waiting draws ---


def states(conn: Connection, request_id: str) -> dict[str, str]:
    """Return the state of a request's stakes, by account."""
    query = select(_S.volunteer_id, _S.state).where(_S.request_id == request_id)
    return {row.volunteer_id: row.state for row in conn.execute(query)}


def beat(conn: Connection, replica: str, now: float) -> None:
    """Store a beat of the process that can compare the draws."""
    of_replica = update(answer_stakes).where(_S.state == "drawn", _S.replica == replica)
    conn.execute(of_replica.values(beat_at=now))


def abandoned(conn: Connection, before: float, replica: str) -> list[tuple[str, str]]:
    """Return request and account of each draw that waits for another process, without a beat of
    that process since `before`.
    """
    query = select(_S.request_id, _S.volunteer_id).where(
        _S.state == "drawn", _S.beat_at < before, _S.replica != replica
    )
    return [(row.request_id, row.volunteer_id) for row in conn.execute(query)]
