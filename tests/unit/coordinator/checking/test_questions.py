"""Refused tasks that are done again: how many at a time, and what that does not prove."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from coordinator.checking.case import Case
from coordinator.checking.checkers import CheckerOutcome
from coordinator.checking.drifts import Drifts
from coordinator.compute import Compute
from coordinator.database import contributions, recomputes, runs
from coordinator.database.recomputes import RecomputeRow, StoredCase
from coordinator.database.runs import RunRow
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.runs import runs as runs_table
from coordinator.database.tables.trust import recomputes as recomputes_table
from coordinator.database.tables.versions import evaluations
from coordinator.rules.draws import CHECKER_TRIES_MAX, HERE, ComputeDevice, Redone
from coordinator.rules.recompute_result import DRIFT_MAX
from coordinator.rules.refusals import OPEN_OF_RUN
from shared import decoding
from shared.protocol.base import Reason
from shared.protocol.contributions import Verdict
from tests.support.local_coordinator import (
    RUN,
    LocalCoordinator,
    Worker,
    decode,
    local_coordinator,
)
from volunteer.agent.lease_parts import LeasePlan

ALONE = RUN.replace("[plan]", "[plan]\noverlap = true").replace("quorum = 2", "quorum = 1000")
DRAWN = ALONE.replace("local_steps = 2", "local_steps = 8") + "[trust]\nrecompute = 1.0\n"
REPORTED = 4.9  # loss of a submission


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path) as made:
        yield made


async def refused_for_its_loss(worker: Worker, loss: float = -1.0) -> Verdict:
    lease = await worker.claim()
    begun = await worker.begin(lease)
    data = await worker.update(lease.run, lease.task)
    await worker.upload(lease, data)
    submission = msgspec.structs.replace(worker.submission(lease, begun, data), loss_last=loss)
    verdict = decode(await worker.post(f"/tasks/{lease.task}/submit", submission), Verdict)
    assert (verdict.state, verdict.reason) == ("rejected", Reason.LOSS)
    return verdict


async def orders(home: LocalCoordinator) -> list[RecomputeRow]:
    """Return the recomputes, oldest first."""

    def read(conn: sa.Connection) -> list[RecomputeRow]:
        numbers = conn.execute(
            sa.select(recomputes_table.c.contribution_id).order_by(
                recomputes_table.c.contribution_id
            )
        )
        rows = [recomputes.get(conn, number) for number in numbers.scalars()]
        return [row for row in rows if row is not None]

    return await home.coordinator.db.read(read)


async def run_row(home: LocalCoordinator) -> RunRow:
    return await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))


async def judged(home: LocalCoordinator, row: RecomputeRow, redone: Redone) -> RecomputeRow:
    """Let a recompute of this server have these figures."""
    run = await run_row(home)
    case = await home.coordinator.db.read(lambda conn: Case.from_stored(conn, row.work, run))
    here = ComputeDevice(kind=HERE)
    await home.coordinator.recomputes.judge(row, case, redone, here, 1.0)
    return next(each for each in await orders(home) if each.contribution_id == row.contribution_id)


async def standings(home: LocalCoordinator) -> list[str]:
    query = sa.select(volunteers.c.standing)
    return await home.coordinator.db.read(lambda conn: [*conn.execute(query).scalars()])


async def test_one_refused_task_of_an_account_is_done_again_at_a_time(
    home: LocalCoordinator,
) -> None:
    """Otherwise whoever submits nonsense keeps the server at work."""
    await home.start_run(ALONE)
    ann = await home.join("Ann")
    first = await refused_for_its_loss(ann)
    await refused_for_its_loss(ann)
    assert [row.contribution_id for row in await orders(home)] == [first.contribution]
    done = sa.update(recomputes_table).values(state="done", result="passed")
    await home.coordinator.db.write(lambda conn: conn.execute(done))
    third = await refused_for_its_loss(ann)
    assert [row.contribution_id for row in await orders(home)] == [
        first.contribution,
        third.contribution,
    ]


async def test_a_few_refused_tasks_of_a_run_are_done_again_at_a_time(
    home: LocalCoordinator,
) -> None:
    await home.start_run(ALONE)
    for number in range(OPEN_OF_RUN + 2):
        await refused_for_its_loss(await home.join(f"Worker {number}"))
    assert len(await orders(home)) == OPEN_OF_RUN


async def test_what_a_paused_run_refuses_is_not_done_again(home: LocalCoordinator) -> None:
    """It pauses itself by such refusals, and needs no more of them."""
    await home.start_run(ALONE)
    ann = await home.join("Ann")
    lease = await ann.claim()
    begun = await ann.begin(lease)
    data = await ann.update(lease.run, 1)
    await ann.upload(lease, data)
    await home.coordinator.runs.pause("tiny")
    submission = msgspec.structs.replace(ann.submission(lease, begun, data), loss_last=-1.0)
    verdict = decode(await ann.post(f"/tasks/{lease.task}/submit", submission), Verdict)
    assert verdict.reason == Reason.LOSS
    assert await orders(home) == []


@pytest.mark.parametrize(
    ("cosine", "own_loss", "result", "standing"),
    [
        (1.0, REPORTED, "passed", "vetted"),
        (1.0, 0.02, "unproven", "vetted"),
        (0.0, 0.02, "failed", "suspended"),  # neither the update nor the loss is of the task
    ],
)
async def test_a_loss_that_the_task_does_not_have_is_no_fault_of_the_run(
    home: LocalCoordinator, cosine: float, own_loss: float, result: str, standing: str
) -> None:
    """If the update is right, its account is not blamed; a made-up loss pauses no run either."""
    await home.start_run(ALONE)
    low = sa.update(evaluations).values(state="done", loss=0.01)
    await home.coordinator.db.write(lambda conn: conn.execute(low))
    await refused_for_its_loss(await home.join("Ann"), REPORTED)
    (row,) = await orders(home)
    ended = await judged(home, row, Redone(cosine=cosine, norm_ratio=1.0, loss=own_loss))
    assert (ended.state, ended.result) == ("done", result)
    counted = await home.coordinator.db.read(
        lambda conn: recomputes.repeated_refusals(conn, row.run_id, 0.0)
    )
    assert counted == (result == "passed")
    assert await standings(home) == [standing]


@pytest.mark.parametrize(("before", "after"), [(0, 4), (2, 2), (64, 4)])
async def test_a_task_that_drifts_makes_later_tasks_shorter_and_never_longer(
    home: LocalCoordinator, before: int, after: int
) -> None:
    await home.start_run(DRAWN)
    await (await home.join("Ann")).work(1)
    shorter = sa.update(runs_table).values(steps_provable=before)
    await home.coordinator.db.write(lambda conn: conn.execute(shorter))
    (row,) = await orders(home)
    drifting = Redone(cosine=0.0, norm_ratio=1.0, drift=2 * DRIFT_MAX)
    ended = await judged(home, row, drifting)
    assert (ended.state, ended.result) == ("done", "unproven")
    assert (await run_row(home)).steps_provable == after
    assert await standings(home) == ["vetted"]


async def test_each_part_of_a_lease_is_done_again_as_its_worker_did_it(
    home: LocalCoordinator,
) -> None:
    """With other random numbers it would differ, and an honest account be suspended."""
    plan = 'preset = "async-sgd"\ngradient_every = 2'
    await home.start_run(DRAWN.replace('preset = "fedavg"\nquorum = 1000', plan))
    ann = await home.join("Ann")
    lease = await ann.claim()
    begun = await ann.begin(lease)
    for part in range(lease.grant.parts):
        assert (await ann.part(lease, begun, part)).state == "accepted"
    jobs = [decoding.decode(row.work, StoredCase).job for row in await orders(home)]
    plan_of_worker = LeasePlan.of(lease)
    parts = range(lease.grant.parts)
    wanted = [plan_of_worker.lease_of(lease, part).job for part in parts]
    assert [(job.seed, job.start, job.stop, job.steps) for job in jobs] == [
        (job.seed, job.start, job.stop, job.steps) for job in wanted
    ]
    assert len({job.seed for job in jobs}) == lease.grant.parts == 4


async def test_a_recompute_that_ended_is_not_ended_again(home: LocalCoordinator) -> None:
    """Two machines may make the same one: the first result stands."""
    await home.start_run(DRAWN)
    await (await home.join("Ann")).work(1)
    (row,) = await orders(home)
    first = await judged(home, row, Redone(cosine=1.0, norm_ratio=1.0))
    assert first.result == "passed"
    second = await judged(home, row, Redone(cosine=-1.0, norm_ratio=1.0))
    assert (second.result, second.message) == (first.result, first.message)
    assert await standings(home) == ["vetted"]


async def test_a_recompute_that_the_end_of_the_server_cuts_short_waits_for_no_reason(
    home: LocalCoordinator,
) -> None:
    """Another process makes it at once."""
    await home.start_run(DRAWN)
    await (await home.join("Ann")).work(1)
    home.coordinator.recomputes._compute.close()  # as the server does when it stops
    assert not await home.coordinator.recomputes.next()
    (row,) = await orders(home)
    assert (row.state, row.message, row.lease_until) == ("waiting", "", 0.0)


async def test_a_drift_that_the_end_of_the_server_cuts_short_is_measured_later(
    home: LocalCoordinator,
) -> None:
    await home.start_run(ALONE)
    unmeasured = sa.update(runs_table).values(drift_version=-1)
    await home.coordinator.db.write(lambda conn: conn.execute(unmeasured))
    compute = Compute("drifts")
    compute.close()  # as the server does when it stops
    assert await Drifts(home.coordinator, compute).measure(await run_row(home)) is None
    assert (await run_row(home)).drift_version == -1


@pytest.mark.parametrize("failed", [False, True])
async def test_the_server_takes_over_what_checkers_fail_at_and_not_what_they_give_back(
    home: LocalCoordinator, failed: bool
) -> None:
    await home.start_run(DRAWN)
    await (await home.join("Ann")).work(1)
    here, left = ComputeDevice(kind=HERE), list[bool]()
    for number in range(CHECKER_TRIES_MAX + 1):
        hold = f"{number:032x}"
        task = (await home.coordinator.checkers.take("desk", here, hold)).task
        left.append(task is None)
        if task is not None:
            outcome = CheckerOutcome(failed=failed)
            watch = home.coordinator.signals.watch("recomputes")
            await home.coordinator.checkers.report(task.contribution, hold, here, outcome)
            assert await watch.wait(0)  # the server and other checkers try at once
    assert left == [False] * CHECKER_TRIES_MAX + [failed]


async def test_a_report_that_comes_again_after_a_lost_reply_is_counted_once(
    home: LocalCoordinator,
) -> None:
    await home.start_run(DRAWN)
    await (await home.join("Ann")).work(1)
    here, hold = ComputeDevice(kind=HERE), f"{1:032x}"
    task = (await home.coordinator.checkers.take("desk", here, hold)).task
    assert task is not None
    outcome = CheckerOutcome(found=Redone(cosine=1.0, norm_ratio=1.0), seconds=9e3)
    report = partial(home.coordinator.checkers.report, task.contribution, hold, here, outcome)
    first = await report()
    assert (first.result, await report()) == ("passed", first)
    done = await home.coordinator.db.read(lambda conn: contributions.by_id(conn, task.contribution))
    assert done.checked_s == pytest.approx(9e3, rel=0.1)
