"""The ledger on both databases: nothing paid twice, nothing lost, nothing altered without being
noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from sqlalchemy import Connection, event, func, select

from coordinator.accounts import ledger as ledger_module
from coordinator.accounts.ledger import Ledger
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import payments, spending
from coordinator.database.ledger.payments import Payment
from coordinator.database.ledger.postings import AMOUNT_MAX, EventDraft, Move, post
from coordinator.database.tables.ledger import events
from shared.errors import BadRequest, Conflict, Forbidden, NotFound, VolunteerError
from tests.support.account_rows import add_run, breaches, earn, pay, poster

MIA, BOB = "volunteer-mia-000001", "volunteer-bob-000001"


async def have(db: Database, who: str = MIA) -> tuple[int, int, int, int]:
    b = await db.read(lambda conn: payments.balances(conn, who))
    return b.pending_micro, b.earned_micro, b.held_micro, b.spent_micro


async def refused(
    db: Database, error: type[VolunteerError], write: Callable[[Connection], object]
) -> str:
    with pytest.raises(error) as caught:
        await db.write(write)
    return caught.value.message


async def test_credit_is_pending_at_acceptance_and_earned_at_the_merge(database: Database) -> None:
    one = pay(7, 1234)
    await database.write(lambda conn: payments.post_step(conn, "pending", [one], 1.0))
    assert await have(database) == (1234, 0, 0, 0)
    await database.write(lambda conn: payments.post_step(conn, "earn", [one], 2.0))
    assert await have(database) == (0, 1234, 0, 0)
    assert await breaches(database) == []


async def test_the_same_again_changes_nothing(database: Database) -> None:
    for _ in range(3):
        await database.write(lambda conn: earn(conn, pay(), pay(2), pay(2)))
    assert await have(database) == (0, 200, 0, 0)
    assert await database.read(lambda c: c.execute(select(func.count(events.c.id))).scalar()) == 4


async def test_fifty_at_once_pay_once(database: Database) -> None:
    def submit(conn: Connection) -> None:
        earn(conn, pay(1, 5), pay(2, 7, BOB))

    await asyncio.gather(*(database.write(submit) for _ in range(50)))
    assert await have(database, MIA) == (0, 5, 0, 0)
    assert await have(database, BOB) == (0, 7, 0, 0)
    assert await breaches(database) == []


async def test_crossing_payments_do_not_block_each_other(database: Database) -> None:
    """Many small transactions that need the same accounts in opposite orders."""
    people = [f"volunteer-{n:012}" for n in range(6)]

    def submit(start: int) -> Callable[[Connection], None]:
        order = people[start % 6 :] + people[: start % 6]
        rows = [pay(100 * start + n, 1, who) for n, who in enumerate(order)]
        return lambda conn: earn(conn, *(rows if start % 2 else reversed(rows)))

    await asyncio.gather(*(database.write(submit(n)) for n in range(1, 31)))
    assert {(await have(database, who))[1] for who in people} == {30}
    assert await breaches(database) == []


@pytest.mark.parametrize("other", [pay(1, 101), pay(1, 100, BOB)])
async def test_the_same_contribution_with_other_content_is_refused(
    database: Database, other: Payment
) -> None:
    await database.write(lambda conn: payments.post_step(conn, "pending", [pay()], 1.0))
    await refused(database, Conflict, lambda c: payments.post_step(c, "pending", [other], 1.0))
    await refused(
        database, Conflict, lambda c: payments.post_step(c, "pending", [pay(9), pay(9, 1)], 1.0)
    )
    await refused(database, Conflict, lambda c: payments.post_step(c, "earn", [other], 1.0))
    assert await have(database) == (100, 0, 0, 0)
    assert await have(database, BOB) == (0, 0, 0, 0)


async def test_one_bad_row_leaves_no_trace_of_its_batch(database: Database) -> None:
    await database.write(lambda conn: payments.post_step(conn, "pending", [pay(1), pay(2)], 1.0))
    batch = [pay(1), pay(2), pay(3)]  # the third was never accepted
    await refused(database, Conflict, lambda conn: payments.post_step(conn, "earn", batch, 2.0))
    assert await have(database) == (200, 0, 0, 0)
    assert await breaches(database) == []


async def test_nothing_is_earned_on_the_pending_credit_of_something_else(
    database: Database,
) -> None:
    await database.write(lambda conn: payments.post_step(conn, "pending", [pay(1)], 1.0))
    said = await refused(database, Conflict, lambda c: payments.post_step(c, "earn", [pay(2)], 2.0))
    assert "contribution 2" in said


async def test_what_is_set_aside_is_not_earned_and_the_other_way_round(database: Database) -> None:
    def write(conn: Connection) -> None:
        payments.post_step(conn, "pending", [pay(1), pay(2), pay(3)], 1.0)
        payments.post_step(conn, "void", [pay(1)], 3.0)
        payments.post_step(conn, "earn", [pay(2)], 3.0)

    await database.write(write)
    assert await have(database) == (100, 100, 0, 0)
    await refused(database, Conflict, lambda c: payments.post_step(c, "earn", [pay(1)], 3.0))
    await refused(database, Conflict, lambda c: payments.post_step(c, "void", [pay(2)], 3.0))
    assert await have(database) == (100, 100, 0, 0)
    assert await breaches(database) == []


STEPS = {
    "earn": poster("earn"),
    "void": poster("void"),
    "escrow": poster("escrow"),
    "vest": poster("vest"),
    "forfeit": poster("forfeit"),
    "withdraw": poster("withdraw"),
    "reverse": poster("reverse"),
}
WAYS = [  # of a credit, by the account in which it ends
    ((), "pending"),
    (("earn",), "earned"),
    (("void",), "gone"),
    (("withdraw",), "gone"),
    (("escrow",), "escrow"),
    (("escrow", "vest"), "earned"),
    (("escrow", "forfeit"), "gone"),
    (("earn", "reverse"), "gone"),
    (("escrow", "vest", "reverse"), "gone"),
]
NEXT = {
    "pending": {"earn", "void", "withdraw", "escrow"},
    "escrow": {"vest", "forfeit"},
    "earned": {"reverse"},
    "gone": set[str](),
}


async def test_a_credit_takes_no_step_but_those_from_where_it_is(database: Database) -> None:
    """Each credit leaves an account once: nothing is withdrawn that is in escrow by then."""
    for number, (way, ends) in enumerate(WAYS):
        rows = [pay(100 * number + n) for n in range(1, 1 + len(STEPS))]

        def write(conn: Connection, way: Sequence[str], rows: Sequence[Payment]) -> None:
            payments.post_step(conn, "pending", rows, 1.0)
            for step in way:
                STEPS[step](conn, rows, 2.0)

        await database.write(partial(write, way=way, rows=rows))
        taken = set()
        for (name, step), row in zip(STEPS.items(), rows, strict=True):
            if name in way:
                continue  # the same again changes nothing
            before = await database.read(lambda conn: payments.balances(conn, MIA))
            try:
                await database.write(partial(step, rows=[row], now=3.0))
            except Conflict:
                assert await database.read(lambda conn: payments.balances(conn, MIA)) == before
            else:
                taken.add(name)
        assert taken == NEXT[ends], way


async def test_void_and_earn_at_the_same_moment_do_not_both_happen(database: Database) -> None:
    rows = [pay(n) for n in range(1, 21)]
    await database.write(lambda conn: payments.post_step(conn, "pending", rows, 1.0))

    jobs = [
        database.write(lambda conn, post=post, row=row: post(conn, [row], 2.0))  # type: ignore[misc]
        for post in (poster("void"), poster("earn"))
        for row in rows
    ]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert sum(result is None for result in results) == 20
    assert all(result is None or isinstance(result, Conflict) for result in results)
    assert (await have(database))[0] == 0
    assert await breaches(database) == []


async def test_a_reversal_takes_back_once_and_never_what_is_spent(database: Database) -> None:
    def spend(conn: Connection) -> None:
        earn(conn, pay(1), pay(2))
        spending.hold(conn, MIA, "h", 150, "an answer", 3.0)

    await database.write(spend)
    assert await have(database) == (0, 50, 150, 0)
    await refused(database, Forbidden, lambda c: payments.post_step(c, "reverse", [pay(1)], 4.0))
    await database.write(lambda conn: spending.release(conn, MIA, "h", 5.0))
    for _ in range(2):
        await database.write(
            lambda conn: payments.post_step(conn, "reverse", [pay(1)], 6.0, "wrong")
        )
    assert await have(database) == (0, 100, 0, 0)
    assert await breaches(database) == []


async def test_spending_holds_first_and_gives_back_what_it_did_not_cost(database: Database) -> None:
    await database.write(lambda conn: earn(conn, pay(1, 1_000_000)))
    await database.write(lambda conn: spending.hold(conn, MIA, "a", 600_000, "an answer", 3.0))
    assert await have(database) == (0, 400_000, 600_000, 0)
    said = await refused(
        database, Forbidden, lambda c: spending.hold(c, MIA, "b", 400_001, "", 3.0)
    )
    assert "0.4 to spend" in said
    await refused(database, BadRequest, lambda c: spending.settle(c, MIA, "a", 600_001, 4.0))
    for _ in range(2):
        await database.write(lambda conn: spending.settle(conn, MIA, "a", 250_000, 4.0))
    assert await have(database) == (0, 750_000, 0, 250_000)
    await refused(database, Conflict, lambda conn: spending.settle(conn, MIA, "a", 1, 5.0))
    await refused(database, Conflict, lambda conn: spending.release(conn, MIA, "a", 5.0))
    await refused(database, NotFound, lambda conn: spending.settle(conn, BOB, "a", 1, 5.0))
    assert (await database.read(lambda conn: payments.balances(conn, MIA))).total_micro == 1_000_000
    assert await breaches(database) == []


async def test_two_holds_at_once_do_not_spend_the_same_credit(database: Database) -> None:
    await database.write(lambda conn: earn(conn, pay(1, 100)))
    jobs = [
        database.write(lambda conn, n=n: spending.hold(conn, MIA, f"h{n}", 60, "", 3.0))  # type: ignore[misc]
        for n in range(8)
    ]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert sum(result is None for result in results) == 1
    assert await have(database) == (0, 40, 60, 0)


@pytest.mark.parametrize("amount", [-1, AMOUNT_MAX + 1, 1 << 70])
async def test_amounts_have_limits(database: Database, amount: int) -> None:
    await refused(
        database, BadRequest, lambda c: payments.post_step(c, "pending", [pay(1, amount)], 1.0)
    )
    await refused(database, BadRequest, lambda conn: spending.hold(conn, MIA, "h", amount, "", 1.0))


async def test_the_largest_and_the_smallest_amount_are_exact(database: Database) -> None:
    await database.write(
        lambda conn: earn(conn, pay(1, AMOUNT_MAX), pay(2, AMOUNT_MAX), pay(3, 0), pay(4, 1))
    )
    assert await have(database) == (0, 2 * AMOUNT_MAX + 1, 0, 0)
    assert await breaches(database) == []


@pytest.mark.parametrize(
    "moves",
    [
        (),
        (Move(MIA, "earned", 1),),
        (Move(MIA, "earned", 1), Move(MIA, "earned", -1)),
        (Move(MIA, "earned", 1), Move("system", "mint", -2)),
    ],
)
async def test_an_event_that_does_not_balance_is_refused(
    database: Database, moves: tuple[Move, ...]
) -> None:
    draft = EventDraft(key="x", kind="pending", moves=moves)
    await refused(database, BadRequest, lambda conn: post(conn, [draft], 1.0))


async def test_a_merge_of_hundreds_takes_a_handful_of_statements(database: Database) -> None:
    rows = [pay(n, 10, f"volunteer-{n % 40:012}") for n in range(1, 401)]
    await database.write(lambda conn: payments.post_step(conn, "pending", rows, 1.0))

    def write(conn: Connection) -> int:
        seen: list[str] = []

        def count(*said: object) -> None:
            seen.append(str(said[2]))

        event.listen(conn, "before_cursor_execute", count)
        payments.post_step(conn, "earn", rows, 2.0)
        event.remove(conn, "before_cursor_execute", count)
        return len(seen)

    assert await database.write(write) <= 12
    assert await breaches(database) == []


async def test_a_volunteer_reads_its_lines_newest_first(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(conn: Connection) -> int:
        run_id = add_run(conn, "alpha")
        rows = [
            Payment(volunteer_id=MIA, contribution_id=n, run_id=run_id, amount_micro=100)
            for n in (1, 2)
        ]
        earn(conn, *rows, pay(3, 7, BOB))
        payments.post_step(conn, "reverse", [rows[1]], 3.0, "the version was rolled back")
        spending.hold(conn, MIA, "h", 60, "an answer", 4.0)
        spending.settle(conn, MIA, "h", 50, 5.0)
        return run_id

    await database.write(write)
    books = Ledger(database)
    rows = await books.history(MIA)
    assert [(row.kind, row.amount_micro, row.contribution) for row in rows] == [
        ("spent", -50, None),
        ("held", -60, None),
        ("reversed", -100, 2),
        ("earned", 100, 2),
        ("earned", 100, 1),
        ("pending", 100, 2),
        ("pending", 100, 1),
    ]
    assert rows[2].memo == "the version was rolled back"
    assert rows[2].run == "alpha"
    assert await books.history(MIA, before=1 << 80) == rows
    assert await books.history(MIA, before=-(1 << 40)) == ()
    assert (await books.balances(MIA)).total_micro == 100
    monkeypatch.setattr(ledger_module, "ROWS", 3)
    first = await books.history(MIA)
    second = await books.history(MIA, before=first[-1].id)
    assert [*first, *second] == list(rows[:6])


async def test_what_was_earned_today_is_told(database: Database) -> None:
    def write(conn: Connection) -> None:
        payments.post_step(conn, "pending", [pay(1), pay(2)], 1.0)
        payments.post_step(conn, "earn", [pay(1)], 10.0)
        payments.post_step(conn, "earn", [pay(2, 100)], 20.0)

    await database.write(write)
    assert await database.read(lambda conn: payments.earned_since(conn, MIA, 20.0)) == 100
    assert await database.read(lambda conn: payments.earned_since(conn, MIA, 0.0)) == 200
