"""Credits that are taken back, and debts, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import Connection, event
from sqlalchemy.util import await_only

from coordinator.accounts import organiser_reversals as reversals_module
from coordinator.accounts.organiser_reversals import Reversals
from coordinator.accounts.suspension import suspend
from coordinator.database import contributions, record, volunteers
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import debts, escrow, payments, reversal, spending
from coordinator.database.ledger.payments import Balances, Payment
from coordinator.database.ledger.reversal import TakenBack
from shared.errors import BadRequest, Conflict, NotFound
from tests.contract.test_escrow import (
    FRIEND,
    NEW,
    PRICE,
    accepted,
    add,
    draw,
    merged,
    setting,
    settle,
)
from tests.support.account_rows import add_contribution, breaches
from tests.support.databases import Postgres
from tests.support.virtual_clock import VirtualClock


async def has(db: Database, who: str = FRIEND) -> Balances:
    return await db.read(lambda conn: payments.balances(conn, who))


def bought(conn: Connection, who: str, hold: str, amount: int) -> None:
    spending.hold(conn, who, hold, amount, "an answer", 2.0)
    spending.settle(conn, who, hold, amount, 3.0)


async def test_what_was_spent_is_owed_and_later_pay_settles_it_first(database: Database) -> None:
    run = await setting(database)
    for _ in range(3):
        await database.write(lambda conn: merged(conn, run, FRIEND, 1.0))
    await database.write(lambda conn: bought(conn, FRIEND, "h", 25))
    reversals = Reversals(database, VirtualClock())
    done = await reversals.of_volunteer(FRIEND, 0.0, "copies of others")
    assert done.taken == TakenBack(contributions=3, earned_micro=30, debt_micro=25)
    assert await has(database) == Balances(spent_micro=25, debt_micro=25)
    assert (await has(database)).total_micro == 0
    await database.write(lambda conn: merged(conn, run, FRIEND, 4.0))
    assert await has(database) == Balances(spent_micro=25, debt_micro=15)
    for _ in range(2):
        await database.write(lambda conn: merged(conn, run, FRIEND, 5.0))
    assert await has(database) == Balances(spent_micro=25, earned_micro=5)
    lines = await database.read(lambda conn: payments.history(conn, FRIEND, None, 50))
    own = [(x.kind, x.amount_micro) for x in reversed(lines) if x.kind != "pending"]
    assert own == [
        *[("earned", PRICE)] * 3, ("held", -25), ("spent", -25), ("owed", 25),
        *[("reversed", -PRICE)] * 3, ("earned", PRICE), ("repaid", -PRICE),
        ("earned", PRICE), ("repaid", -PRICE), ("earned", PRICE), ("repaid", -5),
    ]  # fmt: skip
    assert {x.memo for x in lines if x.kind == "reversed"} == {"copies of others"}
    assert await breaches(database) == []


@pytest.mark.parametrize(("charged", "spent"), [(3, 0), (3, PRICE - 3), (3 * PRICE, 0)], ids=str)
async def test_work_that_a_draw_did_not_show_is_not_charged_again_when_it_is_taken_back(
    database: Database, charged: int, spent: int
) -> None:
    """A charge above the pay of its task is for other work: that part stays."""
    run = await setting(database)
    number = await database.write(lambda conn: merged(conn, run, FRIEND, 1.0))
    await database.write(lambda conn: debts.charge(conn, FRIEND, number, charged, "", 1.5))
    if spent:
        await database.write(lambda conn: bought(conn, FRIEND, "h", spent))
    reversals = Reversals(database, VirtualClock())
    done = await reversals.of_contribution(number, "copies of others")
    assert done.taken.earned_micro == PRICE
    balances = await has(database)
    assert balances.total_micro == -max(0, charged - PRICE)
    assert (balances.earned_micro, balances.spent_micro) == (0, spent)
    with pytest.raises(Conflict, match="taken back already"):
        await reversals.of_contribution(number, "once more")
    again = await reversals.of_volunteer(FRIEND, 0.0, "all of it")
    assert (again.taken.contributions, await has(database)) == (0, balances)
    assert await breaches(database) == []


async def test_what_a_draw_charged_is_paid_back_when_pay_at_stake_is_forfeited(
    database: Database,
) -> None:
    run = await setting(database, standing="vetted")
    number = await database.write(lambda conn: merged(conn, run, NEW, 1.0))
    await database.write(lambda conn: debts.charge(conn, NEW, number, 4, "", 1.5))
    assert await has(database, NEW) == Balances(escrow_micro=PRICE, debt_micro=4)
    await database.write(lambda conn: suspend(conn, NEW, "fakes", 2.0))
    assert await has(database, NEW) == Balances()
    assert await breaches(database) == []


async def test_what_vests_or_comes_back_from_a_hold_settles_a_debt(database: Database) -> None:
    run = await setting(database, standing="vetted")
    for _ in range(2):  # one task is the bond
        number = await database.write(lambda conn: merged(conn, run, NEW, 1.0))
    await database.write(lambda conn: settle(conn, draw(conn, number), "passed"))
    assert (await has(database, NEW)).earned_micro == PRICE
    await database.write(lambda conn: spending.hold(conn, NEW, "h", 7, "an answer", 2.0))
    numbers = await database.write(lambda conn: contributions.good_of(conn, NEW, 0.0, 0, 1))
    reversals = Reversals(database, VirtualClock())
    await reversals.of_contribution(numbers[0].id, "wrong")
    now = await has(database, NEW)
    assert (now.earned_micro, now.held_micro, now.debt_micro) == (0, 7, 7)
    for _ in range(2):  # the same again changes nothing
        await database.write(lambda conn: spending.release(conn, NEW, "h", 3.0))
    now = await has(database, NEW)
    assert (now.earned_micro, now.held_micro, now.debt_micro) == (0, 0, 0)

    await database.write(lambda conn: debts.owe(conn, NEW, "x", 3, "", 4.0))
    await database.write(
        lambda conn: spending.hold(conn, NEW, "i", 3, "", 4.0)
    )  # what was lent is gone
    for _ in range(2):
        number = await database.write(lambda conn: merged(conn, run, NEW, 5.0))
    await database.write(lambda conn: settle(conn, draw(conn, number), "passed"))
    now = await has(database, NEW)
    # One task is the bond, and part of another stays at stake for as long as something is owed.
    assert (now.earned_micro, now.debt_micro) == (PRICE - 3, 0)
    assert await breaches(database) == []


async def test_all_that_a_volunteer_has_is_taken_back_wherever_it_is(database: Database) -> None:
    run = await setting(database)
    old = await database.write(lambda conn: merged(conn, run, NEW, 1.0))
    await database.write(lambda conn: volunteers.set_volunteer(conn, NEW, invited=True))
    await database.write(lambda conn: escrow.free_all(conn, NEW, 1.0))
    await database.write(lambda conn: volunteers.set_volunteer(conn, NEW, invited=False))
    await database.write(lambda conn: merged(conn, run, NEW, 2.0))
    waiting = await database.write(lambda conn: accepted(conn, run, NEW, 3.0))
    refused = await database.write(lambda conn: add_contribution(conn, run, NEW, "rejected"))
    reversals = Reversals(database, VirtualClock())
    done = await reversals.of_volunteer(NEW, 0.0, "made up")
    assert done.taken == TakenBack(
        contributions=3, pending_micro=PRICE, escrow_micro=PRICE, earned_micro=PRICE
    )
    assert await has(database, NEW) == Balances()
    row = await database.read(lambda conn: contributions.by_id(conn, waiting))
    assert row.state == "superseded"
    again = await reversals.of_volunteer(NEW, 0.0, "made up")
    assert again.taken == TakenBack()
    for number in (old, waiting):
        with pytest.raises(Conflict, match="was taken back already"):
            await reversals.of_contribution(number, "again")
    with pytest.raises(Conflict, match="is rejected, and nothing was paid for it"):
        await reversals.of_contribution(refused, "why not")
    lines = await database.read(lambda conn: record.entries(conn))
    assert [line.action for line in lines] == ["volunteer.reverse"]
    assert json.loads(lines[0].detail)["reason"] == "made up"
    assert await breaches(database) == []


async def test_only_what_was_submitted_since_then_is_taken_back(database: Database) -> None:
    run = await setting(database)
    await database.write(lambda conn: merged(conn, run, FRIEND, 1.0))

    def later(conn: Connection) -> None:
        number = add_contribution(conn, run, FRIEND, "merged", PRICE, weight=1.0, received_at=100.0)
        row = contributions.by_id(conn, number)
        payments.post_step(conn, "pending", [Payment.of(row)], 100.0)
        escrow.pay(conn, [row], 100.0)

    await database.write(later)
    reversals = Reversals(database, VirtualClock())
    done = await reversals.of_volunteer(FRIEND, 50.0, "a bad machine")
    assert (done.taken.contributions, (await has(database)).earned_micro) == (1, PRICE)
    assert await breaches(database) == []


async def test_one_contribution_is_reversed_once_and_only_if_paid(database: Database) -> None:
    run = await setting(database)
    number = await database.write(lambda conn: merged(conn, run, FRIEND, 1.0))
    waiting = await database.write(lambda conn: accepted(conn, run, FRIEND, 1.0))
    unpaid = await database.write(lambda conn: merged(conn, run, FRIEND, 1.0, weight=0.0))
    reversals = Reversals(database, VirtualClock())
    with pytest.raises(BadRequest, match="give a reason"):
        await reversals.of_contribution(number, " ")
    with pytest.raises(NotFound, match="there is no contribution 987654"):
        await reversals.of_contribution(987654, "wrong")
    with pytest.raises(Conflict, match="not paid yet, it waits for a merge"):
        await reversals.of_contribution(waiting, "wrong")
    with pytest.raises(Conflict, match="nothing was paid for it"):
        await reversals.of_contribution(unpaid, "wrong")
    found = await asyncio.gather(
        *(reversals.of_contribution(number, "wrong") for _ in range(4)), return_exceptions=True
    )
    assert sum(isinstance(one, Conflict) for one in found) == 3
    (line,) = await database.read(lambda conn: record.entries(conn))
    assert (line.action, line.subject) == ("contribution.reverse", str(number))
    assert (await has(database)).earned_micro == 0
    assert await breaches(database) == []


async def test_hundreds_take_several_transactions_of_few_statements(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reversals_module, "BATCH", 150)
    run = await setting(database)
    count = 330

    def work(conn: Connection) -> None:
        numbers = [
            add_contribution(conn, run, FRIEND, "merged", 1, weight=1.0) for _ in range(count)
        ]
        rows = contributions.by_ids(conn, numbers)
        payments.post_step(conn, "pending", [Payment.of(row) for row in rows], 1.0)
        escrow.pay(conn, rows, 1.0)

    await database.write(work)
    await database.write(lambda conn: bought(conn, FRIEND, "h", 180))

    def first(conn: Connection) -> int:
        rows = contributions.good_of(conn, FRIEND, 0.0, 0, 150)
        seen: list[str] = []
        event.listen(conn, "before_cursor_execute", lambda *said: seen.append(str(said[2])))
        reversal.take_back(conn, [Payment.of(row) for row in rows], "", 2.0)
        return len(seen)

    assert await database.write(first) <= 60
    reversals = Reversals(database, VirtualClock())
    done = await reversals.of_volunteer(FRIEND, 0.0, "the rest, after a kill")
    assert done.taken == TakenBack(contributions=180, earned_micro=180, debt_micro=180)
    assert await has(database) == Balances(spent_micro=180, debt_micro=180)
    assert await breaches(database) == []


async def test_pay_of_hundreds_takes_a_handful_of_statements(database: Database) -> None:
    run = await setting(database)
    people = [f"volunteer-stranger-{n:03}" for n in range(40)]

    def work(conn: Connection) -> int:
        for who in people:
            add(conn, who)
        numbers = [
            add_contribution(conn, run, (*people, FRIEND)[n % 41], "merged", 1, weight=1.0)
            for n in range(200)
        ]
        rows = contributions.by_ids(conn, numbers)
        payments.post_step(conn, "pending", [Payment.of(row) for row in rows], 1.0)
        seen: list[str] = []
        event.listen(conn, "before_cursor_execute", lambda *said: seen.append(str(said[2])))
        escrow.pay(conn, rows, 1.0)
        return len(seen)

    assert await database.write(work) <= 35
    assert await breaches(database) == []


async def test_pay_and_a_suspension_at_one_moment_leave_nothing(database: Database) -> None:
    run = await setting(database)
    for round_ in range(5):
        await database.write(lambda conn: volunteers.set_volunteer(conn, NEW, standing="probation"))
        jobs = [database.write(lambda conn: merged(conn, run, NEW, 1.0)) for _ in range(6)]
        jobs.insert(round_, database.write(lambda conn: _suspended(conn)))
        found = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(not isinstance(one, BaseException) or isinstance(one, Conflict) for one in found)
        assert await has(database, NEW) == Balances()
    assert await breaches(database) == []


def _suspended(conn: Connection) -> int:
    return suspend(conn, NEW, "made up", 2.0).contributions


@pytest.fixture
async def concurrent(postgres: Postgres) -> AsyncIterator[Database]:
    """A database with several writers at a time."""
    url = await postgres.fresh()
    db = await Database.open(url)
    yield db
    await db.close()
    await postgres.recycle(url)


async def test_a_suspension_in_the_middle_of_a_payment_undoes_the_payment(
    concurrent: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = concurrent
    run = await setting(database)
    reached, suspended = asyncio.Event(), asyncio.Event()

    def late(
        conn: Connection, step: payments.Step, rows: list[Payment], now: float, memo: str = ""
    ) -> None:
        if step == "escrow":
            reached.set()  # the standing has been read
            await_only(suspended.wait())
        payments.post_step(conn, step, rows, now, memo)

    monkeypatch.setattr(escrow, "post_step", late)

    def paid(conn: Connection, number: int) -> None:
        escrow.pay(conn, [contributions.by_id(conn, number)], 2.0)

    def waits(conn: Connection) -> int:
        number = add_contribution(conn, run, NEW, "merged", PRICE, weight=1.0)
        payments.post_step(conn, "pending", [Payment.of(contributions.by_id(conn, number))], 1.0)
        return number

    number = await database.write(waits)
    paying = asyncio.create_task(database.write(lambda conn: paid(conn, number)))
    await asyncio.wait_for(reached.wait(), 10)
    await database.write(_suspended)
    suspended.set()
    with pytest.raises(Conflict, match="suspended while it was paid"):
        await paying
    assert await has(database, NEW) == Balances(pending_micro=PRICE)
    await database.write(lambda conn: paid(conn, number))
    assert await has(database, NEW) == Balances()
    assert await breaches(database) == []
