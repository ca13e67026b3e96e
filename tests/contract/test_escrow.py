"""Pay of accounts that nobody vouched for, on SQLite and PostgreSQL."""

from __future__ import annotations

import json
from functools import partial

import pytest
from sqlalchemy import Connection, insert

from coordinator.accounts.accounts import Principal, Volunteers
from coordinator.accounts.suspension import suspend
from coordinator.checking import draw_effects
from coordinator.config import Settings
from coordinator.database import contributions, recomputes, record, runs, verdicts, volunteers
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import debts, escrow, payments
from coordinator.database.ledger.payments import Payment
from coordinator.database.recomputes import DrawTerms, RecomputeRow
from coordinator.database.tables import accounts as tables
from coordinator.rules.draws import Result
from coordinator.rules.standing import PROOFS_MIN, State
from coordinator.runs import settlement
from shared.errors import BadRequest, Conflict
from shared.protocol.contributions import Verdict
from tests.support.account_rows import add_contribution, add_run, breaches
from tests.support.virtual_clock import VirtualClock

NEW = "volunteer-new-000001"
FRIEND = "volunteer-friend-01"
PRICE = 10


def add(conn: Connection, who: str, **values: object) -> None:
    row = {
        "id": who, "nickname": who, "nickname_key": who, "state": "active", "public": True,
        "created_at": 0.0, "standing": "probation", "invited": False,
    }  # fmt: skip
    conn.execute(insert(tables.volunteers).values(**(row | values)))


def merged(
    conn: Connection, run: int, who: str, now: float, weight: float = 1.0, **of: object
) -> int:
    """A contribution that is accepted, counted and merged; its number."""
    number = add_contribution(conn, run, who, "merged", PRICE, weight=weight, version=1, **of)
    row = contributions.by_id(conn, number)
    volunteers.count_accepted(conn, [(who, PRICE)])
    payments.post_step(conn, "pending", [Payment.of(row)], now)
    merged = {"state": "merged", "message": "merged into version 1"}
    verdicts.record(conn, [(row, merged)], now)
    escrow.pay(conn, [row], now)
    return number


def accepted(conn: Connection, run: int, who: str, now: float) -> int:
    """A contribution that waits for a merge; its number."""
    number = add_contribution(conn, run, who, "accepted", PRICE, weight=1.0)
    payments.post_step(conn, "pending", [Payment.of(contributions.by_id(conn, number))], now)
    return number


def draw(conn: Connection, number: int) -> RecomputeRow:
    """The draw of a contribution."""
    row = contributions.by_id(conn, number)
    order = DrawTerms(work="{}", flops=1e9, kind="cpu")
    volunteers.count_draw(conn, row.volunteer_id)
    return recomputes.add(conn, row, order)


def settle(conn: Connection, row: RecomputeRow, result: Result, now: float = 5.0) -> None:
    """The end of a draw."""
    assert draw_effects.settle(conn, row, result, ("", '{"cosine":1.0,"norm_ratio":1.0}'), now)


async def verdict(db: Database, number: int) -> Verdict:
    found = await db.read(lambda conn: verdicts.latest_verdict(conn, number))
    assert found is not None
    return found


async def have(db: Database, who: str = NEW) -> tuple[int, int, int]:
    found = await db.read(lambda conn: payments.balances(conn, who))
    return found.pending_micro, found.escrow_micro, found.earned_micro


async def setting(db: Database, **values: object) -> int:
    def write(conn: Connection) -> int:
        add(conn, NEW, **values)
        add(conn, FRIEND, standing="vetted", invited=True)
        return add_run(conn)

    return await db.write(write)


async def test_a_stranger_is_paid_by_a_later_draw_that_passes_and_nothing_else(
    database: Database,
) -> None:
    run = await setting(database)
    await database.write(lambda conn: merged(conn, run, FRIEND, 1.0))
    assert await have(database, FRIEND) == (0, 0, PRICE)
    for _ in range(60):  # neither number nor time frees anything
        await database.write(lambda conn: merged(conn, run, NEW, 2.0))
    assert await have(database) == (0, 60 * PRICE, 0)

    def drawn(conn: Connection) -> None:
        row = draw(conn, merged(conn, run, NEW, 3.0))
        waiting = accepted(conn, run, NEW, 3.0)
        settle(conn, row, "passed", 1e9)
        assert waiting > row.contribution_id

    await database.write(drawn)
    kept = PRICE  # the bond of one draw, since the next task is drawn for certain
    assert await have(database) == (PRICE, kept, 60 * PRICE)
    assert await breaches(database) == []


async def test_the_first_pay_of_updates_is_free_with_the_merge_of_the_second(
    database: Database,
) -> None:
    """The proof of an update comes before its merge, and its pay is at stake after it."""
    run = await setting(database)

    def proven(conn: Connection) -> int:
        number = accepted(conn, run, NEW, 1.0)
        volunteers.count_accepted(conn, [(NEW, PRICE)])
        settle(conn, draw(conn, number), "passed")
        return number

    async def merge(number: int) -> tuple[int, int, int]:
        def change(conn: Connection) -> None:
            row = contributions.by_id(conn, number)
            assert verdicts.merge_all(conn, [row], 1, 2.0)
            escrow.pay(conn, [row], 2.0)

        await database.write(change)
        return await have(database)

    first = await database.write(proven)
    assert await merge(first) == (0, PRICE, 0)  # its own draw frees nothing
    second = await database.write(proven)
    assert await have(database) == (PRICE, PRICE, 0)
    assert await merge(second) == (0, PRICE, PRICE)
    later = [await database.write(lambda conn: accepted(conn, run, NEW, 3.0)) for _ in range(3)]
    for number in later:  # no work without a proof takes the place of the bond
        assert (await merge(number))[2] == PRICE
    assert await breaches(database) == []


async def test_nothing_is_freed_past_an_open_question(database: Database) -> None:
    """Otherwise an account's honest machine frees the pay of one that never reveals its fakes."""
    run = await setting(database)

    def drawn(conn: Connection) -> tuple[RecomputeRow, RecomputeRow]:
        for _ in range(4):
            merged(conn, run, NEW, 1.0)
        first = draw(conn, merged(conn, run, NEW, 2.0))
        second = draw(conn, merged(conn, run, NEW, 3.0))
        settle(conn, second, "passed")
        return first, second

    first, _ = await database.write(drawn)
    assert await have(database) == (0, 6 * PRICE, 0)
    await database.write(lambda conn: settle(conn, first, "passed"))
    assert await have(database) == (0, PRICE, 5 * PRICE)
    assert await breaches(database) == []


async def test_pay_behind_an_open_draw_is_no_bond(database: Database) -> None:
    """Else whoever is drawn with a fake fills the bond by more of them, and then reveals an honest
    task that was drawn before: all that is free of risk is free, and the bond was never lost.
    """
    run = await setting(database)

    def drawn(conn: Connection) -> RecomputeRow:
        for _ in range(4):
            merged(conn, run, NEW, 1.0)
        honest = draw(conn, merged(conn, run, NEW, 2.0))
        fake = draw(conn, merged(conn, run, NEW, 2.0))
        for _ in range(20):
            merged(conn, run, NEW, 3.0)
        settle(conn, honest, "passed")
        return fake

    fake = await database.write(drawn)
    kept = PRICE  # the bond of the one draw before
    assert await have(database) == (0, kept + 21 * PRICE, 4 * PRICE)
    await database.write(lambda conn: settle(conn, fake, "failed"))
    assert await have(database) == (0, 0, 4 * PRICE)
    assert await breaches(database) == []


async def test_a_draw_that_is_still_open_makes_no_bond_larger(database: Database) -> None:
    """Its account may have had it for its first tasks, and waits for no fault of its own."""
    run = await setting(database)

    def drawn(conn: Connection) -> None:
        for _ in range(4):
            merged(conn, run, NEW, 1.0)
        passing = [draw(conn, merged(conn, run, NEW, 2.0)) for _ in range(2)]
        draw(conn, merged(conn, run, NEW, 3.0))
        for row in passing:
            settle(conn, row, "passed")

    await database.write(drawn)
    assert await have(database) == (0, 2 * PRICE, 5 * PRICE)  # a bond, and the pay of the open one
    assert await breaches(database) == []


async def test_what_waits_for_a_merge_when_its_account_is_banned_is_paid_and_never_merged(
    database: Database,
) -> None:
    run = await setting(database)
    for who, paid in ((FRIEND, (0, 0, PRICE)), (NEW, (0, PRICE, 0))):
        waiting = await database.write(partial(accepted, run=run, who=who, now=1.0))
        await Volunteers(database, VirtualClock(), Settings()).ban(who, "spam")
        assert (
            await database.read(lambda conn: contributions.left_over(conn, run, {NEW, FRIEND}))
            == []
        )
        assert await have(database, who) == paid
        said = await verdict(database, waiting)
        assert (said.state, said.message) == (
            "superseded", "not merged: this account is banned; the work is paid",
        )  # fmt: skip
        await Volunteers(database, VirtualClock(), Settings()).unban(who)
        assert (
            await database.read(lambda conn: contributions.left_over(conn, run, {NEW, FRIEND}))
            == []
        )
    assert await breaches(database) == []


@pytest.mark.parametrize("end", ["merge", "overtaken", "rollback", "stop", "ban"])
async def test_every_end_of_an_update_frees_as_much_proven_pay_as_a_merge(
    database: Database, end: str
) -> None:
    run = await setting(database)

    def proven(conn: Connection) -> list[int]:
        numbers = [accepted(conn, run, NEW, 1.0) for _ in range(5)]
        volunteers.count_accepted(conn, [(NEW, PRICE)] * 5)
        for number in numbers:
            settle(conn, draw(conn, number), "passed")
        return numbers

    numbers = await database.write(proven)

    def finish(conn: Connection) -> None:
        row, rows = runs.by_id(conn, run, lock=True), contributions.by_ids(conn, numbers)
        if end == "stop":
            assert settlement.close(conn, run, 2.0) == 5
            return
        owners = settlement.lock_accounts(conn, row, 99, rows)
        if end == "rollback":
            settlement.leave_behind(conn, row, 99, owners, "", 2.0)
            return
        if end == "merge":
            assert verdicts.merge_all(conn, rows, 1, 2.0)
        settlement.overtake(conn, row, 99, rows if end == "merge" else (), owners, 2.0)

    if end == "ban":
        await Volunteers(database, VirtualClock(), Settings()).ban(NEW, "spam")
    else:
        await database.write(finish)
    assert await have(database) == (0, 4 * PRICE, PRICE)
    assert await breaches(database) == []


async def test_work_of_a_banned_account_that_cannot_be_proved_is_not_called_paid(
    database: Database,
) -> None:
    run = await setting(database)
    waiting = await database.write(lambda conn: accepted(conn, run, NEW, 1.0))
    await Volunteers(database, VirtualClock(), Settings()).ban(NEW, "spam")
    why = "not paid: its task cannot be done again"
    await database.write(lambda conn: verdicts.note_unpaid(conn, [waiting], why))
    message = (await verdict(database, waiting)).message
    assert message == f"not merged: this account is banned; {why}"


async def test_an_account_that_is_suspended_before_its_pay_is_freed_gets_none(
    database: Database,
) -> None:
    run = await setting(database)

    def drawn(conn: Connection) -> None:
        number = accepted(conn, run, NEW, 1.0)
        volunteers.count_accepted(conn, [(NEW, PRICE)])
        settle(conn, draw(conn, number), "passed")
        later = draw(conn, merged(conn, run, NEW, 2.0))
        settle(conn, later, "passed")
        suspend(conn, NEW, "copies of others", 3.0)
        escrow.pay(conn, [contributions.by_id(conn, number)], 4.0)

    await database.write(drawn)
    assert await have(database) == (0, 0, 0)
    assert await breaches(database) == []


async def test_what_proves_nothing_takes_nothing_and_frees_nothing(database: Database) -> None:
    """Pay so far stays at stake whatever passes later, also that of work still being checked."""
    run = await setting(database, standing="vetted", proofs=12)

    def drawn(conn: Connection) -> int:
        for _ in range(3):
            merged(conn, run, NEW, 1.0)
        settle(conn, draw(conn, merged(conn, run, NEW, 1.0)), "passed")
        bad = draw(conn, merged(conn, run, NEW, 2.0))
        merged(conn, run, NEW, 3.0)
        accepted(conn, run, NEW, 3.0)
        checking = add_contribution(conn, run, NEW, "checking", PRICE)
        settle(conn, bad, "unproven")
        waiting = accepted(conn, run, FRIEND, 1.0)
        settle(conn, draw(conn, merged(conn, run, FRIEND, 1.0)), "unproven")
        assert volunteers.existing(conn, FRIEND).standing == "vetted"  # an invited account
        assert contributions.by_id(conn, waiting).state == "accepted"
        account = volunteers.existing(conn, NEW)
        assert (account.standing, account.proofs, account.draws) == ("probation", 0, 0)
        assert account.unproved_to == checking
        merged(conn, run, NEW, 9.0)
        settle(conn, draw(conn, merged(conn, run, NEW, 9.0)), "passed")
        return checking

    await database.write(drawn)
    left = 4 * PRICE  # of the bond before, the draw, and two after it
    assert await have(database) == (0, left + PRICE, 4 * PRICE)
    assert await breaches(database) == []
    people = Volunteers(database, VirtualClock(), Settings())
    await people.vouch(NEW)
    assert await have(database) == (0, 0, left + 5 * PRICE)
    assert await breaches(database) == []


async def test_a_failed_draw_takes_back_what_was_paid_for_its_work_and_nothing_else(
    database: Database,
) -> None:
    """Who was invited is paid with the merge, before the draw ends."""
    run = await setting(database)

    def drawn(conn: Connection) -> None:
        honest, fake = [merged(conn, run, FRIEND, 1.0) for _ in range(2)]
        settle(conn, draw(conn, fake), "failed")
        assert honest < fake

    await database.write(drawn)
    assert await have(database, FRIEND) == (0, 0, PRICE)
    lines = await database.read(lambda conn: payments.history(conn, FRIEND, None, 1))
    assert [(line.kind, line.amount_micro) for line in lines] == [("reversed", -PRICE)]
    assert await breaches(database) == []


async def test_what_was_left_at_stake_is_lost_to_a_proof_alone(database: Database) -> None:
    """A draw that was open before shows all the same that its work was not done."""
    run = await setting(database)

    def drawn(conn: Connection) -> None:
        merged(conn, run, NEW, 1.0)
        unclear = draw(conn, merged(conn, run, NEW, 1.0))
        fake = draw(conn, merged(conn, run, NEW, 1.0))
        settle(conn, unclear, "unproven")
        assert volunteers.existing(conn, NEW).standing == "probation"
        settle(conn, fake, "failed")
        assert volunteers.existing(conn, NEW).standing == "suspended"

    await database.write(drawn)
    assert await have(database) == (0, 0, 0)
    assert await breaches(database) == []


async def test_work_that_could_not_be_proved_is_done_again_and_its_pay_stays_at_stake(
    database: Database,
) -> None:
    run = await setting(database)

    def drawn(conn: Connection) -> int:
        row = draw(conn, merged(conn, run, NEW, 1.0))
        waiting = accepted(conn, run, NEW, 1.0)
        settle(conn, row, "unproven")
        return waiting

    waiting = await database.write(drawn)
    assert await have(database) == (0, 2 * PRICE, 0)
    said = await verdict(database, waiting)
    assert (said.state, said.message, said.credits_micro) == (
        "superseded", "not merged: it could not be proved; its pay stays at stake", PRICE,
    )  # fmt: skip


async def test_ten_draws_of_different_tasks_vet(database: Database) -> None:
    run = await setting(database)

    def drawn(conn: Connection) -> list[State]:
        states: list[State] = []
        first = merged(conn, run, FRIEND, 1.0)
        task = contributions.by_id(conn, first).task_id
        settle(conn, draw(conn, first), "passed")
        for attempt in (2, 3):
            again = merged(conn, run, FRIEND, 1.0, task_id=task, attempt=attempt)
            settle(conn, draw(conn, again), "passed")
        assert volunteers.existing(conn, FRIEND).proofs == 1
        for _ in range(PROOFS_MIN):
            settle(conn, draw(conn, merged(conn, run, NEW, 1.0)), "passed")
            states.append(volunteers.existing(conn, NEW).standing)
        return states

    assert await database.write(drawn) == ["probation"] * (PROOFS_MIN - 1) + ["vetted"]


async def test_a_suspended_account_forfeits_and_is_not_paid_for_what_is_under_way(
    database: Database,
) -> None:
    run = await setting(database)
    await database.write(lambda conn: merged(conn, run, NEW, 1.0))
    waiting = await database.write(lambda conn: accepted(conn, run, NEW, 1.0))
    before = await database.read(lambda conn: contributions.by_id(conn, waiting))
    await database.write(lambda conn: draw(conn, waiting))
    taken = await database.write(lambda conn: suspend(conn, NEW, "copies", 2.0))
    assert (taken.contributions, taken.pending_micro, taken.escrow_micro) == (2, PRICE, PRICE)
    assert await have(database) == (0, 0, 0)
    assert await database.read(lambda conn: recomputes.open_of(conn, NEW)) == []
    # No merge takes it any more, and one that began with it pays nothing.
    after = await database.read(lambda conn: contributions.by_id(conn, waiting))
    assert (after.state, after.weight) == ("superseded", 0.0)
    await database.write(lambda conn: escrow.pay(conn, [before], 3.0))
    late = await database.write(lambda conn: merged(conn, run, NEW, 4.0))
    assert await have(database) == (0, 0, 0)
    said = await verdict(database, late)
    assert said.message == "merged into version 1; not paid: this account is suspended"
    assert said.credits_micro == 0
    said = await verdict(database, waiting)
    assert (said.message, said.credits_micro) == (
        "what this account had at stake is given up: neither merged nor paid", 0,
    )  # fmt: skip
    lines = await database.read(lambda conn: payments.history(conn, NEW, None, 10))
    assert [(line.kind, line.amount_micro, line.memo) for line in reversed(lines)] == [
        ("pending", PRICE, ""), ("at stake", PRICE, ""), ("pending", PRICE, ""),
        ("forfeited", -PRICE, "copies"), ("forfeited", -PRICE, "copies"),
        ("pending", PRICE, ""), ("void", -PRICE, ""),
    ]  # fmt: skip
    assert await breaches(database) == []


async def test_nothing_is_paid_for_weight_zero(database: Database) -> None:
    run = await setting(database)
    number = await database.write(lambda conn: merged(conn, run, FRIEND, 1.0, weight=0.0))
    assert await have(database, FRIEND) == (0, 0, 0)
    assert (await verdict(database, number)).message.endswith("it counts nothing in a merge")
    assert await breaches(database) == []


async def test_the_organiser_suspends_with_a_reason_and_vouches(
    database: Database,
) -> None:
    run = await setting(database)
    people = Volunteers(database, VirtualClock(), Settings(contact="ann@example.org"))
    await database.write(lambda conn: merged(conn, run, NEW, 1.0))
    with pytest.raises(BadRequest, match="give a reason"):
        await people.suspend(NEW, "\x1b \n")
    with pytest.raises(Conflict, match="is not suspended"):
        await people.unsuspend(NEW, "a mistake")
    await database.write(lambda conn: volunteers.set_volunteer(conn, NEW, draws=9, proofs=9))
    await people.suspend(NEW, "copies of others")
    me = await people.me(Principal(worker_id="worker", volunteer_id=NEW, nickname=NEW))
    assert (me.standing, me.standing_reason) == (
        "suspended", "copies of others; write to ann@example.org",
    )  # fmt: skip
    assert await have(database) == (0, 0, 0)
    await people.unsuspend(NEW, "a mistake")
    row = await database.read(lambda conn: volunteers.existing(conn, NEW))
    assert (row.standing, row.suspended_reason) == ("probation", "")
    assert (row.draws, row.proofs) == (0, 0)  # what was proved before brings no standing
    lines = await database.read(lambda conn: record.entries(conn))
    assert [(line.action, json.loads(line.detail)["reason"]) for line in lines] == [
        ("volunteer.unsuspend", "a mistake"), ("volunteer.suspend", "copies of others"),
    ]  # fmt: skip
    await database.write(lambda conn: merged(conn, run, NEW, 2.0))
    await people.vouch(NEW)
    (line, *_) = await database.read(lambda conn: record.entries(conn))
    assert (line.action, json.loads(line.detail)) == ("volunteer.vouch", {"vested": 1})
    await people.suspend(FRIEND, "copies")
    await people.unsuspend(FRIEND, "a mistake")  # who was vouched for stays so
    for who, earned in ((NEW, 2 * PRICE), (FRIEND, PRICE)):
        await database.write(partial(merged, run=run, who=who, now=3.0))
        assert await have(database, who) == (0, 0, earned)
        row = await database.read(partial(volunteers.existing, volunteer_id=who))
        assert row.standing == "vetted"
    assert await breaches(database) == []


async def test_a_pass_that_shows_a_part_of_its_work_owes_the_rest_of_the_bond(
    database: Database,
) -> None:
    run = await setting(database)

    def drawn(conn: Connection) -> None:
        for _ in range(4):
            row = draw(conn, merged(conn, run, NEW, 2.0))
            assert draw_effects.settle(conn, row, "passed", ("", "{}"), 3.0, 1.0)
        row = draw(conn, merged(conn, run, NEW, 4.0))
        assert draw_effects.settle(conn, row, "passed", ("", "{}"), 5.0, 0.75)
        friend = draw(conn, merged(conn, run, FRIEND, 4.0))
        assert draw_effects.settle(conn, friend, "passed", ("", "{}"), 5.0, 0.75)

    await database.write(drawn)
    found = await database.read(lambda conn: payments.balances(conn, NEW))
    # Five draws, whose bond is four tasks: of these a quarter was not shown, and is repaid at once.
    assert (found.escrow_micro, found.debt_micro, found.earned_micro) == (4 * PRICE, 0, 0)
    lines = await database.read(lambda conn: payments.history(conn, NEW, None, 2))
    number = await database.read(lambda conn: contributions.newest_of(conn, NEW))
    task = await database.read(lambda conn: contributions.by_id(conn, number).task_id)
    memo = f"task {task}, recomputed elsewhere, proves 75.0% of its work"
    assert [(line.kind, line.amount_micro, line.memo) for line in lines] == [
        ("repaid", -PRICE, ""), ("not proved", 0, memo),
    ]  # fmt: skip
    assert await have(database, FRIEND) == (0, 0, PRICE)  # who was vouched for owes nothing
    assert await breaches(database) == []


async def test_nobody_owes_more_for_a_draw_than_is_at_stake_beside_older_debts(
    database: Database,
) -> None:
    run = await setting(database)

    def drawn(conn: Connection) -> None:
        first, second = (merged(conn, run, NEW, 2.0) for _ in range(2))
        debts.charge(conn, NEW, first, PRICE + PRICE // 2, "an older debt", 3.0)
        assert payments.balances(conn, NEW).debt_micro == PRICE + PRICE // 2
        assert draw_effects.settle(conn, draw(conn, second), "passed", ("", "{}"), 5.0, 0.0)

    await database.write(drawn)
    balances = await database.read(lambda conn: payments.balances(conn, NEW))
    assert (balances.debt_micro, balances.escrow_micro) == (2 * PRICE, 2 * PRICE)
    assert await breaches(database) == []
