"""Teams: who may found one, who is in it, and what counts for it."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, insert, select

from coordinator.accounts.accounts import Principal, Volunteers
from coordinator.accounts.leaderboard import FRESH_S
from coordinator.accounts.teams import FOUNDED_MAX, JOINS_MAX, MEMBERS_MAX, Teams
from coordinator.config import Settings
from coordinator.database import memberships
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import payments
from coordinator.database.ledger.payments import Payment
from coordinator.database.tables.accounts import volunteers as volunteers_table
from shared.errors import Conflict, Forbidden, InvalidName, NotFound, TooManyRequests
from shared.protocol.teams import TeamCreate, TeamJoin
from tests.support.account_rows import add_contribution, add_run, join
from tests.support.virtual_clock import VirtualClock

DAY = 86_400.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def people(database: Database, clock: VirtualClock) -> Volunteers:
    return Volunteers(database, clock, Settings())


@pytest.fixture
def teams(database: Database, clock: VirtualClock) -> Teams:
    return Teams(database, clock)


async def earns(database: Database, clock: VirtualClock, who: Principal, micro: int) -> None:
    """Pay for a merged contribution, now."""
    now = clock.now()

    def write(conn: Connection) -> None:
        run_id = add_run(conn, f"run-{now:.0f}-{micro}-{who.nickname}")
        number = add_contribution(
            conn, run_id, who.volunteer_id, "merged", micro, decided_at=now, received_at=now
        )
        one = Payment(
            volunteer_id=who.volunteer_id, contribution_id=number, run_id=run_id, amount_micro=micro
        )
        payments.post_pending_many(conn, [one], now)
        payments.post_earned_many(conn, [one], now)

    await database.write(write)
    await clock.advance(2 * FRESH_S + 1.0)


async def ranks(teams: Teams, days: int | None = None) -> list[tuple[int, str, int, int]]:
    return [(r.rank, r.name, r.earned_micro, r.members) for r in await teams.board(None, days)]


async def test_a_team_has_what_was_earned_while_its_members_were_in_it(
    people: Volunteers, teams: Teams, database: Database, clock: VirtualClock
) -> None:
    mia, bob = await join(people, "Mia"), await join(people, "Bob")
    await earns(database, clock, mia, 50)  # before there was a team
    made = await teams.create(mia, TeamCreate(name="Forest"))
    assert (made.name, made.earned_micro, made.rank) == ("Forest", 0, None)
    await clock.advance(1.0)
    joined = await teams.join(bob, TeamJoin(code=made.code.lower().replace("-", " ")))
    assert [member.nickname for member in joined.members] == ["Mia", "Bob"]
    await earns(database, clock, mia, 30)
    await earns(database, clock, bob, 7)
    assert await ranks(teams) == [(1, "Forest", 37, 2)]
    await clock.advance(10 * DAY)
    await teams.leave(bob)
    await teams.leave(bob)  # twice is once
    await earns(database, clock, bob, 100)
    await earns(database, clock, mia, 3)
    assert await ranks(teams) == [(1, "Forest", 40, 1)]  # what Bob earned for it stays
    assert await ranks(teams, 7) == [(1, "Forest", 3, 1)]
    mine = await teams.mine(mia)
    assert (mine.rank, mine.teams, mine.earned_micro, mine.mine_micro) == (1, 1, 40, 33)
    assert await teams.mine(bob) == type(mine)()


async def test_who_may_found_one(
    people: Volunteers, teams: Teams, database: Database, clock: VirtualClock
) -> None:
    mia, bob = await join(people, "Mia"), await join(people, "Bob")
    with pytest.raises(Forbidden, match="merged contribution"):
        await teams.create(mia, TeamCreate(name="Forest"))
    await earns(database, clock, mia, 1)
    await earns(database, clock, bob, 1)
    for bad in ("x" * 200, "adm\u0131n", "a\u202eb", "", "organiser", "<b>"):
        with pytest.raises(InvalidName):
            await teams.create(mia, TeamCreate(name=bad))
    await teams.create(mia, TeamCreate(name="Forest"))
    with pytest.raises(Conflict, match="leave"):
        await teams.create(mia, TeamCreate(name="Meadow"))
    with pytest.raises(Conflict, match="called like"):  # for an eye that skims it is the same
        await teams.create(bob, TeamCreate(name="F0REST"))
    await teams.leave(mia)
    for number in range(1, FOUNDED_MAX):
        await teams.create(mia, TeamCreate(name=f"Meadow {number}"))
        await teams.leave(mia)
    with pytest.raises(Forbidden, match="founded"):
        await teams.create(mia, TeamCreate(name="One more"))


async def test_a_volunteer_is_in_one_team_and_cannot_fill_the_list_by_changing(
    people: Volunteers, teams: Teams, database: Database, clock: VirtualClock
) -> None:
    mia, bob, eve = [await join(people, name) for name in ("Mia", "Bob", "Eve")]
    await earns(database, clock, mia, 1)
    await earns(database, clock, bob, 1)
    forest = await teams.create(mia, TeamCreate(name="Forest"))
    meadow = await teams.create(bob, TeamCreate(name="Meadow"))
    with pytest.raises(NotFound, match="no team has this code"):
        await teams.join(eve, TeamJoin(code="AAAA-AAAA-AAAA"))
    await teams.join(eve, TeamJoin(code=forest.code))
    await teams.join(eve, TeamJoin(code=forest.code))
    with pytest.raises(Conflict, match="Forest"):
        await teams.join(eve, TeamJoin(code=meadow.code))
    for _ in range(JOINS_MAX - 1):
        await teams.leave(eve)
        await teams.join(eve, TeamJoin(code=forest.code))
    await teams.leave(eve)
    with pytest.raises(TooManyRequests):
        await teams.join(eve, TeamJoin(code=forest.code))
    await clock.advance(DAY + 1.0)
    assert (await teams.join(eve, TeamJoin(code=forest.code))).size == 2


async def test_a_team_takes_a_thousand_members_and_not_one_more(
    people: Volunteers, teams: Teams, database: Database, clock: VirtualClock
) -> None:
    mia, bob, eve = [await join(people, name) for name in ("Mia", "Bob", "Eve")]
    await earns(database, clock, mia, 1)
    forest = await teams.create(mia, TeamCreate(name="Forest"))

    def fill(conn: Connection) -> None:
        template = conn.execute(select(volunteers_table).limit(1)).mappings().one()
        crowd = [
            {**template, "id": f"crowd-{n:04}", "nickname": f"c{n}", "nickname_key": f"c{n}"}
            for n in range(MEMBERS_MAX - 2)
        ]
        conn.execute(insert(volunteers_table), crowd)
        team = memberships.by_code(conn, forest.code.replace("-", ""))
        assert team is not None
        for one in crowd:
            memberships.join(conn, team.id, one["id"], 1.0)

    await database.write(fill)
    assert (await teams.join(bob, TeamJoin(code=forest.code))).size == MEMBERS_MAX == 1000
    with pytest.raises(Conflict, match="has 1000 members"):
        await teams.join(eve, TeamJoin(code=forest.code))
    await teams.leave(bob)
    assert (await teams.join(eve, TeamJoin(code=forest.code))).size == MEMBERS_MAX


async def test_who_hides_counts_and_is_not_named(
    people: Volunteers, teams: Teams, database: Database, clock: VirtualClock
) -> None:
    mia, eve = await join(people, "Mia"), await join(people, "Eve", public=False)
    await earns(database, clock, mia, 1)
    made = await teams.create(mia, TeamCreate(name="Forest"))
    await teams.join(eve, TeamJoin(code=made.code))
    await earns(database, clock, eve, 40)
    page = await teams.page("forest")
    assert (page.size, page.earned_micro) == (2, 40)
    assert [member.nickname for member in page.members] == ["Mia"]
    assert [member.nickname for member in (await teams.mine(eve)).members] == ["Eve", "Mia"]
    await people.forget("Eve")
    page = await teams.page("Forest")
    assert (page.size, page.earned_micro) == (1, 40)


async def test_the_organiser_renames_and_removes(
    people: Volunteers, teams: Teams, database: Database, clock: VirtualClock
) -> None:
    mia, bob = await join(people, "Mia"), await join(people, "Bob")
    await earns(database, clock, mia, 1)
    await earns(database, clock, bob, 1)
    await teams.create(mia, TeamCreate(name="Forest"))
    await teams.create(bob, TeamCreate(name="Meadow"))
    with pytest.raises(Conflict):
        await teams.rename("Forest", "Meadow")
    assert await teams.rename("Forest", "Wood") == "Wood"
    assert [each.name for each in await teams.list()] == ["Wood", "Meadow"]
    assert await teams.remove("wood") == "Wood"
    assert (await teams.mine(mia)).name == ""
    with pytest.raises(NotFound):
        await teams.page("Wood")
    await earns(database, clock, mia, 5)  # what is hers is hers
    assert await ranks(teams) == []


async def test_a_team_founded_after_another_was_removed_inherits_nothing(
    people: Volunteers, teams: Teams, database: Database, clock: VirtualClock
) -> None:
    """SQLite gives the number of a removed row to the next one; the board is a moment old."""
    mia, bob = await join(people, "Mia"), await join(people, "Bob")
    for who in (mia, bob):
        await earns(database, clock, who, 1)
    await teams.create(mia, TeamCreate(name="Forest"))
    await earns(database, clock, mia, 37)
    assert await ranks(teams) == [(1, "Forest", 37, 1)]
    await teams.remove("Forest")
    await teams.create(bob, TeamCreate(name="Meadow"))
    assert await ranks(teams) == []
