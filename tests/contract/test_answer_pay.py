"""Pay of answers: what is at stake, what a draw frees, and what comes back to the askers."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, select, update

from coordinator.database import volunteers
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import answer_pay, spending
from coordinator.database.ledger.payments import Balances
from coordinator.database.tables.accounts import volunteers as volunteers_table
from coordinator.database.tables.inference import answer_stakes, answerers
from tests.contract.test_ledger_entries import BOB, MIA, MINT, entries, has, person
from tests.support.account_rows import add_run, breaches, earn, pay


class Desk:
    """The accounts of two machines that answer, and of one that asks."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.asker = "asker"

    async def prepare(self) -> None:
        def write(conn: Connection) -> None:
            for who in (MIA, BOB):
                person(conn, who, standing="vetted")
            person(conn, self.asker)
            self.run = add_run(conn)
            earn(conn, pay(1, 1000, self.asker))
            spending.hold(conn, self.asker, "q", 500, "", 1.0)
            spending.settle(conn, self.asker, "q", 500, 1.0)

        await self.db.write(write)

    async def pay(
        self, name: str, amounts: dict[str, int], roll: float, replica: str = "r"
    ) -> None:
        asked = answer_pay.AnsweredRequest(
            id=name, run_id=self.run, asker_id=self.asker, replica=replica
        )

        def write(conn: Connection) -> None:
            volunteers.lock(conn, amounts)
            answer_pay.pay(conn, asked, amounts, lambda: roll, 5.0)

        await self.db.write(write)

    async def states(self, name: str) -> dict[str, str]:
        return await self.db.read(lambda conn: answer_pay.states(conn, name))

    async def tally(self, who: str) -> tuple[int, ...]:
        query = select(answerers).where(answerers.c.volunteer_id == who)
        row = await self.db.read(lambda conn: conn.execute(query).one())
        return (row.answers, row.paid_micro, row.agreed, row.looked, row.wrong)

    async def compared(self, name: str, who: str, looked: int, wrong: int) -> bool:
        found = (looked, wrong)
        return await self.db.write(
            lambda conn: answer_pay.record_comparison(conn, name, who, found, "not the model", 6.0)
        )


@pytest.fixture
async def desk(database: Database) -> Desk:
    made = Desk(database)
    await made.prepare()
    return made


async def test_the_pay_of_an_answer_is_at_stake_for_each_account_that_made_it(desk: Desk) -> None:
    await desk.pay("one", {MIA: 30, BOB: 20}, roll=1.0)
    posted = (await entries(desk.db))[-2:]
    assert posted == [
        (f"answer:one:{who}", "answer", {MINT: -n, (who, "escrow"): n}, desk.run, None, "", 5.0)
        for who, n in ((BOB, 20), (MIA, 30))
    ]
    assert await desk.states("one") == {MIA: "", BOB: ""}
    assert (await desk.tally(MIA), await desk.tally(BOB)) == ((1, 30, 0, 0, 0), (1, 20, 0, 0, 0))
    query = select(answer_stakes).where(answer_stakes.c.volunteer_id == MIA)
    [row] = await desk.db.read(lambda conn: conn.execute(query).mappings().all())
    assert {name: row[name] for name in row if name != "id"} == {
        "request_id": "one",
        "volunteer_id": MIA,
        "asker_id": desk.asker,
        "run_id": desk.run,
        "amount_micro": 30,
        "state": "",
        "replica": "r",
        "beat_at": 5.0,
    }
    await desk.pay("two", {MIA: 10}, roll=0.0)
    assert await desk.states("two") == {MIA: "drawn"}
    await desk.pay("three", {BOB: 10}, roll=0.0, replica="")
    assert await desk.states("three") == {BOB: "untold"}
    await desk.pay("four", {BOB: 10}, roll=1.0)  # drawn for sure after an untold one
    assert await desk.states("four") == {BOB: "drawn"}
    assert await desk.tally(MIA) == (2, 40, 0, 0, 0)


async def test_a_draw_that_agrees_frees_its_pay_and_all_before_it(desk: Desk) -> None:
    await desk.pay("one", {MIA: 30}, roll=1.0)
    await desk.pay("two", {MIA: 10}, roll=0.0)
    await desk.pay("three", {MIA: 7}, roll=1.0)
    await desk.pay("other", {BOB: 5}, roll=1.0)
    assert not await desk.compared("two", MIA, 40, 0)
    freed = [entry for entry in await entries(desk.db) if entry[-1] == 6.0]
    assert freed == [
        (
            f"answered:{name}:{MIA}",
            "answered",
            {(MIA, "escrow"): -n, (MIA, "earned"): n},
            desk.run,
            None,
            "",
            6.0,
        )
        for name, n in (("one", 30), ("two", 10))
    ]
    assert await desk.tally(MIA) == (3, 47, 1, 40, 0)
    assert await desk.states("three") == {MIA: ""}
    assert await has(desk.db) == Balances(escrow_micro=7, earned_micro=40)
    assert await has(desk.db, BOB) == Balances(escrow_micro=5)
    assert await breaches(desk.db) == []


async def test_nothing_behind_a_waiting_draw_is_freed(desk: Desk) -> None:
    await desk.pay("one", {MIA: 30}, roll=0.0)
    await desk.pay("two", {MIA: 10}, roll=0.0)
    assert not await desk.compared("two", MIA, 40, 0)
    assert await has(desk.db) == Balances(escrow_micro=40)
    await desk.db.write(lambda conn: answer_pay.mark_untold(conn, "one", MIA, 7.0))
    assert await desk.states("one") == {}
    assert await has(desk.db) == Balances(earned_micro=40)


async def test_a_draw_that_disagrees_takes_all_and_pays_the_askers_back(desk: Desk) -> None:
    await desk.pay("one", {MIA: 30}, roll=1.0)
    await desk.pay("two", {MIA: 10, BOB: 5}, roll=0.0)
    before = await has(desk.db, desk.asker)
    assert await desk.compared("two", MIA, 40, 40)
    taken = {key: (kind, memo) for key, kind, *_, memo, at in await entries(desk.db) if at == 6.0}
    assert taken == {
        f"unanswer:one:{MIA}": ("unanswer", "not the model"),
        f"unanswer:two:{MIA}": ("unanswer", "not the model"),
        f"refund:one:{MIA}": ("refund", ""),
        f"refund:two:{MIA}": ("refund", ""),
    }
    after = await has(desk.db, desk.asker)
    assert (before.earned_micro + 40, before.spent_micro - 40) == (
        after.earned_micro,
        after.spent_micro,
    )
    assert await has(desk.db) == Balances()
    assert await has(desk.db, BOB) == Balances(escrow_micro=5)
    assert await desk.tally(MIA) == (2, 40, 0, 40, 40)
    assert await desk.db.write(lambda conn: answer_pay.forfeit(conn, MIA, "", 8.0)) == 0
    assert await desk.db.write(lambda conn: answer_pay.forfeit(conn, BOB, "", 8.0)) == 5


async def test_the_tally_of_compared_tokens_forgets_its_older_half(desk: Desk) -> None:
    await desk.pay("one", {MIA: 30}, roll=0.0)
    assert not await desk.compared("one", MIA, answer_pay.TALLY_MAX, 2)
    assert await desk.tally(MIA) == (1, 30, 1, answer_pay.TALLY_MAX, 2)
    await desk.pay("two", {MIA: 30}, roll=0.0)
    assert not await desk.compared("two", MIA, 1, 0)
    assert await desk.tally(MIA) == (2, 60, 2, (answer_pay.TALLY_MAX + 1) // 2, 1)


async def test_an_account_suspended_while_it_answered_is_not_paid(desk: Desk) -> None:
    told = update(volunteers_table).where(volunteers_table.c.id == MIA)
    await desk.db.write(lambda conn: conn.execute(told.values(standing="suspended")))
    await desk.pay("one", {MIA: 30, BOB: 20}, roll=1.0)
    assert await has(desk.db) == Balances()
    assert await desk.states("one") == {BOB: ""}
    memo = next(entry[5] for entry in await entries(desk.db) if entry[1] == "unanswer")
    assert memo == "this account was suspended"


async def test_draws_of_a_silent_process_are_found_by_its_last_beat(desk: Desk) -> None:
    await desk.pay("one", {MIA: 30}, roll=0.0, replica="here")
    await desk.pay("two", {BOB: 30}, roll=0.0, replica="gone")
    await desk.pay("three", {BOB: 30}, roll=1.0, replica="gone")

    async def abandoned(before: float, replica: str) -> list[tuple[str, str]]:
        return await desk.db.read(lambda conn: answer_pay.abandoned(conn, before, replica))

    assert await abandoned(5.0, "here") == []
    assert await abandoned(5.1, "here") == [("two", BOB)]
    assert await abandoned(5.1, "gone") == [("one", MIA)]
    await desk.db.write(lambda conn: answer_pay.beat(conn, "gone", 9.0))
    assert await abandoned(5.1, "here") == []
    assert await abandoned(9.1, "here") == [("two", BOB)]
    assert await abandoned(5.1, "other") == [("one", MIA)]
