"""Leases that hand in several gradients: each is checked, merged and paid once, and what is late is
computed again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from coordinator.database.tables.contributions import contributions as contributions_table
from coordinator.database.tables.tasks import failures as failures_table
from coordinator.database.tables.tasks import tasks as tasks_table
from coordinator.intake.intake import REDO_MAX
from shared.protocol.accounts import Me
from shared.protocol.heartbeat import TaskBeat
from tests.support.local_coordinator import (
    RUN,
    LocalCoordinator,
    Worker,
    decode,
    local_coordinator,
    refused,
)

STEPS = RUN.replace("local_steps = 2", "local_steps = 5")
ASYNC = STEPS.replace('preset = "fedavg"\nquorum = 2', 'preset = "async-sgd"')
SYNC = STEPS.replace('preset = "fedavg"', 'preset = "sync-sgd"')
PAIRS = ASYNC.replace("local_steps = 5", "local_steps = 6").replace(
    'preset = "async-sgd"', 'preset = "async-sgd"\ngradient_every = 2\npull_every = 3'
)


@pytest.fixture
async def home(tmp_path: Path, database_url: str) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path, database=database_url) as made:
        yield made


async def rows(home: LocalCoordinator, *columns: Any) -> list[Any]:
    return await home.coordinator.db.read(
        lambda conn: [tuple(row) for row in conn.execute(select(*columns).order_by(columns[0]))]
    )


async def sound(home: LocalCoordinator) -> bool:
    report = await home.coordinator.checks.run()
    assert report.breaches == ()
    return await home.coordinator.ledger.check() == ()


async def me(worker: Worker) -> Me:
    return decode(await worker.get("/workers/me"), Me)


async def merge(home: LocalCoordinator) -> int:
    count = 0
    while await home.coordinator.merger.merge_if_due(1):
        count += 1
    return count


async def ranges(home: LocalCoordinator) -> list[tuple[int, int, str]]:
    t = tasks_table.c
    return [
        (start, stop, state) for start, stop, state in await rows(home, t.start, t.stop, t.state)
    ]


async def test_every_part_is_merged_as_it_comes_and_paid_once(home: LocalCoordinator) -> None:
    await home.start_run(PAIRS)
    ann = await home.join("Ann")
    lease = await ann.claim()
    assert (lease.grant.parts, lease.part_steps, lease.pull_every) == (3, 2, 3)
    begun = await ann.begin(lease)
    for part in range(3):
        assert (await ann.part(lease, begun, part)).state == "accepted"
        assert await merge(home) == 1
        begun = await ann.newest(lease, begun.version) if part < 2 else begun
    c = contributions_table.c
    found = await rows(home, c.part, c.steps, c.samples, c.base_version, c.version, c.price_micro)
    assert [row[:5] for row in found] == [(0, 2, 4, 0, 1), (1, 2, 4, 1, 2), (2, 2, 4, 2, 3)]
    assert sum(row[5] for row in found) == lease.price_micro
    assert (await me(ann)).earned_micro == lease.price_micro
    assert await ranges(home) == [(0, 4, "done"), (4, 8, "done"), (8, 12, "done")]
    assert await sound(home)


async def test_the_rest_of_a_broken_lease_goes_to_somebody_else_and_nothing_twice(
    home: LocalCoordinator,
) -> None:
    await home.start_run(ASYNC)
    ann, bob = await home.join("Ann"), await home.join("Bob")
    lease = await ann.claim()
    begun = await ann.begin(lease)
    first = [await ann.part(lease, begun, part) for part in range(2)]
    assert [verdict.state for verdict in first] == ["accepted", "accepted"]
    again = await ann.part(lease, begun, 1)  # its reply was lost
    assert again.contribution == first[1].contribution
    await ann.post(f"/tasks/{lease.task}/release", {"attempt": lease.attempt})
    refused(await ann.announce(lease, b"x", part=2), 410)
    rest = await bob.claim()
    assert (rest.task, rest.job.start, rest.job.stop, rest.job.steps) == (lease.task, 4, 10, 3)
    begun = await bob.begin(rest)
    for part in range(3):
        assert (await bob.part(rest, begun, part)).state == "accepted"
    await merge(home)
    assert await ranges(home) == [(start, start + 2, "done") for start in range(0, 10, 2)]
    assert (await me(ann)).earned_micro + (await me(bob)).earned_micro == lease.price_micro
    assert await sound(home)


async def test_parts_come_in_their_order_one_at_a_time(home: LocalCoordinator) -> None:
    await home.start_run(ASYNC)
    ann = await home.join("Ann")
    lease = await ann.claim()
    begun = await ann.begin(lease)
    for part, tries in ((1, 0), (0, 1), (4, 0)):
        data = await ann.update("tiny", 7)
        await ann.announce(lease, data, part=part, tries=tries)
        reply = await ann.announce(lease, data, part=part, tries=tries)
        await ann.put(reply.json()["upload_id"], 0, data)
        said = ann.submission(lease, begun, data)
        body = {
            **{f: getattr(said, f) for f in said.__struct_fields__},
            "part": part,
            "tries": tries,
        }
        problem = refused(await ann.post(f"/tasks/{lease.task}/submit", body), 409)
        assert "its next is part 0, try 0" in problem.message
    assert (await ann.part(lease, begun, 0, seed=3)).state == "accepted"
    same = await ann.part(lease, begun, 1, seed=3)  # the same gradient, handed in twice
    assert (same.state, same.reason, same.redo) == ("rejected", "replay", False)
    assert await sound(home)


async def test_what_is_late_is_computed_again_for_the_same_mini_batch(
    home: LocalCoordinator,
) -> None:
    await home.start_run(SYNC)
    ann, bob = await home.join("Ann"), await home.join("Bob")
    mine, other = await ann.claim(), await bob.claim()
    assert (mine.redo, mine.grant.parts) == (True, 5)
    begun, theirs = await ann.begin(mine), await bob.begin(other)
    assert [(await bob.part(other, theirs, part)).state for part in (0, 1)] == ["accepted"] * 2
    assert await merge(home) == 1
    late = await ann.part(mine, begun, 0)
    assert (late.state, late.reason, late.redo) == ("rejected", "stale", True)
    assert "version 1 was merged meanwhile: compute it once more from there, 1 of 3" in late.message
    assert await orders(home, ann, mine.task, mine.attempt) == ["continue"]
    begun = await ann.newest(mine, begun.version)
    assert (begun.version, begun.part, begun.tries) == (1, 0, 1)
    assert begun.manifest is not None
    assert (await ann.newest(mine, 1)).manifest is None  # nothing newer: nothing is sent
    assert (await ann.part(mine, begun, 0, tries=1)).state == "accepted"
    assert (await ann.part(mine, begun, 1)).state == "accepted"
    assert await merge(home) == 1
    c = contributions_table.c
    assert [
        row
        for row in await rows(home, c.id, c.task_id, c.part, c.tries, c.state)
        if row[1] == mine.task
    ] == [
        (3, mine.task, 0, 0, "rejected"),
        (4, mine.task, 0, 1, "merged"),
        (5, mine.task, 1, 0, "merged"),
    ]
    assert await sound(home)


async def orders(home: LocalCoordinator, worker: Worker, task: int, attempt: int) -> list[str]:
    beat = {"tasks": [{"task": task, "attempt": attempt, "phase": "train"}]}
    reply = await worker.post("/workers/heartbeat", beat)
    return [order["order"] for order in reply.json()["orders"]]


async def test_after_so_many_recomputations_the_task_fails(home: LocalCoordinator) -> None:
    await home.start_run(SYNC.replace("quorum = 2", "quorum = 1"))
    ann, bob = await home.join("Ann"), await home.join("Bob")
    mine, other = await ann.claim(), await bob.claim()
    begun, theirs = await ann.begin(mine), await bob.begin(other)
    verdicts = []
    for tries in range(REDO_MAX + 1):
        assert (await bob.part(other, theirs, tries)).state == "accepted"
        assert await merge(home) == 1
        theirs = await bob.newest(other, theirs.version)
        watch = home.coordinator.signals.watch("queue")
        verdict = await ann.part(mine, begun, 0, tries=tries)
        verdicts.append(verdict)
        assert await watch.wait(0)  # the task may be somebody else's by now
        if verdict.redo:
            begun = await ann.newest(mine, begun.version)
    assert [(each.reason, each.redo) for each in verdicts] == [
        *[("stale", True)] * REDO_MAX,
        ("stale", False),
    ]
    assert "submitted 4 times after the next version: the task has failed" in verdicts[-1].message
    f, t = failures_table.c, tasks_table.c
    assert [row[1:] for row in await rows(home, f.id, f.kind, f.message)] == [
        ("failure", verdicts[-1].message)
    ]
    found = {row[0]: row[1:] for row in await rows(home, t.id, t.state, t.failures)}
    assert found[mine.task] == ("todo", 1)
    assert (await me(ann)).standing == "vetted"
    refused(await ann.announce(mine, b"x"), 410)
    assert await sound(home)


async def test_a_heartbeat_keeps_a_lease_whose_first_part_waits(home: LocalCoordinator) -> None:
    await home.start_run(ASYNC)
    ann = await home.join("Ann")
    lease = await ann.claim()
    await ann.part(lease, await ann.begin(lease), 0)
    t = tasks_table.c
    [(_, renew_by)] = [row for row in await rows(home, t.id, t.renew_by) if row[0] == lease.task]
    assert renew_by is not None
    assert TaskBeat(task=lease.task, attempt=lease.attempt).phase == "train"
