"""Standings and the report of a class: from the ledger, fair, and silent about who does not want to
be shown.
"""

from __future__ import annotations

import csv
import io
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection

from coordinator.accounts.accounts import Principal, Volunteers
from coordinator.accounts.leaderboard import DAYS_MAX, FRESH_S, ROWS
from coordinator.cli.runs import write_report
from coordinator.config import Settings
from coordinator.database import contributions, statistics, verdicts
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import payments, spending
from coordinator.database.ledger.payments import Payment
from shared.errors import BadRequest, NotFound
from shared.protocol.base import ContributionState
from tests.support.account_rows import add_contribution, add_run, join, newcomer
from tests.support.virtual_clock import VirtualClock

DAY = 86_400.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def people(database: Database, clock: VirtualClock) -> Volunteers:
    return Volunteers(database, clock, Settings())


def paid(conn: Connection, run_id: int, who: str, micro: int, at: float) -> Payment:
    """A merged contribution of ten steps, decided and paid at an instant."""
    number = add_contribution(conn, run_id, who, "merged", micro, decided_at=at, received_at=at)
    one = Payment(volunteer_id=who, contribution_id=number, run_id=run_id, amount_micro=micro)
    payments.post_step(conn, "pending", [one], at)
    payments.post_step(conn, "earn", [one], at)
    return one


async def board(
    people: Volunteers, run: str | None = None, days: int | None = None, me: str | None = None
) -> list[tuple[int, str, int]]:
    rows = await people.leaderboard(run, days, me)
    return [(row.rank, row.nickname, row.earned_micro) for row in rows]


async def three(people: Volunteers, database: Database, now: float) -> list[Principal]:
    """Mia earned most lately, Bob long ago and in another run, Eve does not want to be shown."""
    mia, bob = await join(people, "Mia"), await join(people, "Bob")
    eve = await join(people, "Eve", public=False)

    def write(conn: Connection) -> None:
        alpha, beta = add_run(conn, "alpha"), add_run(conn, "beta")
        paid(conn, alpha, mia.volunteer_id, 30, now - 1 * DAY)
        paid(conn, alpha, mia.volunteer_id, 20, now - 10 * DAY)
        paid(conn, beta, bob.volunteer_id, 70, now - 40 * DAY)
        paid(conn, alpha, bob.volunteer_id, 5, now - 2 * DAY)
        paid(conn, alpha, eve.volunteer_id, 60, now - 2 * DAY)

    await database.write(write)
    return [mia, bob, eve]


async def test_windows_and_runs(
    people: Volunteers, database: Database, clock: VirtualClock
) -> None:
    mia, _, eve = await three(people, database, clock.now())
    assert await board(people) == [(1, "Bob", 75), (2, "Mia", 50)]
    assert await board(people, days=7) == [(1, "Mia", 30), (2, "Bob", 5)]
    assert await board(people, days=30) == [(1, "Mia", 50), (2, "Bob", 5)]
    assert await board(people, "beta") == [(1, "Bob", 70)]
    assert await board(people, "alpha", 7) == [(1, "Mia", 30), (2, "Bob", 5)]
    # Who hides sees itself where it would stand; nobody else's rank tells that it is there.
    assert await board(people, me=eve.volunteer_id) == [
        (1, "Bob", 75),
        (2, "Eve", 60),
        (3, "Mia", 50),
    ]
    assert (await people.me(eve)).rank == 2
    assert (await people.me(mia)).rank == 2


async def test_what_a_volunteer_sees_of_itself(
    people: Volunteers, database: Database, clock: VirtualClock
) -> None:
    mia, *_ = await three(people, database, clock.now())

    def write(conn: Connection) -> None:
        run_id = add_run(conn, "gamma")
        paid(conn, run_id, mia.volunteer_id, 8, clock.now())
        number = add_contribution(conn, run_id, mia.volunteer_id, "accepted", 9)
        one = Payment(
            volunteer_id=mia.volunteer_id, contribution_id=number, run_id=run_id, amount_micro=9
        )
        payments.post_step(conn, "pending", [one], clock.now())
        add_contribution(conn, run_id, mia.volunteer_id, "rejected", reason="norm")
        spending.hold(conn, mia.volunteer_id, "h", 10, "", clock.now())
        spending.settle(conn, mia.volunteer_id, "h", 4, clock.now())

    await database.write(write)
    await clock.advance(FRESH_S)
    me = await people.me(mia)
    assert (me.earned_micro, me.pending_micro, me.spent_micro, me.today_micro) == (58, 9, 4, 8)
    assert (me.accepted, me.merged, me.rejected, me.device_s) == (4, 3, 1, 10.0)
    assert me.rank == 2  # spending costs no place


async def test_a_machine_shows_the_pay_of_its_own_work_of_the_last_day(
    people: Volunteers, database: Database, clock: VirtualClock
) -> None:
    mia, now = await join(people, "Mia"), clock.now()
    await day_of(database, mia, now)
    (machine,) = (await people.me(mia)).workers
    assert machine.day_micro == 8 + 4  # waiting work too; none refused, older, or of another


async def test_the_pay_of_a_machine_is_of_now_though_its_day_is_remembered(
    people: Volunteers, database: Database, clock: VirtualClock
) -> None:
    mia, now = await join(people, "Mia"), clock.now()
    assert [machine.day_micro for machine in (await people.me(mia)).workers] == [0]

    def write(conn: Connection, state: ContributionState) -> None:
        number = add_contribution(
            conn, add_run(conn, state), mia.volunteer_id, "checking", 8, worker_id=mia.worker_id
        )
        row = contributions.by_id(conn, number)
        verdicts.decide(conn, row, state, now=now)

    states: tuple[ContributionState, ...] = ("accepted", "rejected", "superseded")
    for state, day_micro in zip(states, (8, 8, 16), strict=True):
        await database.write(partial(write, state=state))
        await clock.advance(30.0)
        (machine,) = (await people.me(mia)).workers
        assert machine.day_micro == day_micro


async def test_the_day_of_a_machine_moves_on_with_the_clock(
    people: Volunteers, database: Database, clock: VirtualClock
) -> None:
    mia, morning = await join(people, "Mia"), clock.now() + DAY - clock.now() % DAY + 60.0
    await day_of(database, mia, morning - 0.5 * DAY)
    await clock.advance(morning - clock.now())
    (machine,) = (await people.me(mia)).workers
    assert machine.day_micro == 8 + 4
    await clock.advance(0.7 * DAY)  # in the evening of the same day
    (machine,) = (await people.me(mia)).workers
    assert machine.day_micro == 0


async def day_of(database: Database, mia: Principal, now: float) -> None:
    """Work of one machine of today, of yesterday, refused, and work of another machine."""

    def write(conn: Connection) -> None:
        run_id, own = add_run(conn, "alpha"), {"worker_id": mia.worker_id}
        add_contribution(conn, run_id, mia.volunteer_id, "merged", 8, decided_at=now - 9, **own)
        add_contribution(conn, run_id, mia.volunteer_id, "accepted", 4, decided_at=now, **own)
        add_contribution(conn, run_id, mia.volunteer_id, "rejected", 2, decided_at=now, **own)
        add_contribution(
            conn, run_id, mia.volunteer_id, "merged", 1, decided_at=now - 2 * DAY, **own
        )
        add_contribution(conn, run_id, mia.volunteer_id, "merged", 32, decided_at=now)

    await database.write(write)


async def test_my_own_row_is_of_now_though_the_others_are_remembered(
    people: Volunteers, database: Database, clock: VirtualClock
) -> None:
    mia, bob, _ = await three(people, database, clock.now())
    assert await board(people) == [(1, "Bob", 75), (2, "Mia", 50)]
    await database.write(lambda conn: paid(conn, 1, mia.volunteer_id, 26, clock.now()))
    assert await board(people, me=mia.volunteer_id) == [(1, "Mia", 76), (2, "Bob", 75)]
    assert await board(people, me=bob.volunteer_id) == [(1, "Bob", 75), (2, "Mia", 50)]
    await clock.advance(FRESH_S)
    assert (await board(people, me=mia.volunteer_id))[0] == (1, "Mia", 76)


async def test_a_reversal_costs_the_place_and_a_ban_the_row(
    people: Volunteers, database: Database, clock: VirtualClock
) -> None:
    _, bob, _ = await three(people, database, clock.now())

    def write(conn: Connection) -> None:
        one = paid(conn, 1, bob.volunteer_id, 100, clock.now())
        payments.post_step(conn, "reverse", [one], clock.now(), "wrong")

    assert (await board(people))[0] == (1, "Bob", 75)
    await database.write(write)
    await clock.advance(FRESH_S)
    assert (await board(people))[0] == (1, "Bob", 75)
    await people.ban("Bob")
    assert await board(people) == [(1, "Mia", 50)]


async def test_equal_credits_share_a_place_and_mine_is_always_there(
    people: Volunteers, database: Database, clock: VirtualClock
) -> None:
    me = await join(people, "Zoe")

    def write(conn: Connection) -> None:
        run_id = add_run(conn)
        paid(conn, run_id, me.volunteer_id, 1, clock.now())
        for n in range(ROWS + 5):
            paid(conn, run_id, newcomer(f"p{n}").volunteer_id, 10 if n < 3 else 5, clock.now())

    for n in range(ROWS + 5):
        await people.register(newcomer(f"p{n}", nickname=f"person {n}"))
    await database.write(write)
    rows = await board(people, me=me.volunteer_id)
    assert len(rows) == ROWS + 1
    assert [rank for rank, *_ in rows[:5]] == [1, 1, 1, 4, 4]
    assert rows[-1] == (ROWS + 6, "Zoe", 1)


async def test_senseless_questions_are_refused(people: Volunteers) -> None:
    for days in (0, -1, DAYS_MAX + 1):
        with pytest.raises(BadRequest, match="between 1 and"):
            await people.leaderboard(None, days)
    with pytest.raises(NotFound, match="omega"):
        await people.leaderboard("omega")
    assert await people.leaderboard() == ()


async def test_the_report_of_a_class(
    people: Volunteers,
    database: Database,
    clock: VirtualClock,
    capsys: pytest.CaptureFixture[str],
) -> None:
    invites = await people.invites.create(["=Mia Meyer", "Bob Baker", "Carl Chan"])
    start = clock.now()
    mia = await join(people, "Mia", code=invites[0].code)
    await clock.advance(1)
    await join(people, "Bob", code=invites[1].code)
    await clock.advance(1)
    await join(people, "guest")
    await clock.advance(1)
    helper = await join(people, "helper")
    await clock.advance(60)

    def write(conn: Connection) -> None:
        alpha, beta = add_run(conn, "alpha"), add_run(conn, "beta")
        paid(conn, alpha, mia.volunteer_id, 1_500_000, clock.now())
        paid(conn, beta, mia.volunteer_id, 900, clock.now())
        for reason in ("norm", "norm", "stale"):
            add_contribution(conn, alpha, mia.volunteer_id, "rejected", reason=reason)
        number = add_contribution(conn, alpha, helper.volunteer_id, "accepted", 7)
        one = Payment(
            volunteer_id=helper.volunteer_id, contribution_id=number, run_id=alpha, amount_micro=7
        )
        payments.post_step(conn, "pending", [one], clock.now())

    await database.write(write)
    rows = await people.report("alpha")
    assert [(row.label, row.nickname, row.state) for row in rows] == [
        ("=Mia Meyer", "Mia", "active"),
        ("Bob Baker", "Bob", "active"),
        ("", "helper", "active"),
        ("Carl Chan", "", "invited"),
    ]
    assert rows[0].work.rejected == {"norm": 2, "stale": 1}
    assert (rows[0].first_seen, rows[0].last_seen) == (start, start)
    write_report(rows)
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert table[0]["label"] == "'=Mia Meyer"  # not a formula
    assert table[0]["credits_earned"] == "1.500000"
    assert [table[0][f"rejected{reason}"] for reason in ("", "_norm", "_stale")] == ["3", "2", "1"]
    assert (table[0]["accepted"], table[0]["device_seconds"]) == ("1", "2.5")
    assert table[0]["first_seen"] == "2023-11-14 22:13"  # UTC
    assert table[1]["accepted"] == "0"
    assert (table[2]["credits_earned"], table[2]["credits_pending"]) == ("0.000000", "0.000007")
    assert table[3]["state"] == "invited"
    with pytest.raises(NotFound, match="omega"):
        await people.report("omega")


async def test_the_list_of_the_organiser_sums_over_all_runs(
    people: Volunteers, database: Database, clock: VirtualClock
) -> None:
    await three(people, database, clock.now())
    rows = {row.nickname: row for row in await people.list()}
    assert (rows["Bob"].earned_micro, rows["Bob"].work.accepted, rows["Bob"].machines) == (75, 2, 1)
    shown = await people.show("Eve")
    assert (shown.person.public, shown.person.earned_micro, len(shown.machines)) == (False, 60, 1)


async def test_who_is_shown_can_be_changed_later(
    people: Volunteers, database: Database, clock: VirtualClock
) -> None:
    mia, _, eve = await three(people, database, clock.now())
    assert [name for _, name, _ in await board(people)] == ["Bob", "Mia"]
    await people.set_public(eve, True)
    await people.set_public(mia, False)
    assert [name for _, name, _ in await board(people)] == ["Bob", "Eve"]
    assert (await people.me(eve)).public
    assert not (await people.me(mia)).public
    mine = await board(people, me=mia.volunteer_id)
    assert [name for _, name, _ in mine] == ["Bob", "Eve", "Mia"]


async def test_other_windows_and_changes_of_visibility_compute_nothing_again(
    people: Volunteers, database: Database, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    mia, _, eve = await three(people, database, clock.now())
    computed: list[float | None] = []
    really = statistics.standings

    def counted(conn: Connection, run_id: int | None, since: float | None) -> Any:
        computed.append(since)
        return really(conn, run_id, since)

    monkeypatch.setattr(statistics, "standings", counted)
    for days in range(1, DAYS_MAX + 1, 10):
        await people.leaderboard(window_days=days)
        await people.set_public(eve, bool(days % 20))
        await people.set_public(mia, True)
    assert len(computed) <= 6
