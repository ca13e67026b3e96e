"""Blame: nobody's standing moves before the task was done again, a run at fault pauses itself, and
what is not merged was not done.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Connection, func, select

from coordinator.database import datasets, evaluations, runs, versions, volunteers
from coordinator.database.runs import RunRow
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.tasks import tasks
from coordinator.database.volunteers import VolunteerRow
from coordinator.runs.definition import definition
from coordinator.runs.version_files import read_weights
from shared.protocol.accounts import Me
from shared.protocol.base import Reason
from shared.protocol.contributions import Verdict
from shared.protocol.leases import ClaimReply, Lease
from shared.tensors.codec import codec
from shared.tensors.update import Delta
from shared.workloads.base import DatasetManifest
from shared.workloads.data.local_data import LocalData
from tests.e2e.server.test_open_run import LEARNING
from tests.e2e.server.test_recomputes import settled
from tests.support.local_coordinator import LocalCoordinator, Worker, decode, local_coordinator

WRONG = {
    "a rate too high": (
        LEARNING.replace("lr = 0.01", "lr = 30.0\nclip_norm = 0.0"), Reason.LOSS, "`[train] lr`",
    ),
    "a rate that changes nothing": (
        LEARNING.replace("lr = 0.01", "lr = 1e-30"), Reason.EMPTY, "`[train] lr`",
    ),
    "a limit that no loss keeps": (
        LEARNING + "[validation]\nloss_limit = 0.01\n", Reason.LOSS, "`[validation] loss_limit`",
    ),
}  # fmt: skip
ONE_PASS = LEARNING + "[stop]\npasses = 1\n"
CHAOTIC = LEARNING.replace("lr = 0.01", "lr = 0.3").replace("local_steps = 8", "local_steps = 64")
LOUD = 1e4  # a loss that is refused wherever the model has a usual one


async def honest(worker: Worker, lease: Lease, loss: float | None = None) -> tuple[Verdict, bytes]:
    """Do a task as it is leased; report its loss, or another."""
    home, begun = worker.house, await worker.begin(lease)

    def read(conn: Connection) -> tuple[RunRow, DatasetManifest, str]:
        run = runs.by_name(conn, lease.run)
        assert run.dataset_id is not None
        base = versions.get(conn, run.id, begun.version)
        return run, datasets.by_id(conn, run.dataset_id).manifest, base.published_sha256

    run, manifest, base_sha256 = await home.coordinator.db.read(read)
    about, local = definition(run), home.coordinator.blobs.local
    names = [chunk.sha256 for chunk in (*manifest.chunks, *manifest.assets.values())]
    data = LocalData(manifest, {name: await local(name) for name in names}, {})
    base = await local(base_sha256)
    work = about.workload.begin(lease.job, read_weights(base, about), data, "cpu")
    while not work.done:
        work.advance()
    report, tensors = work.result()
    start, end = (
        {name: value.detach().numpy() for name, value in weights.items()}
        for weights in (read_weights(base, about), tensors)
    )
    path = home.coordinator.blobs.scratch() / secrets.token_hex(4)
    delta = Delta(start, end, about.schema)
    codec(lease.grant.codec).encode(delta, about.schema, path, lease.job.seed)
    encoded = path.read_bytes()
    return await handed_in(worker, lease, encoded, loss or report.loss_last), encoded


async def handed_in(worker: Worker, lease: Lease, data: bytes, loss: float | None) -> Verdict:
    begun = await worker.begin(lease)
    await worker.upload(lease, data)
    submission = worker.submission(lease, begun, data)
    submission = msgspec.structs.replace(submission, loss_first=loss, loss_last=loss)
    return decode(await worker.post(f"/tasks/{lease.task}/submit", submission), Verdict)


async def account(home: LocalCoordinator, worker: Worker) -> VolunteerRow:
    return await home.coordinator.db.read(
        lambda conn: volunteers.existing(conn, worker.volunteer_id)
    )


async def run_of(home: LocalCoordinator) -> RunRow:
    return await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))


async def measured(home: LocalCoordinator) -> None:
    """Wait until the loss of the newest version is known."""
    run = await run_of(home)
    async with asyncio.timeout(120):
        while await home.coordinator.db.read(lambda c: evaluations.newest_loss(c, run.id)) is None:
            await asyncio.sleep(0.02)


async def merged_samples(home: LocalCoordinator) -> tuple[int, int]:
    """Return the samples of done tasks, and of merged contributions."""

    def read(conn: Connection) -> tuple[int, int]:
        size = func.coalesce(func.sum(tasks.c.stop - tasks.c.start), 0)
        done = conn.execute(select(size).where(tasks.c.state == "done")).scalar_one()
        total = func.coalesce(func.sum(contributions.c.samples), 0)
        merged = select(total).where(contributions.c.state == "merged")
        return int(done), int(conn.execute(merged).scalar_one())

    return await home.coordinator.db.read(read)


@pytest.mark.parametrize("mistake", WRONG)
async def test_a_run_of_a_wrong_file_pauses_itself_and_blames_nobody(
    tmp_path: Path, mistake: str
) -> None:
    text, refusal, setting = WRONG[mistake]
    async with local_coordinator(tmp_path / "c", open=True, proof_of_work_bits=1) as home:
        await home.start_run(text)
        async with home.coordinator.working():
            await measured(home)
            ann = await home.stranger("Ann")
            async with asyncio.timeout(120):
                while (await run_of(home)).state == "running":
                    lease = await ann.claim()
                    assert (await honest(ann, lease))[0].reason == refusal
                    await settled(home)
            run, person = await run_of(home), await account(home, ann)
            assert (run.state_actor, run.head) == ("run", 0)
            assert "with the same result" in run.state_reason
            assert setting in run.state_reason
            assert (person.standing, person.state, person.unproven) == ("probation", "active", 0)


async def test_work_after_a_wrong_run_counts_whole_and_is_merged_at_once(tmp_path: Path) -> None:
    """Accepted work of a volunteer whom another run had refused weighed nothing and held merges."""
    async with local_coordinator(tmp_path / "c") as home:
        await home.start_run(WRONG["a limit that no loss keeps"][0])
        async with home.coordinator.working():
            await measured(home)
            ann = await home.join("Ann")
            while (await run_of(home)).state == "running":
                assert (await honest(ann, await ann.claim()))[0].reason == Reason.LOSS
                await settled(home)
            await home.coordinator.runs.stop("tiny")
            healthy = LEARNING.replace('"tiny"', '"healthy"')
            await home.coordinator.runs.create(healthy)
            await home.coordinator.runs.start("healthy")
            verdict, _ = await honest(ann, await ann.claim())
            assert (verdict.state, verdict.weight) == ("accepted", 1.0)
            async with asyncio.timeout(120):
                while (await home.coordinator.runs.queries.info("healthy")).version < 1:
                    await asyncio.sleep(0.02)
            assert (await account(home, ann)).standing == "vetted"


async def test_a_made_up_loss_blames_neither_the_run_nor_its_account(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "c", open=True, proof_of_work_bits=1) as home:
        await home.start_run(LEARNING)
        async with home.coordinator.working():
            await measured(home)
            eve = await home.stranger("Eve")
            verdict, _ = await honest(eve, await eve.claim(), LOUD)
            assert verdict.reason == Reason.LOSS
            await settled(home)
            run, person = await run_of(home), await account(home, eve)
            assert (run.state, person.standing, person.unproven) == ("running", "probation", 1)
            assert person.rest_until is not None  # what proves nothing costs time


async def test_who_submits_the_bytes_of_another_is_suspended_by_the_first_of_them(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path / "c", open=True, proof_of_work_bits=1) as home:
        await home.start_run(LEARNING)
        async with home.coordinator.working():
            ann, eve = await home.stranger("Ann"), await home.stranger("Eve")
            verdict, data = await honest(ann, await ann.claim())
            assert verdict.state == "accepted"
            copy = await handed_in(eve, await eve.claim(), data, 2.0)
            assert copy.reason == Reason.REPLAY
            await settled(home)
            assert (await account(home, eve)).standing == "suspended"
            assert (await account(home, ann)).standing == "probation"


async def test_honest_work_is_no_copy_of_a_copy_that_was_refused(tmp_path: Path) -> None:
    """A task gives the same bytes whoever does it, and its next worker was refused for them."""
    async with local_coordinator(tmp_path / "c", open=True, proof_of_work_bits=1) as home:
        await home.start_run(LEARNING)
        eve = await home.stranger("Eve")
        lease = await eve.claim()
        verdict, data = await honest(eve, lease)
        assert verdict.state == "accepted"
        assert (await handed_in(eve, await eve.claim(), data, 2.0)).reason == Reason.REPLAY
        assert await home.coordinator.recomputes.next()
        assert await home.coordinator.recomputes.next()
        assert (await account(home, eve)).standing == "suspended"
        ann = await home.stranger("Ann")
        again = await ann.claim()
        while again.task != lease.task:
            assert (await honest(ann, again))[0].state == "accepted"
            again = await ann.claim()
        verdict, same = await honest(ann, again)
        assert (verdict.state, same) == ("accepted", data)


async def test_a_task_that_drifts_too_far_for_a_verdict_blames_nobody_and_the_next_is_shorter(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path / "c", open=True, proof_of_work_bits=1) as home:
        await home.start_run(CHAOTIC)
        run = await run_of(home)
        assert 0 < run.steps_provable < 64  # as measured before it began
        await home.coordinator.db.write(
            lambda conn: runs.set_values(conn, run.id, steps_provable=0)
        )
        ann, eve = await home.stranger("Ann"), await home.stranger("Eve")
        assert (await honest(ann, await ann.claim()))[0].state == "accepted"
        lease = await eve.claim()
        made_up = await eve.update(lease.job.run, 1, scale=0.5)
        assert (await handed_in(eve, lease, made_up, 2.0)).state == "accepted"
        assert [await home.coordinator.recomputes.next() for _ in range(2)] == [True, True]
        for worker, proofs in ((ann, 1), (eve, 0)):
            person = await account(home, worker)
            assert (person.standing, person.proofs) == ("probation", proofs)
            assert (person.unproven, person.rest_until) == (0, None)
            has = decode(await worker.get("/workers/me"), Me)
            assert has.pending_micro + has.escrow_micro > 0  # nothing is taken
            assert has.earned_micro == 0
        run = await run_of(home)
        assert (run.state, run.steps_provable) == ("running", 32)
        assert (await ann.claim()).job.steps <= 32
        assert await home.coordinator.merger.merge_if_due(run.id)
        done, merged = await merged_samples(home)
        assert done == merged == lease.job.stop - lease.job.start  # Ann's alone
        assert (await home.coordinator.checks.run()).breaches == ()


async def test_a_task_that_diverges_when_it_is_done_again_blames_nobody(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "c", open=True, proof_of_work_bits=1) as home:
        await home.start_run(WRONG["a rate too high"][0].replace("lr = 30.0", "lr = 1e6"))
        eve = await home.stranger("Eve")
        lease = await eve.claim()
        made_up = await eve.update(lease.job.run, 1, scale=1e5)
        assert (await handed_in(eve, lease, made_up, 2.0)).state == "accepted"
        assert await home.coordinator.recomputes.next()
        person = await account(home, eve)
        assert (person.standing, person.unproven, person.rest_until) == ("probation", 0, None)
        has = decode(await eve.get("/workers/me"), Me)
        assert (has.earned_micro, has.pending_micro + has.escrow_micro > 0) == (0, True)
        assert await merged_samples(home) == (0, 0)


async def test_made_up_work_that_is_faster_than_its_proof_makes_no_version(tmp_path: Path) -> None:
    """Its first three tasks are drawn, and what it sends while they wait is merged no sooner."""
    async with local_coordinator(tmp_path / "c", open=True, proof_of_work_bits=1) as home:
        await home.start_run(ONE_PASS)
        eve = await home.stranger("Eve")
        for number in range(12):
            lease = await eve.claim()
            verdict = await handed_in(
                eve, lease, await eve.update(lease.job.run, number, scale=0.05), 2.0
            )
            assert verdict.state == "accepted"
        run = await run_of(home)
        assert not await home.coordinator.merger.merge_if_due(run.id)
        async with home.coordinator.working():
            await settled(home)
            run, person = await run_of(home), await account(home, eve)
            assert (run.head, person.standing) == (0, "suspended")
            assert await merged_samples(home) == (0, 0)
            assert (await home.coordinator.checks.run()).breaches == ()


async def test_made_up_work_neither_uses_up_the_data_nor_ends_the_run(tmp_path: Path) -> None:
    """One account at no cost ended a run of one pass in ten seconds, as a card that the server
    cannot compare.
    """
    async with local_coordinator(tmp_path / "c", open=True, proof_of_work_bits=1) as home:
        await home.start_run(ONE_PASS)
        async with home.coordinator.working():
            eve = await home.stranger("Eve")
            for number in range(12):
                body = {"claim_id": secrets.token_hex(16), "wait_s": 0.0, "device": "cuda"}
                reply = decode(
                    await eve.post("/claims", body | {"codecs": ["float32"]}), ClaimReply
                )
                if reply.lease is None:  # it rests, longer each time
                    person = await account(home, eve)
                    assert person.rest_until is not None
                    await home.clock.advance(person.rest_until - home.clock.now() + 1.0)
                    continue
                data = await eve.update(reply.lease.job.run, number, scale=0.05)
                await handed_in(eve, reply.lease, data, 2.0)
                await settled(home)
            assert await home.coordinator.upkeep.end_runs() == 0
            run, person = await run_of(home), await account(home, eve)
            assert (run.state, run.head, run.tokens) == ("running", 0, 0)
            assert await merged_samples(home) == (0, 0)
            assert person.standing != "vetted"
            assert (await home.coordinator.checks.run()).breaches == ()
