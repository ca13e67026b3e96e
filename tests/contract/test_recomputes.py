"""Recomputes from the order to the result, on SQLite and PostgreSQL."""

from __future__ import annotations

import msgspec
import pytest
from sqlalchemy import Connection, insert, update

from coordinator.database import checks, contributions, recomputes, volunteers
from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.open import Database
from coordinator.database.ledger import escrow
from coordinator.database.tables.contributions import contributions as rows
from coordinator.database.tables.contributions import uploads
from coordinator.rules.checks import (
    ACCOUNT_OPEN_MAX,
    AUDITOR_AWAY_S,
    AUDITS_WAITING_MAX,
    NEWCOMERS_OPEN_MAX,
    Result,
    device_kind,
)
from coordinator.rules.standing import (
    DAY_S,
    PASSED_MIN,
    UNCOMPARED_MAX,
    UNPROVEN_MAX,
    VEST_AFTER,
    VEST_DAYS,
)
from shared.protocol.contributions import Commitment, SubmitRequest
from shared.workloads.base import ChunkRef, DatasetManifest, ForwardFigures
from tests.contract.test_escrow import FRIEND, NEW, have, merged, setting
from tests.support.account_rows import add_contribution

INNER, LEFT = "a" * 64, "b" * 64


def reported(commitment: Commitment) -> str:
    """A report with a commitment."""
    said = SubmitRequest(
        attempt=1, base_version=0, codec="int8", sha256="c" * 64, size=1, steps=1, samples=1,
        loss_first=1.0, loss_last=1.0, commitment=commitment,
    )  # fmt: skip
    return msgspec.json.encode(said).decode()


def committed(
    conn: Connection, run: int, inner: str, left: str, residual: str = "", kept: str = ""
) -> ContributionRow:
    """A contribution that is committed to states of an optimiser and of a codec."""
    number = merged(conn, run, NEW, 1.0)
    report = reported(Commitment(inner=inner, left=left, residual=residual, kept=kept))
    conn.execute(update(rows).where(rows.c.id == number).values(report=report))
    return contributions.by_id(conn, number)


def order(conn: Connection, row: ContributionRow, wanted: list[str], due_at: float = 10.0) -> None:
    recomputes.add(conn, row, (wanted, "{}"), withheld=False, due_at=due_at)


def arrived(conn: Connection, row: ContributionRow, sha256: str) -> bool:
    """A file of evidence is here; True when all are."""
    conn.execute(
        insert(uploads).values(
            id=sha256[:8], task_id=row.task_id, attempt=1, part=0, tries=0, worker_id=row.worker_id,
            sha256=sha256, size=1, complete=True, created_at=0.0, expires_at=99.0,
            evidence_of=row.id,
        )
    )  # fmt: skip
    return recomputes.arrive(conn, row.id)


async def test_a_recompute_waits_for_all_of_its_evidence_and_ends_once(database: Database) -> None:
    run = await setting(database)

    def play(conn: Connection) -> None:
        row = committed(conn, run, "", LEFT)
        order(conn, row, [INNER, LEFT])
        assert recomputes.waiting(conn) == {"asked": 1}
        assert recomputes.first(conn, 99.0) is None
        assert recomputes.wants(conn, row.id, NEW, LEFT)
        assert not recomputes.wants(conn, row.id, "somebody-else-00001", LEFT)
        assert not recomputes.wants(conn, row.id, NEW, "d" * 64)
        assert not arrived(conn, row, LEFT)
        assert arrived(conn, row, INNER)
        assert not recomputes.arrive(conn, row.id)  # once
        found = recomputes.first(conn, 99.0)
        assert found is not None
        assert recomputes.overdue(conn, 99.0) == []
        assert recomputes.end(conn, found, "passed", "", "{}", 2.0)
        assert not recomputes.end(conn, found, "failed", "", "{}", 3.0)  # another replica
        account = volunteers.existing(conn, NEW)
        assert (account.recompute_streak, account.passed, account.unproven) == (1, 1, 0)
        assert recomputes.waiting(conn) == {}
        assert recomputes.blobs_in_use(conn) == set()

    await database.write(play)


async def test_games_that_a_learner_read_are_kept_until_its_task_was_done_again(
    database: Database,
) -> None:
    """Else who reveals when they are gone cannot be refuted."""
    run = await setting(database)
    window = DatasetManifest(
        name="window", kind="games", licence="", source="",
        chunks=(ChunkRef(sha256="d" * 64, size=1, items=1),),
    )  # fmt: skip

    def play(conn: Connection) -> None:
        row = committed(conn, run, "", LEFT)
        work = msgspec.json.encode({"window": window, "base_sha256": "e" * 64}).decode()
        recomputes.add(conn, row, ([LEFT], work), withheld=False, due_at=10.0)
        assert "d" * 64 in recomputes.blobs_in_use(conn)
        arrived(conn, row, LEFT)
        found = recomputes.first(conn, 99.0)
        assert found is not None
        recomputes.end(conn, found, "passed", "", "{}", 2.0)
        assert recomputes.blobs_in_use(conn) == set()

    await database.write(play)


async def test_a_state_must_be_one_that_the_machine_left(database: Database) -> None:
    run = await setting(database)

    def play(conn: Connection) -> None:
        assert recomputes.follows(conn, committed(conn, run, "", LEFT))  # afresh
        assert recomputes.follows(conn, committed(conn, run, LEFT, INNER))
        assert not recomputes.follows(conn, committed(conn, run, "e" * 64, LEFT))  # made up
        assert recomputes.follows(conn, committed(conn, run, "", LEFT, "", "f" * 64))
        assert recomputes.follows(conn, committed(conn, run, INNER, LEFT, "f" * 64))
        assert not recomputes.follows(conn, committed(conn, run, INNER, LEFT, "e" * 64))

    await database.write(play)


@pytest.mark.parametrize("what", ["state", "residual"])
async def test_what_a_task_left_goes_on_once_and_only_from_good_work(
    database: Database, what: str
) -> None:
    """Made up once, and never drawn, it would turn any number of later tasks into anything, each of
    which is what was leased when it is done again.
    """
    run = await setting(database)

    def task(conn: Connection, began: str, left: str, state: str = "merged") -> bool:
        states = (began, left) if what == "state" else ("", "", began, left)
        row = committed(conn, run, *states)
        good = recomputes.follows(conn, row)
        conn.execute(update(rows).where(rows.c.id == row.id).values(state=state))
        return good

    def play(conn: Connection) -> None:
        assert task(conn, "", LEFT, "rejected")
        assert not task(conn, LEFT, "", "superseded")
        assert task(conn, "", LEFT)
        assert task(conn, LEFT, "1" * 64, "superseded")  # as if it had never been made
        assert task(conn, LEFT, INNER)
        assert not task(conn, LEFT, "2" * 64)
        assert task(conn, INNER, "3" * 64)

    await database.write(play)


async def test_what_is_never_proved_is_paid_into_escrow_until_one_passes(
    database: Database,
) -> None:
    run = await setting(database)

    def unproven(conn: Connection) -> None:
        for _ in range(UNPROVEN_MAX):
            order(conn, committed(conn, run, "", LEFT), [LEFT])
        for row in recomputes.overdue(conn, 11.0):
            assert recomputes.end(conn, row, "unproven", "not revealed", "{}", 11.0)
        for _ in range(VEST_AFTER + 1):
            merged(conn, run, NEW, 12.0)

    await database.write(unproven)
    assert (await have(database))[2] == 0  # nothing is earned

    def proved(conn: Connection) -> None:
        row = committed(conn, run, "", LEFT)
        order(conn, row, [])
        found = recomputes.first(conn, 99.0)
        assert found is not None
        recomputes.end(conn, found, "passed", "", "{}", 13.0)
        assert escrow.vest_due(conn, NEW, 13.0) > 0

    await database.write(proved)
    assert (await have(database))[2] > 0


def redone(conn: Connection, run: int, result: Result, now: float = 2.0) -> None:
    """A contribution whose task was done again, with figures."""
    row = committed(conn, run, "", LEFT)
    order(conn, row, [])
    found = recomputes.first(conn, 99.0)
    assert found is not None
    assert recomputes.end(conn, found, result, "", '{"cosine": 0.5}', now)


def looked_at(conn: Connection, run: int) -> None:
    """A contribution that passed its forward check."""
    row = committed(conn, run, "", LEFT)
    checks.add(conn, row, ForwardFigures(drop=1.0, gap=1.0, noise=0.1), "passed", 2.0)


@pytest.mark.parametrize("proof", ["recompute", "forward"])
async def test_what_cannot_be_compared_is_earned_when_a_check_passed_and_never_suspends(
    database: Database, proof: str
) -> None:
    run = await setting(database)

    def named_another_class(conn: Connection) -> None:
        for _ in range(VEST_AFTER + 1):
            redone(conn, run, "unclear")
        later = (VEST_DAYS + 1) * DAY_S
        assert escrow.vest_aged(conn, later) == 0
        account = volunteers.existing(conn, NEW)
        assert (account.standing, account.trust) == ("probation", 1.0)

    await database.write(named_another_class)
    _, held, earned = await have(database)
    assert held > 0
    assert earned == 0

    def compared(conn: Connection) -> None:
        if proof == "recompute":
            redone(conn, run, "passed", 3.0)
        else:
            looked_at(conn, run)
        assert escrow.vest_due(conn, NEW, 3.0) > 0

    await database.write(compared)
    assert (await have(database))[2] > 0


@pytest.mark.parametrize("invited", [False, True])
async def test_what_can_never_be_compared_ends_the_time_as_a_vetted_account(
    database: Database, invited: bool
) -> None:
    """A stranger vetted by honest work could name another class from then on, and send anything."""
    run = await setting(database, standing="vetted", invited=invited, passed=PASSED_MIN)

    def differs(conn: Connection) -> tuple[str, int, int, bool]:
        waiting = add_contribution(conn, run, NEW, "accepted", vetted=True)
        redone(conn, run, "unclear")
        account = volunteers.existing(conn, NEW)
        row = contributions.by_id(conn, waiting)
        return account.standing, account.passed, account.forward_streak, row.vetted

    def streak(conn: Connection) -> None:
        volunteers.set_volunteer(conn, NEW, forward_streak=50)

    await database.write(streak)
    for _ in range(UNCOMPARED_MAX - 1):  # measured closely from the first on, and trusted so far
        assert await database.write(differs) == ("vetted", PASSED_MIN, 0, True)
    if invited:
        assert await database.write(differs) == ("vetted", PASSED_MIN, 0, True)
        return
    assert await database.write(differs) == ("probation", 0, 0, False)

    def works(conn: Connection) -> str:
        for _ in range(PASSED_MIN):
            looked_at(conn, run)
        return volunteers.existing(conn, NEW).standing

    assert await database.write(works) == "vetted"  # the way back is work that a check confirms


async def test_a_passed_check_between_shows_that_a_device_only_differs(database: Database) -> None:
    run = await setting(database, standing="vetted", passed=PASSED_MIN)

    def play(conn: Connection) -> str:
        for _ in range(3 * UNCOMPARED_MAX):
            redone(conn, run, "unclear")
            looked_at(conn, run)
        return volunteers.existing(conn, NEW).standing

    assert await database.write(play) == "vetted"


async def test_trouble_of_the_servers_own_holds_no_pay(database: Database) -> None:
    run = await setting(database)

    def play(conn: Connection) -> None:
        row = committed(conn, run, "", LEFT)
        order(conn, row, [])
        found = recomputes.first(conn, 99.0)
        assert found is not None
        recomputes.end(conn, found, "unclear", "its base is pruned", "{}", 2.0)
        for _ in range(VEST_AFTER):
            merged(conn, run, NEW, 3.0)

    await database.write(play)
    assert (await have(database))[2] > 0


async def test_a_newcomer_that_commits_to_nothing_stays_on_probation_and_earns_nothing(
    database: Database,
) -> None:
    run = await setting(database)

    def silent(conn: Connection) -> None:
        for _ in range(UNPROVEN_MAX):
            row = committed(conn, run, "", "")
            order(conn, row, [])
            found = recomputes.first(conn, 99.0)
            assert found is not None
            recomputes.end(conn, found, "unproven", "not committed", "{}", 2.0)
        for _ in range(max(VEST_AFTER, PASSED_MIN) + 1):
            looked_at(conn, run)  # the cheap check passes all of it
        assert escrow.vest_aged(conn, (VEST_DAYS + 1) * DAY_S) == 0
        account = volunteers.existing(conn, NEW)
        assert (account.standing, account.trust) == ("probation", 1.0)

    await database.write(silent)
    assert (await have(database))[2] == 0

    def proves(conn: Connection) -> str:
        redone(conn, run, "passed", 3.0)
        return volunteers.existing(conn, NEW).standing

    assert await database.write(proves) == "vetted"


async def test_an_account_cannot_reveal_for_another(database: Database) -> None:
    run = await setting(database)

    def play(conn: Connection) -> None:
        row = committed(conn, run, "", LEFT)
        assert not recomputes.wants(conn, row.id, NEW, LEFT)  # nobody asked
        order(conn, row, [LEFT])
        assert not recomputes.wants(conn, row.id + 1, NEW, LEFT)

    await database.write(play)


@pytest.mark.parametrize("vetted", [True, False])
async def test_ten_passed_make_an_account_vetted(database: Database, vetted: bool) -> None:
    run = await setting(database)

    def play(conn: Connection) -> str:
        for _ in range(10 if vetted else 9):
            row = committed(conn, run, "", LEFT)
            order(conn, row, [])
            found = recomputes.first(conn, 99.0)
            assert found is not None
            recomputes.end(conn, found, "passed", "", "{}", 2.0)
        return volunteers.existing(conn, NEW).standing

    assert await database.write(play) == ("vetted" if vetted else "probation")


async def test_a_device_of_a_long_name_has_a_class_that_is_stored(database: Database) -> None:
    """A worker names its devices: 32 characters, which no column of a class must refuse."""
    run = await setting(database)

    def play(conn: Connection) -> None:
        row = committed(conn, run, "", LEFT)
        kind = device_kind("x" * 32)
        recomputes.add(conn, row, ([], "{}"), withheld=False, due_at=10.0, kind=kind)
        assert recomputes.first(conn, 99.0) is not None
        assert recomputes.first(conn, 99.0, {kind}) is None
        assert recomputes.hold(conn, "a" * 32, kind, {kind}, 99.0) is not None

    await database.write(play)


async def test_those_that_wait_for_an_auditor_do_not_fill_every_place(database: Database) -> None:
    """A worker that names a class of device which nobody serves any more shuts out no check."""
    run = await setting(database)

    def play(conn: Connection) -> None:
        assert recomputes.see_auditor(conn, "desk/cuda", "cuda", 10.0)
        assert not recomputes.see_auditor(conn, "desk/cuda", "cuda", 11.0)
        for _ in range(AUDITS_WAITING_MAX):
            assert recomputes.left_to_auditors(conn, 12.0) == {"cuda"}
            row = committed(conn, run, "", LEFT)
            recomputes.add(conn, row, ([], "{}"), withheld=False, due_at=10.0, kind="cuda")
        assert recomputes.left_to_auditors(conn, 12.0) == set()
        assert recomputes.served(conn, 12.0 + AUDITOR_AWAY_S) == set()

    await database.write(play)


async def test_neither_one_account_nor_newcomers_fill_every_place(database: Database) -> None:
    run = await setting(database)

    def play(conn: Connection) -> None:
        row = committed(conn, run, "", LEFT)
        for _ in range(ACCOUNT_OPEN_MAX):
            assert recomputes.has_room(conn, row)
            order(conn, committed(conn, run, "", LEFT), [LEFT])
        assert not recomputes.has_room(conn, row)  # its own
        friend = msgspec.structs.replace(row, volunteer_id=FRIEND, vetted=True)
        assert recomputes.has_room(conn, friend)
        conn.execute(update(rows).values(vetted=False))
        for number in range(NEWCOMERS_OPEN_MAX - ACCOUNT_OPEN_MAX):
            sybil = committed(conn, run, "", LEFT)
            order(conn, msgspec.structs.replace(sybil, volunteer_id=f"sybil-{number}"), [LEFT])
        conn.execute(update(rows).values(vetted=False))
        another = msgspec.structs.replace(row, volunteer_id="another", vetted=False)
        assert not recomputes.has_room(conn, another)
        assert recomputes.has_room(conn, friend)

    await database.write(play)
