"""Forward checks as stored, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from functools import partial

from sqlalchemy import Connection

from coordinator.database import checks, contributions, standings, volunteers
from coordinator.database.engine.open import Database
from coordinator.rules.checks import Result
from coordinator.rules.standing import PASSED_MIN
from shared.workloads.base import ForwardFigures
from tests.contract.test_escrow import FRIEND, NEW, setting
from tests.support.account_rows import add_contribution, add_run

GOOD = ForwardFigures(drop=0.2, gap=0.1)


def checked(conn: Connection, run: int, who: str, result: Result = "passed") -> int:
    number = add_contribution(conn, run, who, "checking", vetted=who == FRIEND)
    checks.add(conn, contributions.by_id(conn, number), GOOD, result, 1.0)
    return number


async def test_ten_passed_vet_an_account_and_what_it_has_waiting(database: Database) -> None:
    run = await setting(database)
    last = 0
    for passed in range(1, PASSED_MIN + 1):
        last = await database.write(lambda conn: checked(conn, run, NEW))
        account = await database.read(lambda conn: volunteers.existing(conn, NEW))
        assert account.passed == account.forward_streak == passed
        assert account.standing == ("vetted" if passed == PASSED_MIN else "probation")
    row = await database.read(lambda conn: contributions.by_id(conn, last))
    assert row.vetted
    await database.write(lambda conn: checked(conn, run, NEW, "failed"))
    account = await database.read(lambda conn: volunteers.existing(conn, NEW))
    assert (account.standing, account.passed, account.forward_streak) == ("vetted", PASSED_MIN, 0)


async def test_two_replicas_that_check_the_same_count_it_once(database: Database) -> None:
    run = await setting(database)
    number = await database.write(lambda conn: add_contribution(conn, run, NEW, "checking"))

    def add(conn: Connection, result: Result) -> Result:
        return checks.add(conn, contributions.by_id(conn, number), GOOD, result, 1.0)

    found = await asyncio.gather(
        database.write(lambda conn: add(conn, "passed")),
        database.write(lambda conn: add(conn, "unclear")),
    )
    assert found[0] == found[1]
    account = await database.read(lambda conn: volunteers.existing(conn, NEW))
    assert account.passed == (found[0] == "passed")


async def test_only_vetted_volunteers_are_a_measure_for_others(database: Database) -> None:
    """Overfitted work of newcomers once raised the gap that honest work had to reach."""
    run = await setting(database)
    for who in (NEW, NEW, FRIEND, FRIEND):
        await database.write(partial(checked, run=run, who=who))
    assert await database.read(lambda conn: checks.peers(conn, run, 64)) == [GOOD]


async def test_the_cost_of_checks_is_beside_the_work_that_was_accepted(database: Database) -> None:
    run = await setting(database)

    def work(conn: Connection) -> None:
        for state, train_s in (("merged", 60.0), ("superseded", 40.0), ("rejected", 1000.0)):
            add_contribution(conn, run, NEW, state, train_s=train_s)
        looked_at = checked(conn, run, NEW)
        checked(conn, run, NEW, "unclear")
        contributions.checked(conn, looked_at, 1.5)
        contributions.checked(conn, looked_at, 0.5)  # and done again
        replayed = add_contribution(conn, run, NEW, "merged", kind="games", train_s=0.0)
        contributions.checked(conn, replayed, 3.0)
        another = add_run(conn, "another")
        contributions.checked(conn, checked(conn, another, NEW), 99.0)

    await database.write(work)
    cost = await database.read(lambda conn: standings.cost(conn, run))
    assert (cost.forward.passed, cost.forward.unclear, cost.recompute.passed) == (1, 1, 0)
    assert (cost.checked_s, cost.work_s, cost.games, cost.share) == (5.0, 100.0, 1, 0.05)
    nothing = await database.read(lambda conn: standings.cost(conn, 0))
    assert nothing.share is None
