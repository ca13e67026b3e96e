"""Whole runs in one process: requests over ASGI, a clock that stands still unless it is moved, and
nothing that sleeps.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from sqlalchemy import func, select

from coordinator.database import runs
from coordinator.database.tables.contributions import contributions
from coordinator.runs.definition import definition
from shared.protocol.accounts import Me, RunInfo
from shared.protocol.contributions import Verdict
from shared.protocol.heartbeat import HeartbeatReply
from shared.protocol.leases import ClaimReply
from shared.protocol.versions import VersionManifest
from tests.support.failpoints import fail, faults
from tests.support.local_coordinator import (
    RUN,
    LocalCoordinator,
    Worker,
    decode,
    local_coordinator,
    refused,
)

ENDING = RUN + "[stop]\nversions = 3\n"
ONE_PASS = RUN.replace("local_steps = 2", "local_steps = 200").replace("quorum = 2", "quorum = 1")


POISON = np.float32(np.nan).tobytes()


@pytest.fixture
async def home(tmp_path: Path, database_url: str) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path, database=database_url) as made:
        yield made


async def test_those_who_train_and_those_who_check_follow_one_schedule(
    home: LocalCoordinator,
) -> None:
    await home.start_run(RUN + "[stop]\npasses = 2\n")
    lease = await (await home.join("Ann")).claim()
    row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
    steps = -(-2 * row.samples_total // (2 * 2))  # batches of two, two updates a version
    assert lease.job.total_steps == definition(row).total_steps(row) == steps > 0


async def test_the_schedule_is_as_long_as_those_who_train_make_it(home: LocalCoordinator) -> None:
    """One worker where the plan expects two: half of the run would be at the lowest rate."""
    await home.start_run(RUN + "[stop]\npasses = 2\n")
    ann = await home.join("Ann")
    assert await work_if_any(ann, 0)
    assert await home.coordinator.merger.merge_if_due(1)
    lease = await ann.claim()
    begun = await ann.begin(lease)
    assert begun.manifest is not None
    manifest = msgspec.json.decode(begun.manifest.payload, type=VersionManifest)
    row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
    steps = 2 * row.samples_total // 2  # batches of two
    job = manifest.bound(lease.job)
    assert job.total_steps == lease.job.total_steps == definition(row).total_steps(row) == steps
    assert job.train.warmup_steps == lease.job.train.warmup_steps == round(steps / 10)


async def sound(home: LocalCoordinator) -> bool:
    report = await home.coordinator.checks.run()
    return report.breaches == () and await home.coordinator.ledger.check() == ()


async def ask(worker: Worker, claim_id: str = "one-claim") -> ClaimReply:
    body = {"claim_id": claim_id, "wait_s": 0, "codecs": ["float32"]}
    return decode(await worker.post("/claims", body), ClaimReply)


async def work_if_any(worker: Worker, number: int) -> bool:
    """A whole task, if there is one left."""
    lease = (await ask(worker, f"claim-{number}")).lease
    if lease is None:
        return False
    begun = await worker.begin(lease)
    data = await worker.update("tiny", number)
    await worker.upload(lease, data)
    said = worker.submission(lease, begun, data)
    verdict = decode(await worker.post(f"/tasks/{lease.task}/submit", said), Verdict)
    return verdict.state == "accepted"


async def test_a_run_goes_from_its_first_claim_to_its_end(home: LocalCoordinator) -> None:
    await home.start_run(ENDING)
    crowd = [await home.join(f"Volunteer {number}") for number in range(3)]
    whole = home.coordinator
    for version in range(1, 4):
        for number, worker in enumerate(crowd):
            assert (await worker.work(10 * version + number)).state == "accepted"
            await home.clock.advance(30)
        assert await whole.merger.merge_if_due(1)
        assert await whole.evaluation.evaluate_next()
        assert decode(await crowd[0].get("/runs/tiny"), RunInfo).version == version
    late = await crowd[0].work(99)  # accepted, and nobody will merge it
    begun = await crowd[1].claim()
    assert await whole.upkeep.end_runs() == 1
    info = decode(await crowd[0].get("/runs/tiny"), RunInfo)
    assert (info.state, info.version) == ("completed", 3)
    assert info.loss is not None
    verdict = await crowd[0].verdict(late.contribution)
    assert verdict.state == "superseded"
    refused(await crowd[1].post(f"/tasks/{begun.task}/begin", {"attempt": begun.attempt}), 410)
    idle = (await ask(crowd[2])).idle
    assert idle is not None
    earned = [decode(await worker.get("/workers/me"), Me) for worker in crowd]
    assert [(me.pending_micro, me.merged) for me in earned] == [(0, 3)] * 3
    assert earned[0].earned_micro == 4 * earned[1].earned_micro // 3
    assert await sound(home)


async def test_a_pass_takes_every_sample_once_whoever_comes_and_goes(
    home: LocalCoordinator,
) -> None:
    await home.start_run(ONE_PASS + "[stop]\npasses = 1\n")
    whole = home.coordinator
    ann, bob = await home.join("Ann"), await home.join("Bob")
    gone, done = await bob.claim(), 0
    await bob.post(f"/tasks/{gone.task}/release", {"attempt": gone.attempt, "reason": "bye"})
    while await work_if_any((ann, bob)[done % 2], done):
        assert await whole.merger.merge_if_due(1)
        done += 1
    assert done > 1
    assert await whole.upkeep.end_runs() == 1
    row = await whole.db.read(lambda conn: runs.by_name(conn, "tiny"))
    merged = select(func.sum(contributions.c.samples)).where(contributions.c.state == "merged")
    assert await whole.db.read(lambda conn: conn.execute(merged).scalar()) == row.samples_total
    assert row.state == "completed"
    assert await sound(home)


async def test_who_vanishes_loses_the_task_and_nothing_else(home: LocalCoordinator) -> None:
    await home.start_run()
    eve, ann = await home.join("Eve"), await home.join("Ann")
    lease = await eve.claim()
    begun = await eve.begin(lease)
    data = await eve.update("tiny", 1)
    await home.clock.advance(400)
    assert await home.coordinator.task_leases.expire() == 1
    beat = decode(await eve.post("/workers/heartbeat", {}), HeartbeatReply)
    assert beat.news == ()
    again = await ann.claim()
    assert (again.job.start, again.job.stop) == (lease.job.start, lease.job.stop)
    assert again.attempt > lease.attempt
    refused(await eve.post(f"/tasks/{lease.task}/submit", eve.submission(lease, begun, data)), 410)
    based = await ann.begin(again)
    await ann.upload(again, data)
    said = ann.submission(again, based, data)
    verdict = decode(await ann.post(f"/tasks/{again.task}/submit", said), Verdict)
    assert verdict.state == "accepted"
    assert await sound(home)


async def test_who_comes_late_may_still_hand_in_while_nobody_else_holds_the_task(
    home: LocalCoordinator,
) -> None:
    await home.start_run()
    eve = await home.join("Eve")
    lease = await eve.claim()
    begun = await eve.begin(lease)
    data = await eve.update("tiny", 1)
    await home.clock.advance(400)
    assert await home.coordinator.task_leases.expire() == 1
    await eve.upload(lease, data)
    reply = await eve.post(f"/tasks/{lease.task}/submit", eve.submission(lease, begun, data))
    assert decode(reply, Verdict).state == "accepted"
    assert await sound(home)


@pytest.mark.parametrize("point", ["write _receive", "write _decide"])
async def test_a_commit_whose_news_is_lost_is_found_again(
    home: LocalCoordinator, point: str
) -> None:
    await home.start_run()
    ann = await home.join("Ann")
    lease = await ann.claim()
    begun = await ann.begin(lease)
    data = await ann.update("tiny", 1)
    await ann.upload(lease, data)
    said = ann.submission(lease, begun, data)
    with faults(fail(RuntimeError("the process is gone")).after(point)).installed():
        refused(await ann.post(f"/tasks/{lease.task}/submit", said), 500)
    await home.coordinator.intake.recheck()  # what a new process does first
    verdict = decode(await ann.post(f"/tasks/{lease.task}/submit", said), Verdict)
    assert verdict.state == "accepted"
    mine = decode(await ann.get("/contributions"), tuple[Verdict, ...])
    assert len({each.contribution for each in mine}) == 1
    assert verdict.credits_micro == lease.price_micro
    assert await sound(home)


async def test_what_was_accepted_is_paid_when_the_organiser_stops_the_run(
    home: LocalCoordinator,
) -> None:
    await home.start_run()
    ann = await home.join("Ann")
    verdict = await ann.work(1)
    await home.coordinator.runs.stop("tiny")
    after = await ann.verdict(verdict.contribution)
    assert after.state == "superseded"
    me = decode(await ann.get("/workers/me"), Me)
    assert (me.pending_micro, me.earned_micro) == (0, verdict.credits_micro)
    assert await sound(home)


@pytest.mark.parametrize(
    ("content", "state", "reason", "paid"),
    [("honest", "superseded", "run_ended", 1), ("poison", "rejected", "not_finite", 0)],
)
async def test_what_waits_for_its_verdict_when_a_run_ends_is_paid_for_its_content(
    home: LocalCoordinator, content: str, state: str, reason: str, paid: int
) -> None:
    await home.start_run()
    eve = await home.join("Eve")
    lease = await eve.claim()
    begun = await eve.begin(lease)
    data = await eve.update("tiny", 1)
    if content == "poison":
        data = data[: -len(POISON)] + POISON
    await eve.upload(lease, data)
    said = eve.submission(lease, begun, data)
    with faults(fail(RuntimeError("the process is gone")).after("write _receive")).installed():
        refused(await eve.post(f"/tasks/{lease.task}/submit", said), 500)
    await home.coordinator.runs.stop("tiny")
    assert await home.coordinator.intake.recheck() == 1
    verdict = decode(await eve.post(f"/tasks/{lease.task}/submit", said), Verdict)
    assert (verdict.state, verdict.reason) == (state, reason)
    me = decode(await eve.get("/workers/me"), Me)
    assert (me.pending_micro, me.earned_micro) == (0, paid * lease.price_micro)
    assert await sound(home)
