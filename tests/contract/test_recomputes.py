"""Draws from the order to the result, on SQLite and PostgreSQL."""

from __future__ import annotations

import msgspec
import pytest
from sqlalchemy import Connection, update

from coordinator.accounts.accounts import Principal, Volunteers
from coordinator.checking import draw_effects
from coordinator.config import Settings
from coordinator.database import contributions, experience, recomputes, volunteers
from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.open_database import Database
from coordinator.database.recomputes import DrawTerms, Holder, RecomputeRow, StoredCase
from coordinator.database.tables.contributions import contributions as rows
from coordinator.rules.draws import (
    CHECKER_AWAY_S,
    RECOMPUTE_FLOPS_MAX,
    Result,
    device_kind,
)
from shared.workloads.base import ChunkRef, DatasetManifest
from shared.workloads.experience import RolloutSums
from tests.contract.test_escrow import FRIEND, NEW, add, draw, have, merged, setting, settle
from tests.support.account_rows import add_contribution
from tests.support.recompute_rows import first
from tests.support.virtual_clock import VirtualClock
from tests.support.workloads.tiny_gpt import SMALL, job


def order(
    conn: Connection,
    row: ContributionRow,
    *,
    flops: float = 1e9,
    kind: str = "cpu",
    work: str = "{}",
) -> RecomputeRow:
    """A draw of a contribution."""
    told = DrawTerms(work=work, flops=flops, kind=kind)
    volunteers.count_draw(conn, row.volunteer_id)
    return recomputes.add(conn, row, told)


def checker(now: float) -> Holder:
    return Holder.checker("a" * 32, now)


async def test_draws_of_another_kind_take_no_places_among_the_newest(database: Database) -> None:
    run = await setting(database)

    def drawn(conn: Connection, kind: str, result: Result) -> ContributionRow:
        number = merged(conn, run, NEW, 1.0)
        conn.execute(update(rows).where(rows.c.id == number).values(kind=kind))
        row = contributions.by_id(conn, number)
        order(conn, row, work=f'{{"of": "{kind}"}}')
        assert recomputes.end(conn, number, result, ("", "{}"), 2.0)
        return row

    def play(conn: Connection) -> None:
        drawn(conn, "experience", "passed")
        row = drawn(conn, "experience", "passed")
        drawn(conn, "delta", "passed")
        drawn(conn, "delta", "unproven")
        assert recomputes.passed_of(conn, row, 2) == ['{"of": "experience"}'] * 2

    await database.write(play)


async def test_figures_of_reports_are_the_median_of_good_work(database: Database) -> None:
    run = await setting(database)

    def play(conn: Connection) -> None:
        told = [
            ("experience", "accepted", 3.0),
            ("experience", "superseded", 5.0),
            ("experience", "accepted", 1e300),
        ]
        told += [("experience", "rejected", 1e300), ("delta", "merged", 1e300)]
        for kind, state, value in told:
            report = f'{{"metrics": {{"speed": {value}}}, "samples": 40, "train_s": 4}}'
            add_contribution(conn, run, NEW, state, kind=kind, report=report)
        assert experience.reported(conn, run, "speed", ("experience",)) == 5.0
        assert experience.reported(conn, run, "speed", ("experience",), a_second=True) == 50.0
        assert experience.reported(conn, run, "other", ("experience",)) is None

    await database.write(play)


async def test_judged_answers_are_summed_by_version(database: Database) -> None:
    run = await setting(database)

    def sums(version: int, answers: int) -> RolloutSums:
        return RolloutSums(
            version=version,
            answers=answers,
            reward=answers / 4,
            tokens=3 * answers,
            surprise=answers / 2,
            cut=1,
        )

    def play(conn: Connection) -> None:
        experience.add_rollouts(conn, run, ())
        assert experience.rollouts(conn, run) == []
        experience.add_rollouts(conn, run, (sums(3, 8), sums(2, 4)))
        experience.add_rollouts(conn, run, (sums(3, 16),))
        third = msgspec.structs.replace(sums(3, 24), cut=2)
        assert experience.rollouts(conn, run) == [sums(2, 4), third]
        assert experience.rollouts(conn, run + 1) == []

    await database.write(play)


async def test_a_draw_waits_at_once_and_ends_once(database: Database) -> None:
    run = await setting(database)

    def play(conn: Connection) -> None:
        row = contributions.by_id(conn, merged(conn, run, NEW, 1.0))
        order(conn, row)
        assert recomputes.waiting(conn) == 1
        found = first(conn, 99.0)
        assert found is not None
        assert draw_effects.settle(conn, found, "passed", ("", "{}"), 2.0)
        assert not draw_effects.settle(conn, found, "failed", ("", "{}"), 3.0)  # another replica
        account = volunteers.existing(conn, NEW)
        assert (account.proofs, account.standing) == (1, "probation")
        assert recomputes.waiting(conn) == 0
        assert recomputes.blobs_in_use(conn) == set()

    await database.write(play)


async def test_games_that_a_learner_read_are_kept_until_its_task_was_done_again(
    database: Database,
) -> None:
    """A volunteer whose task was drawn before they are deleted could not be refuted."""
    run = await setting(database)
    window = DatasetManifest(
        name="window", kind="experience", licence="", source="",
        chunks=(ChunkRef(sha256="d" * 64, size=1, items=1),),
    )  # fmt: skip

    def play(conn: Connection) -> None:
        row = contributions.by_id(conn, merged(conn, run, NEW, 1.0))
        case = StoredCase(job=job(SMALL), base_sha256="e" * 64, chunks=(0,), window=window)
        order(conn, row, work=msgspec.json.encode(case).decode())
        assert "d" * 64 in recomputes.blobs_in_use(conn)
        recomputes.end(conn, row.id, "passed", ("", "{}"), 2.0)
        assert recomputes.blobs_in_use(conn) == set()

    await database.write(play)


async def test_a_device_of_a_long_name_has_a_class_that_is_stored(database: Database) -> None:
    """A worker names its devices: 32 characters, which no column of a class must refuse."""
    run = await setting(database)

    def play(conn: Connection) -> None:
        row = contributions.by_id(conn, merged(conn, run, NEW, 1.0))
        kind = device_kind("x" * 32)
        order(conn, row, kind=kind)
        assert first(conn, 99.0) is not None
        assert first(conn, 99.0, {kind}) is None
        assert recomputes.take_for_checker(conn, checker(99.0), kind, {kind}) is not None

    await database.write(play)


async def test_a_checker_that_is_gone_serves_its_class_no_more(database: Database) -> None:
    await setting(database)

    def play(conn: Connection) -> None:
        assert recomputes.see_checker(conn, "desk/cuda", "cuda", 10.0)
        assert not recomputes.see_checker(conn, "desk/cuda", "cuda", 11.0)
        assert recomputes.served(conn, 12.0) == {"cuda"}
        assert recomputes.served(conn, 12.0 + CHECKER_AWAY_S) == set()

    await database.write(play)


async def test_what_cannot_be_done_here_now_waits_with_its_reason(database: Database) -> None:
    """A draw that is dropped would be work that nobody ever looks at."""
    run = await setting(database)

    def play(conn: Connection) -> None:
        large = order(
            conn,
            contributions.by_id(conn, merged(conn, run, NEW, 1.0)),
            flops=2 * RECOMPUTE_FLOPS_MAX,
        )
        assert first(conn, 99.0) is None  # for a checker
        assert recomputes.take_for_checker(conn, checker(99.0), "cpu", ()) is not None
        small = order(conn, contributions.by_id(conn, merged(conn, run, NEW, 1.0)))
        row = recomputes.take(conn, Holder(owner="a", now=99.0, until=114.0))
        assert row is not None
        assert recomputes.JOBS.release(conn, row, 600.0, message="no library")
        assert first(conn, 599.0) is None
        found = first(conn, 600.0)
        assert found is not None
        assert (found.contribution_id, found.message) == (small.contribution_id, "no library")
        assert recomputes.open_of(conn, NEW) == [large.contribution_id, small.contribution_id]

    await database.write(play)


async def test_a_recompute_that_one_process_makes_goes_to_no_other(database: Database) -> None:
    run = await setting(database)

    def play(conn: Connection) -> None:
        order(conn, contributions.by_id(conn, merged(conn, run, NEW, 1.0)))
        server, other = (Holder(owner=name, now=99.0, until=114.0) for name in ("a", "b"))
        row = recomputes.take(conn, server)
        assert row is not None
        assert recomputes.take(conn, other) is None
        assert recomputes.take_for_checker(conn, checker(99.0), "cpu", ()) is None
        later = recomputes.take_for_checker(conn, checker(114.0), "cpu", ())  # silent for too long
        assert later is not None
        assert later.contribution_id == row.contribution_id
        assert not recomputes.JOBS.renew(conn, row, 129.0)
        assert not recomputes.JOBS.release(conn, row)
        assert recomputes.take(conn, Holder(owner="a", now=114.0, until=129.0)) is None
        assert recomputes.open_of(conn, NEW) == [row.contribution_id]

    await database.write(play)


def sybil(conn: Connection, run: int, number: int, network: str, flops: float) -> None:
    """An account of its own with a draw that waits."""
    who = f"volunteer-sybil-{number:03}"
    add(conn, who, network=network)
    row = contributions.by_id(conn, add_contribution(conn, run, who, "accepted"))
    order(conn, row, flops=flops)


def done(conn: Connection, row: RecomputeRow, now: float) -> None:
    settle(conn, row, "passed", now)


async def test_a_crowd_of_one_network_waits_as_one(database: Database) -> None:
    """New accounts cost seconds; the line is shared by who stands behind them."""
    run = await setting(database, network="1.2.3.0")

    def play(conn: Connection) -> None:
        for number in range(20):
            sybil(conn, run, number, "9.9.9.0", 1e12)
        honest = order(conn, contributions.by_id(conn, merged(conn, run, NEW, 1.0)), flops=1e12)
        seen = []
        while honest.contribution_id not in seen:
            found = first(conn, 100.0)
            assert found is not None
            seen.append(found.contribution_id)
            done(conn, found, 100.0)
        assert len(seen) <= 2

    await database.write(play)


async def test_who_jams_with_huge_tasks_does_not_stand_before_small_ones(
    database: Database,
) -> None:
    run = await setting(database)

    def play(conn: Connection) -> None:
        for number in range(5):
            sybil(conn, run, number, "", 4e13)
        honest = order(conn, contributions.by_id(conn, merged(conn, run, NEW, 1.0)), flops=1e11)
        found = first(conn, 100.0)
        assert found is not None
        assert found.contribution_id == honest.contribution_id

    await database.write(play)


async def test_the_server_does_what_a_checker_is_too_busy_for(database: Database) -> None:
    """Otherwise strangers' huge tasks occupy the only checker of a class, and the rest waits."""
    run = await setting(database)

    def play(conn: Connection) -> None:
        sybil(conn, run, 0, "", 4e13)
        assert recomputes.take_for_checker(conn, checker(100.0), "cpu", {"cpu"}) is not None
        small, like = (
            order(conn, contributions.by_id(conn, merged(conn, run, NEW, 1.0)), flops=flops)
            for flops in (1e12, 2e13)
        )
        found = first(conn, 100.0, {"cpu"})
        assert found is not None
        assert found.contribution_id == small.contribution_id
        done(conn, found, 100.0)
        assert first(conn, 100.0, {"cpu"}) is None  # the checker's
        assert first(conn, 100.0) is not None, like

    await database.write(play)


async def test_newcomers_have_half_at_most(database: Database) -> None:
    run = await setting(database)

    def play(conn: Connection) -> None:
        for number in range(6):
            sybil(conn, run, number, "", 1e10)
        for _ in range(6):
            order(conn, contributions.by_id(conn, merged(conn, run, FRIEND, 1.0)), flops=1e10)
        whose = []
        for _ in range(6):
            found = first(conn, 100.0)
            assert found is not None
            whose.append(found.volunteer_id == FRIEND)
            done(conn, found, 100.0)
        assert whose.count(True) == 3

    await database.write(play)


async def test_who_passed_a_draw_does_not_wait_behind_a_crowd_of_fresh_accounts(
    database: Database,
) -> None:
    """Each of a crowd fails at once and comes again as another; an honest newcomer waits once."""
    run = await setting(database)

    def play(conn: Connection) -> None:
        passed = order(conn, contributions.by_id(conn, merged(conn, run, NEW, 1.0)), flops=1e11)
        done(conn, passed, 10.0)
        for number in range(20):
            sybil(conn, run, number, "", 1e10)
        second = order(conn, contributions.by_id(conn, merged(conn, run, NEW, 1.0)), flops=1e12)
        found = first(conn, 100.0)
        assert found is not None
        assert found.contribution_id == second.contribution_id
        other = first(conn, 100.0, (), found)  # beside it newcomers have their turn
        assert other is not None
        assert other.volunteer_id != NEW

    await database.write(play)


async def test_who_proves_nothing_earns_nothing_and_is_not_vetted(database: Database) -> None:
    run = await setting(database)

    def silent(conn: Connection) -> None:
        for _ in range(20):
            settle(conn, draw(conn, merged(conn, run, NEW, 1.0)), "unproven")
        for _ in range(60):
            merged(conn, run, NEW, 2.0)
        account = volunteers.existing(conn, NEW)
        assert account.standing == "probation"

    await database.write(silent)
    assert (await have(database))[2] == 0


async def test_a_newcomer_is_told_how_long_the_line_takes_at_the_speed_of_lately(
    database: Database,
) -> None:
    run = await setting(database)

    def play(conn: Connection) -> None:
        first = order(conn, contributions.by_id(conn, merged(conn, run, NEW, 1.0)), flops=1e12)
        assert recomputes.backlog_s(conn, 100.0, (), NEW) is None  # nothing was done yet
        contributions.checked(conn, first.contribution_id, 30.0)
        done(conn, first, 100.0)
        for _ in range(8):
            order(conn, contributions.by_id(conn, merged(conn, run, NEW, 1.0)), flops=4.5e13)
        assert recomputes.backlog_s(conn, 200.0, (), NEW) == pytest.approx(3 * 3600.0)
        large = contributions.by_id(conn, merged(conn, run, FRIEND, 1.0))
        order(conn, large, flops=2 * RECOMPUTE_FLOPS_MAX)  # for a checker, and there is none
        assert recomputes.backlog_s(conn, 200.0, (), NEW) == pytest.approx(3 * 3600.0)
        assert recomputes.backlog_s(conn, 200.0, (), FRIEND) is None
        assert recomputes.backlog_s(conn, 200.0, ("cpu",), FRIEND) == pytest.approx(13_800.0)

    await database.write(play)
    people = Volunteers(database, VirtualClock(200.0), Settings())
    told = [
        (await people.me(Principal(volunteer_id=who, worker_id="w", nickname=who))).proved_in_s
        for who in (NEW, FRIEND)
    ]
    assert told == [pytest.approx(3 * 3600.0), None]
