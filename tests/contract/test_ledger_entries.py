"""Entries of the ledger: what each step posts, to the micro-credit, and what it must not touch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, insert, select, update

from coordinator.database import contributions, verdicts
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import (
    debts,
    escrow,
    gifts,
    payments,
    postings,
    reversal,
    spending,
)
from coordinator.database.ledger.payments import Balances, Payment
from coordinator.database.ledger.postings import (
    AMOUNT_MAX,
    BALANCE_MAX,
    KEY_CHARS_MAX,
    MEMO_CHARS_MAX,
    EventDraft,
    Move,
    digest,
    post,
)
from coordinator.database.ledger.reversal import TakenBack
from coordinator.database.recomputes import NO_ID, Proven
from coordinator.database.tables import ledger as tables
from coordinator.database.tables.accounts import volunteers as volunteers_table
from coordinator.database.tables.trust import escrow as escrow_table
from shared.errors import BadRequest, Conflict, Forbidden, NotFound
from tests.support.account_rows import add_contribution, add_run, breaches, earn, pay, poster

MIA, BOB = "volunteer-mia-000001", "volunteer-bob-000001"
MINT = ("system", "mint")
Entry = tuple[str, str, dict[tuple[str, str], int], int | None, int | None, str, float]


async def entries(db: Database) -> list[Entry]:
    """Return key, kind, moves, run, contribution, memo and instant of every event."""

    def read(conn: Connection) -> list[Entry]:
        e, a, p = tables.events.c, tables.accounts.c, tables.postings.c
        found = []
        for row in conn.execute(select(tables.events).order_by(e.id)).all():
            query = select(a.owner, a.kind, p.amount_micro).join(
                tables.postings, p.account_id == a.id
            )
            moves = {(o, k): m for o, k, m in conn.execute(query.where(p.event_id == row.id))}
            found.append(
                (row.key, row.kind, moves, row.run_id, row.contribution_id, row.memo, row.at)
            )
        return found

    return await db.read(read)


async def has(db: Database, who: str = MIA) -> Balances:
    return await db.read(lambda conn: payments.balances(conn, who))


async def refused(
    db: Database, error: type[Exception], match: str, write: Callable[[Connection], object]
) -> None:
    before = await entries(db)
    with pytest.raises(error, match=match):
        await db.write(write)
    assert await entries(db) == before


STEPS: dict[str, tuple[tuple[str, ...], Callable[..., None], dict[tuple[str, str], int], str]] = {
    "pending": ((), poster("pending"), {MINT: -9, (MIA, "pending"): 9}, "pending"),
    "earn": (
        ("pending",),
        poster("earn"),
        {(MIA, "pending"): -9, (MIA, "earned"): 9},
        "earn",
    ),
    "void": (("pending",), poster("void"), {(MIA, "pending"): -9, MINT: 9}, "void"),
    "escrow": (
        ("pending",),
        poster("escrow"),
        {(MIA, "pending"): -9, (MIA, "escrow"): 9},
        "escrow",
    ),
    "vest": (
        ("pending", "escrow"),
        poster("vest"),
        {(MIA, "escrow"): -9, (MIA, "earned"): 9},
        "vest",
    ),
    "forfeit": (
        ("pending", "escrow"),
        poster("forfeit"),
        {(MIA, "escrow"): -9, MINT: 9},
        "forfeit",
    ),
    "withdraw": (
        ("pending",),
        poster("withdraw"),
        {(MIA, "pending"): -9, MINT: 9},
        "forfeit",
    ),
    "reverse": (
        ("pending", "earn"),
        poster("reverse"),
        {(MIA, "earned"): -9, MINT: 9},
        "reverse",
    ),
}


async def test_each_step_posts_its_two_sides_under_its_own_key(database: Database) -> None:
    count = 0
    for number, (step, (before, do, moves, kind)) in enumerate(STEPS.items(), start=4):
        one = [pay(number, 9)]
        for at, earlier in enumerate(before):
            await database.write(partial(STEPS[earlier][1], rows=one, now=float(at)))
        memo = "a reason" if step in ("forfeit", "withdraw", "reverse") else ""
        await database.write(partial(do, rows=one, now=7.5, memo=memo))
        expected = (f"{kind}:{number}", kind, moves, 1, number, memo, 7.5)
        assert (await entries(database))[-1] == expected
        steps = await database.read(partial(payments.steps_of, ids=[number, 99]))
        assert steps == {number: {*before, kind}, 99: set()}
        count += len(before) + 1
        assert await database.read(payments.last_event) == count


async def test_the_steps_of_one_account_stand_in_their_order(database: Database) -> None:
    assert await database.read(payments.last_event) == 0
    await database.write(lambda c: payments.post_step(c, "pending", [pay(4, 9)], 1.0))
    await database.write(lambda c: payments.post_step(c, "earn", [pay(4, 9)], 2.0))
    await database.write(lambda c: payments.post_step(c, "pending", [pay(5, 9)], 3.0))
    await database.write(lambda c: payments.post_step(c, "void", [pay(5, 9)], 4.0))
    found = await entries(database)
    assert [(key, at) for key, *_, at in found] == [
        ("pending:4", 1.0),
        ("earn:4", 2.0),
        ("pending:5", 3.0),
        ("void:5", 4.0),
    ]
    for entry, step in zip(found, ("pending", "earn", "pending", "void"), strict=True):
        assert entry[1:4] == (step, STEPS[step][2], 1)
    assert await has(database) == Balances(earned_micro=9)
    assert await database.read(lambda c: payments.balances(c, BOB)) == Balances()


@pytest.mark.parametrize("amount", [-1, AMOUNT_MAX + 1])
async def test_a_contribution_cannot_earn_less_than_nothing_or_too_much(
    database: Database, amount: int
) -> None:
    wrong = [pay(1, amount)]
    await refused(
        database,
        BadRequest,
        "between 0 and",
        lambda c: payments.post_step(c, "pending", wrong, 1.0),
    )


def draft(**values: Any) -> EventDraft:
    moves = (Move(MIA, "earned", -5), Move(BOB, "earned", 5))
    said: dict[str, Any] = (
        {"key": "k", "kind": "give", "moves": moves, "run_id": 1, "contribution_id": 2}
        | {"memo": "m"}
        | values
    )
    return EventDraft(**said)


def test_the_digest_of_an_event_covers_everything_but_the_order_of_its_moves() -> None:
    one = draft()
    assert digest(one) == digest(draft(moves=one.moves[::-1]))
    others = [
        draft(key="other"),
        draft(kind="other"),
        draft(run_id=None),
        draft(contribution_id=None),
        draft(memo=""),
        draft(moves=(Move(MIA, "held", -5), Move(BOB, "earned", 5))),
        draft(moves=(Move("x", "earned", -5), Move(BOB, "earned", 5))),
        draft(moves=(Move(MIA, "earned", -6), Move(BOB, "earned", 6))),
    ]
    assert len({digest(each) for each in (one, *others)}) == 9
    assert len(digest(one)) == 64


def sides(amount: int) -> tuple[Move, ...]:
    return (Move("system", "mint", -amount), Move(MIA, "earned", amount))


IMPOSSIBLE = [
    (draft(key="", moves=sides(1)), "too long a key"),
    (draft(key="k" * (KEY_CHARS_MAX + 1), moves=sides(1)), "too long a key"),
    (draft(memo="m" * (MEMO_CHARS_MAX + 1), moves=sides(1)), "too long a key or memo"),
    (draft(moves=sides(AMOUNT_MAX + 1)), "moves more than"),
    (draft(moves=(Move(MIA, "earned", 0),)), "two or more"),
    (draft(moves=()), "two or more"),
    (draft(moves=(*sides(1), Move(MIA, "earned", 0))), "two or more"),
    (draft(moves=(Move("system", "mint", -2), Move(MIA, "earned", 1))), "not equal"),
]


async def test_an_impossible_event_is_refused_with_its_reason(database: Database) -> None:
    for event, match in IMPOSSIBLE:
        await refused(database, BadRequest, match, partial(post, drafts=[event], now=1.0))


async def test_the_largest_event_is_posted(database: Database) -> None:
    largest = draft(
        key="k" * KEY_CHARS_MAX, memo="m" * MEMO_CHARS_MAX, moves=sides(AMOUNT_MAX), kind="grant"
    )
    await database.write(lambda conn: post(conn, [largest], 1.0))
    assert (await has(database)).earned_micro == AMOUNT_MAX


async def test_two_events_of_one_name_are_refused_and_one_twice_is_posted_once(
    database: Database,
) -> None:
    one, other = draft(moves=sides(1)), draft(moves=sides(2))
    await refused(database, Conflict, 'called "k"', lambda c: post(c, [one, other], 1.0))
    await database.write(lambda conn: post(conn, [one, one], 1.0))
    await refused(database, Conflict, '"k" was posted before', lambda c: post(c, [other], 2.0))
    await database.write(lambda conn: post(conn, [one, draft(key="a", moves=sides(3))], 3.0))
    assert [(key, at) for key, *_, at in await entries(database)] == [("k", 1.0), ("a", 3.0)]
    assert (await has(database)).earned_micro == 4


async def test_only_new_events_are_shown_before_they_are_posted(database: Database) -> None:
    seen: list[list[str]] = []

    def look(new: Any) -> None:
        seen.append([each.key for each in new])

    events = [draft(key=key, moves=sides(1)) for key in ("c", "a", "b")]
    await database.write(lambda conn: post(conn, events[:1], 1.0, look))
    await database.write(lambda conn: post(conn, events, 1.0, look))
    await database.write(lambda conn: post(conn, events, 1.0, look))
    assert seen == [["c"], ["a", "b"]]


async def test_no_balance_grows_beyond_its_bound_and_only_the_mint_falls_below_zero(
    database: Database,
) -> None:
    postings._MOVED._compiled.clear()  # compiled once a process: here anew
    await database.write(lambda conn: post(conn, [draft(key="a", moves=sides(7))], 1.0))
    a = tables.accounts.c

    def put(kind: str, balance: int) -> Callable[[Connection], object]:
        changed = update(tables.accounts).where(a.kind == kind).values(balance_micro=balance)
        return lambda conn: conn.execute(changed)

    await refused(
        database,
        Forbidden,
        f"the earned account of {MIA} does not hold 8 micro-credits",
        lambda c: post(c, [draft(moves=(Move(MIA, "earned", -8), Move(*MINT, 8)))], 1.0),
    )
    await database.write(put("earned", BALANCE_MAX - 5))
    await refused(
        database, Forbidden, "earned account", lambda c: post(c, [draft(moves=sides(6))], 1.0)
    )
    await database.write(lambda conn: post(conn, [draft(key="b", moves=sides(5))], 1.0))
    await database.write(put("earned", 0))
    await database.write(put("mint", 5 - BALANCE_MAX))
    await refused(database, Forbidden, "mint", lambda c: post(c, [draft(moves=sides(6))], 1.0))
    await database.write(lambda conn: post(conn, [draft(key="c", moves=sides(5))], 1.0))


async def test_more_rows_than_one_statement_takes_are_all_seen(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postings, "BATCH", 2)
    people = [f"volunteer-{n}" for n in range(5)]
    events = [
        draft(key=f"k{n}", moves=(Move(*MINT, -n - 1), Move(who, "earned", n + 1)))
        for n, who in enumerate(people)
    ]
    await database.write(lambda conn: post(conn, events, 1.0))
    names = [(who, "earned") for who in people]
    held = await database.write(lambda conn: postings.lock(conn, [*names, ("new", "held"), MINT]))
    assert held == {name: n + 1 for n, name in enumerate(names)} | {("new", "held"): 0, MINT: -15}
    keys = [each.key for each in events]
    found = await database.read(lambda conn: postings.digests(conn, [*keys, "none"]))
    assert found == {each.key: digest(each) for each in events}


async def test_balances_are_told_by_the_kinds_of_their_accounts() -> None:
    held = {"pending": 1, "earned": 2, "held": 4, "burn": 8, "escrow": 16, "debt": 32, "mint": 64}
    found = payments.balances_of(held.items())
    assert found == Balances(
        pending_micro=1,
        earned_micro=2,
        held_micro=4,
        spent_micro=8,
        escrow_micro=16,
        debt_micro=32,
    )
    assert found.total_micro == 2 + 4 + 8 - 32


async def test_what_was_earned_since_counts_pay_and_reversals_of_one_account(
    database: Database,
) -> None:
    def write(conn: Connection) -> None:
        payments.post_step(conn, "pending", [pay(n, n) for n in range(1, 6)], 0.0)
        payments.post_step(conn, "pending", [pay(9, 900, BOB)], 0.0)
        for number, at in ((1, 100.0), (2, 200.0), (3, 300.0)):
            payments.post_step(conn, "earn", [pay(number, number)], at)
        payments.post_step(conn, "earn", [pay(9, 900, BOB)], 300.0)
        payments.post_step(conn, "escrow", [pay(4, 4)], 300.0)
        payments.post_step(conn, "vest", [pay(4, 4)], 400.0)
        payments.post_step(conn, "reverse", [pay(2, 2)], 500.0)
        gifts.grant(conn, MIA, "g", 1000, "", 500.0)

    await database.write(write)

    async def since(at: float, upto: int | None = None) -> int:
        return await database.read(lambda c: payments.earned_since(c, MIA, at, upto))

    assert [await since(at) for at in (0.0, 200.0, 200.1, 400.0, 400.1)] == [8, 7, 5, 2, -2]
    numbers = {key: n for n, (key, *_) in enumerate(await entries(database), 1)}
    assert await since(0.0, numbers["earn:3"]) == 6
    assert await since(0.0, numbers["earn:3"] - 1) == 3


async def test_a_debt_is_lent_charged_and_repaid_from_what_comes(database: Database) -> None:
    def write(conn: Connection) -> None:
        debts.owe(conn, MIA, "7", 0, "", 1.0)
        debts.charge(conn, MIA, 7, 0, "", 1.0)
        debts.repay(conn, {MIA: "none"}, 1.0)
        debts.owe(conn, MIA, "7", 10, "spent", 2.0)

    await database.write(write)
    lent = {(MIA, "debt"): 10, (MIA, "earned"): 10, MINT: -20}
    assert await entries(database) == [("debt:7", "debt", lent, None, None, "spent", 2.0)]
    await database.write(lambda conn: debts.repay(conn, {MIA: "r", BOB: "b"}, 3.0))
    repaid = {(MIA, "debt"): -10, (MIA, "earned"): -10, MINT: 20}
    assert (await entries(database))[1:] == [("r", "repay", repaid, None, None, "", 3.0)]
    await database.write(lambda conn: earn(conn, pay(1, 4)))
    await database.write(lambda conn: debts.charge(conn, MIA, 8, 9, "not shown", 5.0))
    charged = {(MIA, "debt"): 9, MINT: -9}
    part = {(MIA, "debt"): -4, (MIA, "earned"): -4, MINT: 8}
    assert (await entries(database))[-2:] == [
        ("short:8", "short", charged, None, None, "not shown", 5.0),
        ("repay:short:8", "repay", part, None, None, "", 5.0),
    ]
    assert await has(database) == Balances(debt_micro=5)
    await database.write(lambda conn: debts.repay(conn, {MIA: "empty"}, 6.0))
    assert "empty" not in [key for key, *_ in await entries(database)]
    await database.write(lambda conn: debts.charge(conn, BOB, 9, 1, "", 7.0))
    assert await has(database, BOB) == Balances(debt_micro=1)


async def test_a_grant_comes_from_the_mint_and_settles_a_debt_first(database: Database) -> None:
    await database.write(lambda conn: debts.charge(conn, MIA, 8, 4, "", 1.0))
    await database.write(lambda conn: gifts.grant(conn, MIA, "g", 10, "well done", 2.0))
    granted = {MINT: -10, (MIA, "earned"): 10}
    repaid = {(MIA, "debt"): -4, (MIA, "earned"): -4, MINT: 8}
    assert (await entries(database))[1:] == [
        ("grant:g", "grant", granted, None, None, "well done", 2.0),
        ("repaid:grant:g", "repay", repaid, None, None, "", 2.0),
    ]


@pytest.mark.parametrize("amount", [0, -1, AMOUNT_MAX + 1])
async def test_a_gift_of_nothing_or_of_too_much_is_refused(database: Database, amount: int) -> None:
    await database.write(lambda conn: gifts.grant(conn, MIA, "g", 1, "", 2.0))
    for give in (
        lambda conn: gifts.grant(conn, MIA, "h", amount, "", 2.0),
        lambda conn: gifts.give(conn, (MIA, BOB), "h", amount, 2.0),
    ):
        await refused(database, BadRequest, "above 0", give)


async def test_gifts_under_one_id_from_two_givers_each_settle_the_debt(database: Database) -> None:
    """Givers choose the ids of their gifts: a debtor's friends may choose the same."""

    def write(conn: Connection) -> None:
        debts.charge(conn, BOB, 8, 30, "", 1.0)
        for giver in (MIA, "ann"):
            gifts.grant(conn, giver, giver, 10, "", 1.0)
            gifts.give(conn, (giver, BOB), "x", 10, 2.0)

    await database.write(write)
    assert await has(database, BOB) == Balances(debt_micro=10)


async def test_a_gift_is_moved_once_and_settles_the_debt_of_its_taker(database: Database) -> None:
    def write(conn: Connection) -> list[bool]:
        gifts.grant(conn, MIA, "g", AMOUNT_MAX, "", 1.0)
        debts.charge(conn, BOB, 8, 3, "", 1.0)
        return [gifts.give(conn, (MIA, BOB), "x", 10, at) for at in (2.0, 3.0)]

    assert await database.write(write) == [True, False]
    moved = {(MIA, "earned"): -10, (BOB, "earned"): 10}
    repaid = {(BOB, "debt"): -3, (BOB, "earned"): -3, MINT: 6}
    said = f"from {MIA} to {BOB}"
    assert (await entries(database))[2:] == [
        (f"give:{MIA}:x", "give", moved, None, None, said, 2.0),
        (f"repaid:give:{MIA}:x", "repay", repaid, None, None, "", 2.0),
    ]
    await refused(
        database, Conflict, "posted before", lambda c: gifts.give(c, (MIA, BOB), "x", 11, 4.0)
    )
    await refused(
        database, Forbidden, "does not hold", lambda c: gifts.give(c, (BOB, MIA), "y", 8, 4.0)
    )
    await database.write(lambda conn: gifts.give(conn, (MIA, BOB), "y", 5, 4.0))
    await database.write(lambda conn: gifts.give(conn, (BOB, MIA), "z", 2, 4.0))

    async def given(who: str, at: float) -> tuple[int, int]:
        return await database.read(lambda conn: gifts.given_since(conn, who, at))

    assert [await given(MIA, at) for at in (2.0, 2.1, 4.0, 4.1)] == [
        (15, 2),
        (5, 1),
        (5, 1),
        (0, 0),
    ]
    assert await given(BOB, 0.0) == (2, 1)


@pytest.mark.parametrize("amount", [0, -1, AMOUNT_MAX + 1])
async def test_a_hold_of_nothing_or_of_too_much_is_refused(database: Database, amount: int) -> None:
    await refused(
        database,
        BadRequest,
        "between 1 and",
        lambda conn: spending.hold(conn, MIA, "h", amount, "", 1.0),
    )


async def test_a_hold_ends_once_and_what_it_did_not_cost_comes_back(database: Database) -> None:
    def write(conn: Connection) -> None:
        earn(conn, pay(1, 100), pay(2, 100, BOB))
        for name, amount in (("a", 30), ("b", 20), ("c", 50)):
            spending.hold(conn, MIA, name, amount, "an answer", 3.0)
        spending.hold(conn, MIA, "a", 30, "an answer", 4.0)  # the same again, with nothing left
        spending.settle(conn, MIA, "a", 12, 5.0)
        spending.settle(conn, MIA, "b", 20, 6.0)
        spending.release(conn, MIA, "c", 7.0)

    await database.write(write)
    mine = [(MIA, kind) for kind in ("earned", "held", "burn")]
    earned, held, burn = mine
    assert (await entries(database))[4:] == [
        ("hold:a", "hold", {earned: -30, held: 30}, None, None, "an answer", 3.0),
        ("hold:b", "hold", {earned: -20, held: 20}, None, None, "an answer", 3.0),
        ("hold:c", "hold", {earned: -50, held: 50}, None, None, "an answer", 3.0),
        ("settle:a", "settle", {held: -30, burn: 12, earned: 18}, None, None, "", 5.0),
        ("settle:b", "settle", {held: -20, burn: 20}, None, None, "", 6.0),
        ("release:c", "release", {held: -50, earned: 50}, None, None, "", 7.0),
    ]
    assert await has(database) == Balances(earned_micro=68, spent_micro=32)
    for error, match, write_ in (
        (Forbidden, "costs 6.9e-05 credits, and there are 6.8e-05", _hold("d", 69)),
        (Conflict, "posted before", _hold("a", 31)),
        (BadRequest, "hold a is 30 .* cannot pay 31", _settle("a", 31)),
        (BadRequest, "cannot pay -1", _settle("a", -1)),
        (Conflict, "posted before", _settle("a", 13)),
        (Conflict, '"release:a" comes too late: "settle:a"', _release("a")),
        (Conflict, '"settle:c" comes too late: "release:c"', _settle("c", 1)),
        (NotFound, 'no hold "x"', _settle("x", 1)),
        (NotFound, 'no hold "a" of yours', lambda c: spending.release(c, BOB, "a", 8.0)),
    ):
        await refused(database, error, match, write_)
    assert await breaches(database) == []


def _hold(name: str, amount: int) -> Callable[[Connection], None]:
    return lambda conn: spending.hold(conn, MIA, name, amount, "an answer", 8.0)


def _settle(name: str, cost: int) -> Callable[[Connection], None]:
    return lambda conn: spending.settle(conn, MIA, name, cost, 8.0)


def _release(name: str) -> Callable[[Connection], None]:
    return lambda conn: spending.release(conn, MIA, name, 8.0)


async def test_credit_that_comes_back_from_a_hold_settles_a_debt(database: Database) -> None:
    def write(conn: Connection) -> None:
        earn(conn, pay(1, 30))
        spending.hold(conn, MIA, "a", 30, "", 3.0)
        debts.charge(conn, MIA, 8, 7, "", 4.0)
        spending.settle(conn, MIA, "a", 10, 5.0)

    await database.write(write)
    repaid = {(MIA, "debt"): -7, (MIA, "earned"): -7, MINT: 14}
    assert (await entries(database))[-1] == ("repaid:a", "repay", repaid, None, None, "", 5.0)
    assert await has(database) == Balances(earned_micro=13, spent_micro=10)


async def test_a_reversal_takes_each_credit_from_where_it_is(database: Database) -> None:
    rows: list[Payment] = []

    def write(conn: Connection) -> TakenBack:
        run, who = add_run(conn), person(conn, MIA)
        for n in range(1, 8):
            number = add_contribution(conn, run, who, "merged", 10 * n, weight=1.0, version=1)
            rows.append(Payment.of(contributions.by_id(conn, number)))
        payments.post_step(conn, "pending", rows, 1.0)
        payments.post_step(conn, "earn", rows[:2], 2.0)
        for row in rows[2:4]:
            payments.post_step(conn, "escrow", [row], 2.0)
            line = msgspec.structs.asdict(row)
            conn.execute(insert(escrow_table).values(**line))
        payments.post_step(conn, "vest", rows[3:4], 3.0)
        conn.execute(
            escrow_table.delete().where(escrow_table.c.contribution_id == rows[3].contribution_id)
        )
        payments.post_step(conn, "void", rows[5:6], 3.0)
        spending.hold(conn, MIA, "h", 65, "", 3.0)
        return reversal.take_back(conn, rows[:6], "copies", 4.0)

    taken = await database.write(write)
    # Earned 10, 20 and 40, of which 65 are held: 65 are missing. 30 at stake, 50 pending.
    assert taken == TakenBack(
        contributions=5, pending_micro=50, escrow_micro=30, earned_micro=70, debt_micro=65
    )
    new = [entry for entry in await entries(database) if entry[-1] == 4.0]
    n1, n2, n3, n4, n5 = (row.contribution_id for row in rows[:5])
    wanted: tuple[str, ...] = (f"forfeit:{n5}", f"forfeit:{n3}", f"debt:{n4}")
    wanted += (f"reverse:{n1}", f"reverse:{n2}", f"reverse:{n4}")
    assert {key: memo for key, *_, memo, _ in new} == dict.fromkeys(wanted, "copies")
    assert await has(database) == Balances(pending_micro=70, held_micro=65, debt_micro=65)
    assert await database.read(lambda conn: escrow.waiting(conn, MIA)) == []
    again = await database.write(lambda conn: reversal.take_back(conn, rows[:6], "again", 5.0))
    assert again == TakenBack()
    assert await database.write(lambda conn: reversal.take_back(conn, [], "", 6.0)) == TakenBack()
    assert all(at < 5.0 for *_, at in await entries(database))


def test_what_was_taken_back_adds_up_by_kind() -> None:
    one = TakenBack(contributions=1, pending_micro=2, escrow_micro=3, earned_micro=4, debt_micro=5)
    assert one + one == TakenBack(
        contributions=2, pending_micro=4, escrow_micro=6, earned_micro=8, debt_micro=10
    )


def person(conn: Connection, name: str, **values: Any) -> str:
    row = {
        "id": name,
        "nickname": name,
        "nickname_key": name,
        "state": "active",
        "public": True,
        "created_at": 0.0,
        "standing": "probation",
        "invited": False,
    }
    conn.execute(insert(volunteers_table).values(**row | values))
    return name


@pytest.mark.parametrize(
    ("account", "weight", "kind", "why"),
    [
        ({"invited": True}, 1.0, "earn", ""),
        ({}, 1.0, "escrow", ""),
        ({}, None, "escrow", ""),
        ({}, 0.0, "void", escrow.WEIGHTLESS),
        ({"invited": True}, 0.0, "void", escrow.WEIGHTLESS),
        ({"standing": "suspended", "invited": True}, 1.0, "void", escrow.SUSPENDED),
    ],
)
async def test_the_account_and_the_weight_say_where_the_pay_of_finished_work_goes(
    database: Database, account: dict[str, Any], weight: float | None, kind: str, why: str
) -> None:
    def write(conn: Connection) -> tuple[int, int]:
        run, who = add_run(conn), person(conn, MIA, **account)
        number = add_contribution(conn, run, who, "merged", 10, weight=weight, version=1)
        row = contributions.by_id(conn, number)
        payments.post_step(conn, "pending", [Payment.of(row)], 1.0)
        verdicts.record(conn, [(row, {"state": "merged", "message": "merged"})], 1.0)
        for _ in range(2):
            escrow.pay(conn, [row], 2.0)
        return run, number

    run, number = await database.write(write)
    posted = [(key, at) for key, *_, at in await entries(database)]
    assert posted == [(f"pending:{number}", 1.0), (f"{kind}:{number}", 2.0)]
    stake = [Payment(volunteer_id=MIA, contribution_id=number, run_id=run, amount_micro=10)]
    held = await database.read(lambda conn: escrow.waiting(conn, MIA))
    assert held == (stake if kind == "escrow" else [])
    verdict = await database.read(lambda conn: verdicts.latest_verdict(conn, number))
    assert verdict is not None
    assert ("not paid" in verdict.message, why in verdict.message) == (bool(why), True)


async def test_stakes_are_freed_from_the_oldest_on_as_far_as_the_bond_stays(
    database: Database,
) -> None:
    def write(conn: Connection) -> list[int]:
        run = add_run(conn)
        numbers = []
        for who in (MIA, BOB):
            person(conn, who)
        for who, price in ((MIA, 10), (BOB, 99), (MIA, 20), (MIA, 30), (MIA, 40)):
            number = add_contribution(conn, run, who, "merged", price, weight=1.0, version=1)
            row = contributions.by_id(conn, number)
            payments.post_step(conn, "pending", [Payment.of(row)], 1.0)
            escrow.hold(conn, [row], 2.0)
            numbers.append(number)
        return numbers

    a, _, b, c, d = await database.write(write)

    async def at_stake(last: int = NO_ID, after: int = 0) -> int:
        return await database.read(lambda conn: escrow.at_stake(conn, MIA, last, after))

    async def free(last: int, before: int, bond: int, after: int = 0) -> None:
        proven = Proven(after=after, last=last, before=before)
        await database.write(lambda conn: escrow.free(conn, MIA, proven, bond, 3.0))

    assert [await at_stake(last) for last in (NO_ID, d, c, b, a, 0)] == [100, 100, 60, 30, 10, 0]
    assert [await at_stake(c, after) for after in (0, a, c)] == [60, 50, 0]
    await free(d, d + 1, 71, after=a)  # what a draw left at stake is no bond, and stays
    assert await at_stake() == 100
    await free(c, d + 1, 71)
    assert await at_stake() == 90  # 10 are freed, 20 more would leave less than the bond
    await free(b, d + 1, 0)
    await free(c, c, 0)
    # What lies behind the oldest open draw is no bond for anything.
    assert [row.contribution_id for row in await stakes(database)] == [c, d]
    await free(d, d + 1, 30)
    assert [row.contribution_id for row in await stakes(database)] == [d]
    assert await has(database) == Balances(escrow_micro=40, earned_micro=60)
    assert await has(database, BOB) == Balances(escrow_micro=99)
    [row] = await stakes(database)
    await database.write(lambda conn: escrow.forfeit(conn, [row], 6.0, "it failed"))
    assert (await entries(database))[-1][4:] == (d, "it failed", 6.0)
    assert await stakes(database) == []
    assert await database.write(lambda conn: escrow.free_all(conn, BOB, 7.0)) == 1
    assert await has(database, BOB) == Balances(earned_micro=99)
    assert await database.write(lambda conn: escrow.free_all(conn, BOB, 8.0)) == 0
    assert await breaches(database) == []


async def stakes(db: Database) -> list[Payment]:
    return await db.read(lambda conn: escrow.waiting(conn, MIA))


async def test_freed_pay_settles_a_debt_under_the_name_of_its_contribution(
    database: Database,
) -> None:
    def write(conn: Connection) -> int:
        run, who = add_run(conn), person(conn, MIA)
        number = add_contribution(conn, run, who, "merged", 10, weight=1.0, version=1)
        row = contributions.by_id(conn, number)
        payments.post_step(conn, "pending", [Payment.of(row)], 1.0)
        escrow.hold(conn, [row], 2.0)
        debts.charge(conn, MIA, 99, 4, "", 2.0)
        escrow.free_all(conn, MIA, 3.0)
        return number

    number = await database.write(write)
    repaid = {(MIA, "debt"): -4, (MIA, "earned"): -4, MINT: 8}
    last = (await entries(database))[-1]
    assert last == (f"repay:{number}", "repay", repaid, None, None, "", 3.0)


async def test_a_suspended_account_is_paid_nothing_at_this_moment(database: Database) -> None:
    def write(conn: Connection) -> Any:
        run, who = add_run(conn), person(conn, MIA, standing="suspended")
        number = add_contribution(conn, run, who, "merged", 10, weight=1.0, version=1)
        row = contributions.by_id(conn, number)
        payments.post_step(conn, "pending", [Payment.of(row)], 1.0)
        return row

    row = await database.write(write)
    await refused(database, Conflict, "suspended while", lambda c: escrow.hold(c, [row], 2.0))
