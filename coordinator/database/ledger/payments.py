"""Ledger of contributions: their pay, step by step, and the balances of a volunteer.

    pending   mint    -> pending   a contribution was accepted
    earn      pending -> earned    it was merged (or needed no merge)
    void      pending -> mint      it was accepted, then set aside
    escrow    pending -> escrow    like earn, for an uninvited account
    vest      escrow  -> earned    a later draw of its account passed
    forfeit   escrow  -> mint      taken back before it was earned
    withdraw  pending -> mint      taken back before it was paid; its event is a "forfeit"
    reverse   earned  -> mint      taken back on purpose

Other files post the other events: spending.py spending, debts.py reversed credit that was already
spent.

All amounts are integer micro-credits. Each account but the mint belongs to a volunteer, and is
named by the volunteer's id, which identifies no person. `post_step` joins its caller's transaction
and may be repeated with the same arguments. It raises Conflict if the step was posted with other
arguments before, or does not follow from the earlier steps. Call it late in a transaction: every
acceptance needs the one row of the mint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from sqlalchemy import ColumnElement, Connection, Double, String, bindparam, case, func, select

from coordinator.database import record
from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.statements import equals, one_of
from coordinator.database.ledger.postings import (
    AMOUNT_MAX,
    BALANCE_MAX,
    MINT,
    SYSTEM,
    EventDraft,
    Move,
    digest,
    digests,
    post,
)
from coordinator.database.tables.ledger import accounts, events, postings
from coordinator.database.tables.runs import runs
from shared.errors import BadRequest, Conflict
from shared.protocol.listings import LedgerRow

Step = Literal["pending", "earn", "void", "escrow", "vest", "forfeit", "withdraw", "reverse"]
SKEW_S = 60.0  # seconds by which an event's time may be before that of an event with a lower number
# For each step: the steps of which one must precede it, and the steps that exclude it.
ORDER: Mapping[Step, tuple[tuple[Step, ...], tuple[Step, ...]]] = {
    "pending": ((), ()),
    "earn": (("pending",), ("void", "escrow", "forfeit")),
    "void": (("pending",), ("earn", "escrow", "forfeit")),
    "escrow": (("pending",), ("earn", "void", "forfeit")),
    "vest": (("escrow",), ("forfeit",)),
    "forfeit": (("escrow",), ("vest",)),
    "withdraw": (("pending",), ("earn", "void", "escrow")),
    "reverse": (("earn", "vest"), ()),
}
KINDS = {"withdraw": "forfeit"}  # kinds of events whose step has another name
# Words that a volunteer reads for each kind of event.
WORDS: Mapping[str, str] = {
    "pending": "pending",
    "earn": "earned",
    "void": "void",
    "escrow": "at stake",
    "vest": "earned",
    "forfeit": "forfeited",
    "reverse": "reversed",
    "debt": "owed",
    "short": "not proved",
    "offset": "charge returned",
    "repay": "repaid",
    "hold": "held",
    "settle": "spent",
    "release": "released",
    "grant": "granted",
    "give": "given",
    "answer": "in escrow",
    "answered": "earned",
    "unanswer": "forfeited",
    "refund": "refunded",
}


# Kinds of events that sum up to the earnings.
EARNING = ("earn", "vest", "answered", "reverse")
# Kinds whose amount in a listing is their effect on the account "earned".
BY_EARNED = ("earn", "vest", "answered", "refund", "debt", "short", "repay", "hold", "release")


class Payment(msgspec.Struct, frozen=True, kw_only=True):
    """Pay of one contribution to one volunteer. `amount_micro` is the task's price, never a
    report's.
    """

    volunteer_id: str
    contribution_id: int
    run_id: int
    amount_micro: int

    @classmethod
    def of(cls, row: ContributionRow) -> Payment:
        """Return the pay of a stored contribution."""
        return cls(
            volunteer_id=row.volunteer_id,
            contribution_id=row.id,
            run_id=row.run_id,
            amount_micro=row.price_micro,
        )


class Balances(msgspec.Struct, frozen=True, kw_only=True):
    """Balances of a volunteer. `earned_micro` may be spent now."""

    pending_micro: int = 0
    earned_micro: int = 0
    held_micro: int = 0
    spent_micro: int = 0
    escrow_micro: int = 0  # pay at stake until later work is drawn and agrees
    # credits taken back after they were spent, or paid for work that a draw showed to be missing;
    # later pay repays them first
    debt_micro: int = 0

    @property
    def total_micro(self) -> int:
        """Return the credits that may be spent, are held or were spent, less the debt."""
        return self.earned_micro + self.held_micro + self.spent_micro - self.debt_micro


def _draft(step: Step, pay: Payment, memo: str = "") -> EventDraft:
    if not 0 <= pay.amount_micro <= AMOUNT_MAX:
        raise BadRequest(f"a contribution earns between 0 and {AMOUNT_MAX} micro-credits")
    sides = {
        "pending": ((SYSTEM, MINT), (pay.volunteer_id, "pending")),
        "earn": ((pay.volunteer_id, "pending"), (pay.volunteer_id, "earned")),
        "void": ((pay.volunteer_id, "pending"), (SYSTEM, MINT)),
        "escrow": ((pay.volunteer_id, "pending"), (pay.volunteer_id, "escrow")),
        "vest": ((pay.volunteer_id, "escrow"), (pay.volunteer_id, "earned")),
        "forfeit": ((pay.volunteer_id, "escrow"), (SYSTEM, MINT)),
        "withdraw": ((pay.volunteer_id, "pending"), (SYSTEM, MINT)),
        "reverse": ((pay.volunteer_id, "earned"), (SYSTEM, MINT)),
    }
    source, target = sides[step]
    kind = KINDS.get(step, step)
    return EventDraft(
        key=f"{kind}:{pay.contribution_id}",
        kind=kind,
        moves=(Move(*source, -pay.amount_micro), Move(*target, pay.amount_micro)),
        run_id=pay.run_id,
        contribution_id=pay.contribution_id,
        memo=memo,
    )


def post_step(
    conn: Connection, step: Step, rows: Sequence[Payment], now: float, memo: str = ""
) -> None:
    """Post one step of the pay of each contribution. Raises Conflict unless its earlier steps allow
    it, Forbidden for a reversal of spent credits before their debt is posted.
    """
    pays = {pay.contribution_id: pay for pay in rows}
    needed, excluded = ORDER[step]

    def allowed(new: Sequence[EventDraft]) -> None:
        ids = [draft.contribution_id for draft in new if draft.contribution_id is not None]
        posted = digests(conn, [f"{other}:{i}" for i in ids for other in (*needed, *excluded)])
        for i in ids:
            if not any(posted.get(f"{s}:{i}") == digest(_draft(s, pays[i])) for s in needed):
                raise Conflict(
                    f'contribution {i} has no event "{needed[0]}" of this amount and volunteer'
                )
            if earlier := [other for other in excluded if f"{other}:{i}" in posted]:
                raise Conflict(f'contribution {i} has had its event "{earlier[0]}" already')

    post(conn, [_draft(step, pay, memo) for pay in rows], now, allowed if needed else None)


def steps_of(conn: Connection, ids: Sequence[int]) -> dict[int, set[str]]:
    """Return the kinds of the events of each contribution."""
    steps: dict[int, set[str]] = {number: set() for number in ids}
    kinds = {KINDS.get(step, step) for step in ORDER}
    for key in digests(conn, [f"{kind}:{number}" for number in ids for kind in kinds]):
        kind, _, number = key.partition(":")
        steps[int(number)].add(kind)
    return steps


# --- reading ---


_BALANCES = select(accounts.c.kind, accounts.c.balance_micro).where(equals(accounts.c.owner))


def earnings(
    owner: ColumnElement[str], since: ColumnElement[float]
) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions that select the postings of an owner's earnings since an instant."""
    return (
        events.c.id == postings.c.event_id,
        accounts.c.id == postings.c.account_id,
        accounts.c.owner == owner,
        accounts.c.kind == "earned",
        one_of(events.c.kind, EARNING),
        events.c.at >= since,
    )


_EARNED_SINCE = select(func.coalesce(func.sum(postings.c.amount_micro), 0)).where(
    *earnings(bindparam("owner", type_=String()), bindparam("since", type_=Double())),
    postings.c.event_id > bindparam("after"),
)
_BEFORE = (
    select(events.c.id)
    .where(events.c.at < bindparam("since"))
    .order_by(events.c.at.desc())
    .limit(1)
)


def balances(conn: Connection, volunteer_id: str) -> Balances:
    """Return the balances of a volunteer; all zero for an unknown volunteer."""
    rows = conn.execute(_BALANCES, {"where_owner": volunteer_id})
    return balances_of((row.kind, row.balance_micro) for row in rows)


def balances_of(pairs: Iterable[tuple[str, int]]) -> Balances:
    """Return a volunteer's balances from pairs of account kind and micro-credits."""
    have = {kind: int(balance) for kind, balance in pairs}
    return Balances(
        pending_micro=have.get("pending", 0),
        earned_micro=have.get("earned", 0),
        held_micro=have.get("held", 0),
        spent_micro=have.get("burn", 0),
        escrow_micro=have.get("escrow", 0),
        debt_micro=have.get("debt", 0),
    )


def last_event(conn: Connection) -> int:
    """Return the number of the newest event; 0 before the first event."""
    return int(conn.execute(select(func.max(events.c.id))).scalar() or 0)


def earned_since(conn: Connection, volunteer_id: str, at: float, upto: int | None = None) -> int:
    """Return the micro-credits earned from `at` on, less reversals, up to the event `upto`."""
    after = conn.execute(_BEFORE, {"since": at - SKEW_S}).scalar() or 0  # skips old history
    query = _EARNED_SINCE if upto is None else _EARNED_SINCE.where(postings.c.event_id <= upto)
    values = {"owner": volunteer_id, "since": at, "after": after}
    return int(conn.execute(query, values).scalar_one())


def _newest(conn: Connection, owner: str, before: int | None, limit: int) -> list[int]:
    """Return the numbers of an owner's newest events, newest first. The events of each account are
    read in order from an index.
    """
    numbers: set[int] = set()
    number = postings.c.event_id
    for account in conn.execute(select(accounts.c.id).where(accounts.c.owner == owner)).scalars():
        query = select(number).where(postings.c.account_id == account)
        if before is not None:
            # clients may send any number
            query = query.where(number < max(0, min(before, BALANCE_MAX)))
        numbers |= set(conn.execute(query.order_by(number.desc()).limit(limit)).scalars())
    return sorted(numbers, reverse=True)[:limit]


def history(conn: Connection, volunteer_id: str, before: int | None, limit: int) -> list[LedgerRow]:
    """Return a volunteer's ledger lines, newest first, older than the line `before`."""
    # One side of each kind is summed: the two sides of a step between a volunteer's own accounts
    # cancel out.
    kind, side = events.c.kind, accounts.c.kind
    amount = func.sum(
        case(
            (kind.in_(BY_EARNED) & (side != "earned"), 0),
            ((kind == "escrow") & (side != "escrow"), 0),
            ((kind == "settle") & (side == "burn"), -postings.c.amount_micro),
            (kind == "settle", 0),
            else_=postings.c.amount_micro,
        )
    )
    newest = _newest(conn, volunteer_id, before, limit)
    query = (
        select(*(events.c[n] for n in ("id", "at", "kind", "contribution_id", "memo")))
        .add_columns(runs.c.name.label("run"), amount.label("amount_micro"))
        .select_from(postings)
        .join(events, events.c.id == postings.c.event_id)
        .join(accounts, accounts.c.id == postings.c.account_id)
        .join(runs, runs.c.id == events.c.run_id, isouter=True)
        .where(accounts.c.owner == volunteer_id, postings.c.event_id.in_(newest))
        .group_by(events.c.id, runs.c.name)
        .order_by(events.c.id.desc())
    )
    rows = conn.execute(query).all()
    return [
        LedgerRow(
            id=row.id,
            at=row.at,
            run=row.run or "",
            kind=WORDS.get(row.kind, row.kind),
            amount_micro=int(row.amount_micro),
            contribution=row.contribution_id,
            memo=memo,
        )
        for row, memo in zip(
            rows, record.with_reasons(conn, [row.memo for row in rows]), strict=True
        )
    ]
