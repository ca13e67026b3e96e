"""Check of the ledger from its rows alone: values stored twice must agree, and no forbidden state
may exist.

Each statement sees committed rows of one moment, so the check may run while the coordinator works.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain as concat
from itertools import islice

from sqlalchemy import Connection, Row, case, exists, func, literal, or_, select, true

from coordinator.database.ledger.postings import MINT, SYSTEM, EventDraft, Move, digest
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.inference import answer_stakes
from coordinator.database.tables.ledger import accounts, events, postings
from coordinator.database.tables.trust import escrow

BREACHES_MAX = 100
READ_BATCH = 2000
# Events of a contribution.
STEPS = ("pending", "earn", "void", "escrow", "vest", "forfeit", "reverse")
AFTER_PENDING = ("earn", "void", "escrow", "forfeit")  # kinds that may follow "pending"
SEALED = (events.c.key, events.c.digest, events.c.at)  # the digest covers the other columns


def check_ledger(conn: Connection) -> list[str]:
    """Return one sentence for each breach, at most 100."""
    parts = (
        _events(conn),
        _balances(conn),
        _steps(conn),
        _unpaid(conn),
        _holds(conn),
        _escrow(conn),
        _answers(conn),
        _debts(conn),
    )
    return list(islice(concat(*parts), BREACHES_MAX))


def _events(conn: Connection) -> Iterator[str]:
    """Check that every event sums to zero and matches its digest."""
    last = 0
    while True:
        query = select(events).where(events.c.id > last).order_by(events.c.id)
        rows = conn.execute(query.limit(READ_BATCH)).all()
        if not rows:
            return
        moves = _moves(conn, last, rows[-1].id)
        last = rows[-1].id
        for row in rows:
            yield from _event(row, moves[row.id])


def _event(row: Row[object], moves: list[Move]) -> Iterator[str]:
    if (total := sum(move.amount_micro for move in moves)) != 0:
        yield f"event {row.id} ({row.key}): its postings sum to {total} instead of 0"
    draft = EventDraft(
        key=row.key,
        kind=row.kind,
        run_id=row.run_id,
        contribution_id=row.contribution_id,
        memo=row.memo,
        moves=tuple(moves),
    )
    if digest(draft) != row.digest:
        yield f"event {row.id} ({row.key}): its content is not what was posted"


def _moves(conn: Connection, after: int, upto: int) -> defaultdict[int, list[Move]]:
    query = (
        select(postings.c.event_id, accounts.c.owner, accounts.c.kind, postings.c.amount_micro)
        .join(accounts, accounts.c.id == postings.c.account_id)
        .where(postings.c.event_id > after, postings.c.event_id <= upto)
    )
    moves_by_event: defaultdict[int, list[Move]] = defaultdict(list)
    for event_id, owner, kind, amount in conn.execute(query):
        moves_by_event[event_id].append(Move(owner, kind, amount))
    return moves_by_event


def _balances(conn: Connection) -> Iterator[str]:
    """Check that balances are sums of postings, that only the mint's balance is negative, and that
    all sum to 0.
    """
    total = func.coalesce(func.sum(postings.c.amount_micro), 0)
    query = (
        select(accounts.c.owner, accounts.c.kind, accounts.c.balance_micro, total.label("posted"))
        .join(postings, postings.c.account_id == accounts.c.id, isouter=True)
        .group_by(accounts.c.id)
        .order_by(accounts.c.id)
    )
    sum_of_all = 0
    for owner, kind, balance, posted in conn.execute(query):
        sum_of_all += int(posted)
        if balance != int(posted):
            yield f"account {owner}/{kind} says {balance}, its postings sum to {int(posted)}"
        if balance < 0 and (owner, kind) != (SYSTEM, MINT):
            yield f"account {owner}/{kind} is below zero: {balance}"
    if sum_of_all != 0:
        yield f"all accounts together hold {sum_of_all} instead of 0"


def _steps(conn: Connection) -> Iterator[str]:
    """Check that the events of each contribution follow from each other, and from its state."""
    one = (  # the amount of an event is its positive side
        select(
            events.c.contribution_id,
            events.c.kind,
            func.max(postings.c.amount_micro).label("amount"),
        )
        .join(postings, postings.c.event_id == events.c.id)
        .where(events.c.contribution_id.is_not(None))
        .group_by(events.c.id)
        .subquery()
    )
    n = {kind: func.sum(case((one.c.kind == kind, 1), else_=0)) for kind in STEPS}
    least, most, state = func.min(one.c.amount), func.max(one.c.amount), contributions.c.state
    # an uninvited account's contribution that no draw can prove is voided at once
    is_withheld = ~func.coalesce(volunteers.c.invited, true())
    bad = {
        "its steps cannot follow from each other": or_(
            n["pending"] != 1,
            n["earn"] + n["void"] + n["escrow"] > 1,
            n["earn"] + n["void"] + n["forfeit"] > 1,
            n["vest"] > n["escrow"],
            n["vest"] + n["forfeit"] > 1,
            n["reverse"] > n["earn"] + n["vest"],
            func.count() != sum(n.values(), literal(0)),
        ),
        "its steps are of different amounts": least != most,
        "another price was posted than it has": contributions.c.price_micro != most,
        "its credit was not paid": state.in_(("merged", "superseded"))
        & (sum((n[kind] for kind in AFTER_PENDING), literal(0)) == 0),
        "its credit was taken back": (state == "accepted") & (n["void"] > 0) & ~is_withheld,
        "its credit was kept": (state == "rejected")
        & (n["void"] + n["forfeit"] + n["reverse"] == 0),
        "its credit was posted too early": state.in_(("received", "checking")),
    }
    query = (
        select(one.c.contribution_id, state, *(case((test, 1), else_=0) for test in bad.values()))
        .join(contributions, contributions.c.id == one.c.contribution_id, isouter=True)
        .join(volunteers, volunteers.c.id == contributions.c.volunteer_id, isouter=True)
        .group_by(one.c.contribution_id, contributions.c.id, volunteers.c.id)
        .having(or_(*bad.values()))
        .order_by(one.c.contribution_id)
        .limit(BREACHES_MAX)
    )
    for number, state_now, *breaches in conn.execute(query):
        for sentence, broken in zip(bad, breaches, strict=True):
            if broken:
                yield f"contribution {number} ({state_now or 'not stored'}): {sentence}"


def _unpaid(conn: Connection) -> Iterator[str]:
    """Check that every accepted contribution with a price has its event "pending"."""
    posted = exists().where(
        events.c.contribution_id == contributions.c.id, events.c.kind == "pending"
    )
    query = select(contributions.c.id, contributions.c.state).where(
        contributions.c.state.in_(("accepted", "merged", "superseded")),
        contributions.c.price_micro > 0,
        ~posted,
    )
    for number, state in conn.execute(query.limit(BREACHES_MAX)):
        yield f"contribution {number} is {state}, but no credit was posted for it"


def _holds(conn: Connection) -> Iterator[str]:
    """Check that a hold ends at most once, and that only holds end."""
    # the hold's name begins behind "settle:" or "release:", counted from 1
    start = case((events.c.kind == "settle", 8), else_=9)
    name = func.substr(events.c.key, start)
    beginnings = events.alias("begun")
    query = (
        select(name.label("hold"), func.count(), func.count(beginnings.c.id))
        .join(beginnings, beginnings.c.key == "hold:" + name, isouter=True)
        .where(events.c.kind.in_(("settle", "release")))
        .group_by(name)
        .having(or_(func.count() > 1, func.count(beginnings.c.id) == 0))
    )
    for hold, ends, begins in conn.execute(query.limit(BREACHES_MAX)):
        why = "was never made" if not begins else f"ended {ends} times"
        yield f'hold "{hold}" {why}'


def _escrow(conn: Connection) -> Iterator[str]:
    """Check that the rows of `escrow` and `answer_stakes` sum to the escrow accounts' balances."""
    waiting: defaultdict[str, int] = defaultdict(int)
    for table in (escrow, answer_stakes):
        holder = table.c.volunteer_id
        rows = select(holder, func.sum(table.c.amount_micro)).group_by(holder)
        for name, total in conn.execute(rows):
            waiting[name] += int(total)
    stakes = select(accounts.c.owner, accounts.c.balance_micro).where(accounts.c.kind == "escrow")
    balances = {owner: int(balance) for owner, balance in conn.execute(stakes)}
    for owner in sorted(waiting.keys() | balances.keys()):
        if waiting.get(owner, 0) != balances.get(owner, 0):
            yield (
                f"account {owner}/escrow says {balances.get(owner, 0)}, "
                f"{waiting.get(owner, 0)} are at stake"
            )


def _answers(conn: Connection) -> Iterator[str]:
    """Check that the pay of each answer is at stake, earned, or refunded: exactly one of these."""
    name, stake = func.substr(events.c.key, len("answer:") + 1), answer_stakes.c
    waits = name.in_(select(stake.request_id + ":" + stake.volunteer_id))
    freed, revoked, refunded = (
        exists().where(after.c.key == literal(f"{kind}:") + name)
        for kind in ("answered", "unanswer", "refund")
        for after in (events.alias(kind),)
    )
    ends = sum((case((wait, 1), else_=0) for wait in (waits, freed, revoked)), literal(0))
    query = select(events.c.key).where(
        events.c.kind == "answer", or_(ends != 1, revoked != refunded)
    )
    for key in conn.execute(query.order_by(events.c.id).limit(BREACHES_MAX)).scalars():
        yield f'the pay of "{key}" is not once at stake, earned, or taken and paid back'


def _debts(conn: Connection) -> Iterator[str]:
    """Check that an account with a debt has nothing to spend."""
    owed, has = accounts.alias("owed"), accounts.alias("has")
    query = (
        select(owed.c.owner, owed.c.balance_micro, has.c.balance_micro)
        .join(has, has.c.owner == owed.c.owner)
        .where(owed.c.kind == "debt", owed.c.balance_micro > 0)
        .where(has.c.kind == "earned", has.c.balance_micro > 0)
        .order_by(owed.c.owner)
    )
    for owner, debt, earned in conn.execute(query.limit(BREACHES_MAX)):
        yield f"account {owner} owes {debt} and has {earned} to spend"
