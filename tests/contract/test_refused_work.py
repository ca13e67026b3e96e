"""Refused updates on both databases: a recompute blames the account or the run, never a refusal."""

from __future__ import annotations

from functools import partial

import pytest
from sqlalchemy import Connection

from coordinator.checking import draw_effects
from coordinator.database import contributions, recomputes, record, runs, volunteers
from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.open_database import Database
from coordinator.database.recomputes import DrawTerms, RecomputeRow
from coordinator.database.runs import RunRow
from coordinator.database.volunteers import VolunteerRow
from coordinator.plan.merge_weights import staleness_weight
from coordinator.rules.draws import Result
from coordinator.rules.standing import proof_rest_s
from coordinator.runs.definition import definition
from shared.protocol.base import Reason
from tests.contract import test_escrow
from tests.contract.test_escrow import FRIEND, NEW, PRICE, accepted, draw, have, merged
from tests.support.account_rows import add_contribution, breaches
from tests.support.run_rows import add_version

RESULTS: tuple[Result, ...] = ("failed", "unproven")


def refused(
    conn: Connection, run: int, who: str = NEW, reason: Reason = Reason.LOSS
) -> RecomputeRow:
    """Return the open question about a refused update."""
    number = add_contribution(conn, run, who, "rejected", PRICE, received_at=9.0)
    row = contributions.by_id(conn, number)
    terms = DrawTerms(work="{}", flops=1e9, kind="cpu", refusal=reason)
    return recomputes.add(conn, row, terms)


async def setting(db: Database) -> int:
    """Return a run at version 0, with a stranger and a vetted friend."""
    run = await test_escrow.setting(db)
    await db.write(lambda conn: add_version(conn, run, 0))
    return run


def ended(conn: Connection, row: RecomputeRow, result: Result, now: float = 10.0) -> None:
    assert draw_effects.settle(conn, row, result, ("", "{}"), now)


async def of(db: Database, run: int, who: str = NEW) -> tuple[RunRow, VolunteerRow]:
    return await db.read(lambda c: (runs.by_id(c, run), volunteers.existing(c, who)))


async def test_refusals_that_a_recompute_repeats_pause_the_run_and_blame_nobody(
    database: Database,
) -> None:
    run = await setting(database)

    def repeat(conn: Connection, who: str) -> None:
        ended(conn, refused(conn, run, who), "passed")

    await database.write(partial(repeat, who=NEW))
    row, person = await of(database, run)
    assert (row.state, person.standing) == ("running", "probation")
    await database.write(partial(repeat, who=FRIEND))
    row, person = await of(database, run, FRIEND)
    assert (row.state, row.state_actor, person.standing) == ("paused", "run", "vetted")
    assert "lower `[train] lr`" in row.state_reason
    await database.write(partial(repeat, who=NEW))  # one that was under way changes nothing more
    assert (await of(database, run))[0].state_reason == row.state_reason
    assert await breaches(database) == []


async def test_equal_bytes_of_work_that_was_done_blame_nobody_and_pause_nothing(
    database: Database,
) -> None:
    """Who copies others' work would pause a run by the refusals of those others."""
    run = await setting(database)

    def repeat(conn: Connection, reason: Reason) -> None:
        for who in (NEW, FRIEND, NEW, FRIEND):
            ended(conn, refused(conn, run, who, reason), "passed")

    await database.write(partial(repeat, reason=Reason.REPLAY))
    row, person = await of(database, run)
    assert (row.state, person.standing) == ("running", "probation")
    await database.write(lambda conn: ended(conn, refused(conn, run), "passed"))
    assert (await of(database, run))[0].state == "running"  # the first that counts
    await database.write(lambda conn: ended(conn, refused(conn, run), "passed"))
    row, _ = await of(database, run)
    assert row.state == "paused"
    resumed = runs.StateChange(at=11.0, actor="organiser", reason="")
    await database.write(lambda conn: runs.move(conn, row, "running", resumed))
    await database.write(partial(repeat, reason=Reason.REPLAY))
    assert (await of(database, run))[0].state == "running"
    await database.write(lambda conn: ended(conn, refused(conn, run, NEW, Reason.REPLAY), "failed"))
    assert (await of(database, run))[1].standing == "suspended"
    assert await breaches(database) == []


async def test_a_refusal_that_its_recompute_contradicts_suspends(database: Database) -> None:
    run = await setting(database)
    await database.write(lambda conn: merged(conn, run, NEW, 1.0))
    others = await database.write(lambda conn: [refused(conn, run) for _ in range(2)])
    await database.write(lambda conn: ended(conn, refused(conn, run), "failed"))
    row, person = await of(database, run)
    assert (row.state, person.standing) == ("running", "suspended")
    assert "whose update was refused" in person.suspended_reason
    for other, result in zip(others, RESULTS, strict=True):  # those that were under way
        await database.write(partial(ended, row=other, result=result))
    assert (await of(database, run))[1] == person
    assert len(await database.read(lambda conn: record.entries(conn))) == 1
    assert await have(database) == (0, 0, 0)
    assert await breaches(database) == []


async def test_what_proves_nothing_moves_no_standing_and_costs_time(database: Database) -> None:
    run = await setting(database)
    await database.write(lambda conn: merged(conn, run, NEW, 1.0))
    for count in (1, 2):
        await database.write(lambda conn: ended(conn, refused(conn, run), "unproven"))
        _, person = await of(database, run)
        assert (person.standing, person.unproven) == ("probation", count)
        assert person.rest_until == 10.0 + proof_rest_s(count)
    assert await have(database) == (0, PRICE, 0)  # nothing at stake is given up for it

    def prove(conn: Connection) -> None:
        ended(conn, draw(conn, merged(conn, run, NEW, 2.0)), "passed")

    await database.write(prove)
    _, person = await of(database, run)
    assert (person.unproven, person.rest_until) == (0, None)


async def test_an_open_question_holds_up_no_pay_and_is_no_draw(database: Database) -> None:
    run = await setting(database)

    def pass_draws(conn: Connection) -> RecomputeRow:
        question = refused(conn, run)
        for _ in range(2):
            ended(conn, draw(conn, merged(conn, run, NEW, 2.0)), "passed")
        return question

    question = await database.write(pass_draws)
    assert await have(database) == (0, PRICE, PRICE)
    assert await database.read(lambda conn: recomputes.open_of(conn, NEW)) == []
    counts = await database.read(lambda conn: recomputes.open_refusals(conn, run, NEW))
    assert counts == (1, 1)
    await database.write(lambda conn: ended(conn, question, "passed"))
    _, person = await of(database, run)
    assert (person.draws, person.proofs) == (2, 2)  # a refused task proves no work


@pytest.mark.parametrize(("head", "state"), [(0, "accepted"), (2, "accepted"), (999, "superseded")])
async def test_an_update_that_is_proved_late_counts_as_old_as_it_is_by_then(
    database: Database, head: int, state: str
) -> None:
    run = await setting(database)

    def prove(conn: Connection) -> ContributionRow:
        row = draw(conn, merged(conn, run, NEW, 1.0))
        waiting = accepted(conn, run, NEW, 1.0)
        contributions.wait_for_proof(conn, waiting)
        runs.set_values(conn, run, head=head)
        ended(conn, row, "passed")
        return contributions.by_id(conn, waiting)

    row = await database.write(prove)
    plan = definition((await of(database, run))[0]).plan
    weight = staleness_weight(plan, head) or 1.0  # a superseded update keeps the weight it had
    assert (row.state, row.weight) == (state, weight)
    assert (await have(database))[0] == (PRICE if state == "accepted" else 0)


async def test_a_draw_without_a_verdict_moves_no_standing_and_earns_nothing(
    database: Database,
) -> None:
    """Whoever faked in tasks that drift too far had all of it free with its next honest draw."""
    run = await setting(database)

    def drift(conn: Connection, who: str) -> None:
        ended(conn, draw(conn, merged(conn, run, who, 1.0)), "passed")
        for _ in range(3):
            merged(conn, run, who, 2.0)
        row = draw(conn, merged(conn, run, who, 3.0))
        waiting = accepted(conn, run, who, 3.0)
        contributions.wait_for_proof(conn, waiting)
        assert draw_effects.end_without_verdict(conn, row, ("", "{}"), 5.0)
        assert not draw_effects.end_without_verdict(conn, row, ("", "{}"), 6.0)

    await database.write(partial(drift, who=NEW))
    _, person = await of(database, run)
    assert (person.standing, person.proofs, person.draws) == ("probation", 1, 0)
    assert (person.unproven, person.rest_until) == (0, None)
    assert await have(database) == (0, 6 * PRICE, 0)  # nobody is blamed, and nothing is free

    def prove(conn: Connection) -> None:
        for _ in range(2):
            ended(conn, draw(conn, merged(conn, run, NEW, 7.0)), "passed")

    await database.write(prove)
    assert await have(database) == (0, 7 * PRICE, PRICE)  # of the two that passed
    _, before = await of(database, run)

    def refuse(conn: Connection) -> None:
        waiting = accepted(conn, run, NEW, 8.0)
        assert draw_effects.end_without_verdict(conn, refused(conn, run), ("", "{}"), 8.0)
        assert contributions.by_id(conn, waiting).state == "accepted"

    await database.write(refuse)
    assert (await of(database, run))[1] == before
    await database.write(partial(drift, who=FRIEND))
    _, person = await of(database, run, FRIEND)
    assert (person.standing, person.draws) == ("vetted", 2)
    assert await have(database, FRIEND) == (PRICE, 0, 5 * PRICE)
    waiting = await database.read(lambda conn: contributions.unproven_of(conn, FRIEND, 1 << 40))
    assert waiting == []  # the update of an account that the organiser vouches for is merged
    assert await breaches(database) == []


@pytest.mark.parametrize("result", ["passed", "failed", "unproven"])
async def test_a_question_has_one_answer(database: Database, result: Result) -> None:
    run = await setting(database)
    question = await database.write(lambda conn: refused(conn, run))
    await database.write(lambda conn: ended(conn, question, result))
    settle = partial(
        draw_effects.settle, row=question, result="failed", messages=("", "{}"), now=11.0
    )
    before = await of(database, run)
    assert not await database.write(settle)
    assert await of(database, run) == before
