"""Runs that merge gradients: one version at a time, and nobody's work for an overtaken one is
lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.database import runs
from coordinator.runs.definition import definition
from shared.protocol.accounts import Me, RunInfo
from shared.protocol.contributions import Verdict
from shared.protocol.heartbeat import HeartbeatReply
from tests.support.local_coordinator import (
    RUN,
    LocalCoordinator,
    Worker,
    decode,
    local_coordinator,
    refused,
)

GRADIENTS = RUN.replace('preset = "fedavg"', 'preset = "gradient-average"')


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path) as made:
        await made.start_run(GRADIENTS)
        yield made


async def orders(worker: Worker, task: int, attempt: int) -> list[str]:
    beat = {"tasks": [{"task": task, "attempt": attempt, "phase": "train"}]}
    reply = decode(await worker.post("/workers/heartbeat", beat), HeartbeatReply)
    return [order.order for order in reply.orders]


async def balanced(home: LocalCoordinator) -> bool:
    found = await home.coordinator.checks.run()
    return found.breaches == () and await home.coordinator.ledger.check() == ()


async def test_a_lease_says_what_is_wanted_and_a_merge_steps_by_the_mean(
    home: LocalCoordinator,
) -> None:
    ann, bob = await home.join("Ann"), await home.join("Bob")
    lease = await ann.claim()
    assert (lease.job.update, lease.job.steps) == ("gradient", 2)
    await ann.post(f"/tasks/{lease.task}/release", {"attempt": lease.attempt})
    assert [(await worker.work(seed)).state for seed, worker in enumerate((ann, bob))] == [
        "accepted",
        "accepted",
    ]
    assert await home.coordinator.merger.merge_if_due(1)
    assert decode(await ann.get("/runs/tiny"), RunInfo).version == 1
    assert await balanced(home)


async def test_whoever_works_on_an_overtaken_version_is_told_to_stop(
    home: LocalCoordinator,
) -> None:
    ann, bob, eve = [await home.join(name) for name in ("Ann", "Bob", "Eve")]
    begun, waiting = await eve.claim(), await ann.claim()
    base = await eve.begin(begun)
    await ann.work(1)
    await bob.work(2)
    assert await orders(eve, begun.task, begun.attempt) == ["continue"]
    assert await home.coordinator.merger.merge_if_due(1)
    await home.coordinator.renewals.flush()
    await home.clock.advance(6)
    await home.coordinator.renewals.flush()
    assert await orders(eve, begun.task, begun.attempt) == ["gone"]
    data = await eve.update("tiny", 3)
    refused(await eve.announce(begun, data), 410)
    submission = eve.submission(begun, base, data)
    refused(await eve.post(f"/tasks/{begun.task}/submit", submission), 410)
    again = await bob.claim()  # the same samples, for somebody
    assert (again.job.start, again.attempt > 1) == (begun.job.start, True)
    assert (await ann.begin(waiting)).version == 1  # what had not begun begins with the new version
    assert await balanced(home)


async def test_what_came_too_late_for_its_version_is_paid_and_not_merged(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, bob, eve = [await home.join(name) for name in ("Ann", "Bob", "Eve")]
    lease = await eve.claim()
    begun = await eve.begin(lease)
    data = await eve.update("tiny", 3)
    await eve.upload(lease, data)
    await ann.work(1)
    await bob.work(2)
    blobs, during = home.coordinator.blobs, list[Verdict]()
    put_file = blobs.put_file

    async def and_meanwhile(sha256: str, path: Path) -> None:
        await put_file(sha256, path)
        if not during:
            submission = eve.submission(lease, begun, data)
            reply = await eve.post(f"/tasks/{lease.task}/submit", submission)
            during.append(decode(reply, Verdict))

    monkeypatch.setattr(blobs, "put_file", and_meanwhile)
    assert await home.coordinator.merger.merge_if_due(1)
    assert during[0].state == "accepted"
    verdict = await eve.verdict(during[0].contribution)
    assert (verdict.state, verdict.version) == ("superseded", None)
    assert "version 1 was merged without it" in verdict.message
    me = decode(await eve.get("/workers/me"), Me)
    assert (me.pending_micro, me.merged) == (0, 0)
    assert me.earned_micro == lease.price_micro
    assert not await home.coordinator.merger.merge_if_due(1)
    assert await balanced(home)


@pytest.mark.parametrize(
    ("task", "plan", "steps"),
    [
        ("", 'preset = "gradient-average"', 1),
        ("local_steps = 20", 'preset = "gradient-average"', 20),
        ("", 'preset = "fedavg"', 0),
        ("", 'preset = "async-sgd"', 0),
    ],
)
async def test_an_average_of_gradients_takes_a_step_for_each_batch_unless_told_otherwise(
    home: LocalCoordinator, task: str, plan: str, steps: int
) -> None:
    text = RUN.replace('"tiny"', '"other"').replace("local_steps = 2", task)
    await home.coordinator.runs.create(text.replace('preset = "fedavg"', plan))
    row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "other"))
    assert definition(row).file.task.local_steps == steps
