"""Maintenance that must not be: ends of runs that go on, files that are still wanted."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from coordinator.database import runs as run_rows
from coordinator.database.tables.record import record_lines
from coordinator.database.tables.runs import runs
from coordinator.database.tables.versions import evaluations
from coordinator.upkeep import upkeep
from shared.errors import Unavailable
from shared.protocol.accounts import Me
from tests.support.local_coordinator import (
    RUN,
    LocalCoordinator,
    Worker,
    decode,
    local_coordinator,
    refused,
)

ALONE = RUN.replace("quorum = 2", "quorum = 1\ngrace = 0.0")


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path) as made:
        yield made


async def versions(home: LocalCoordinator, count: int, worker: Worker | None = None) -> Worker:
    worker = worker or await home.join("Ann")
    for seed in range(count):
        assert (await worker.work(100 * count + seed)).state == "accepted"
        assert await home.coordinator.merger.merge_if_due(1)
    return worker


async def measured(home: LocalCoordinator) -> None:
    """Let every version be evaluated."""
    done = sa.update(evaluations).values(state="done")
    await home.coordinator.db.write(lambda conn: conn.execute(done))


async def pruned(home: LocalCoordinator) -> list[int]:
    query = sa.select(evaluations.c.version).where(evaluations.c.pruned)
    rows = await home.coordinator.db.read(lambda conn: conn.execute(query).scalars().all())
    return sorted(rows)


async def test_a_run_ends_once_and_not_before_its_time_or_while_it_is_paused(
    home: LocalCoordinator,
) -> None:
    await home.start_run(ALONE + "[stop]\nversions = 1\n")
    assert await home.coordinator.upkeep.end_runs() == 0
    ann = await versions(home, 1)
    unmerged, lease = await ann.work(7), await ann.claim()
    await home.coordinator.runs.pause("tiny")
    assert await home.coordinator.upkeep.end_runs() == 0
    await home.coordinator.runs.resume("tiny")
    assert await home.coordinator.upkeep.end_runs() == 1
    end = home.coordinator.upkeep._end
    assert await home.coordinator.db.write(lambda conn: end(conn, 1)) == 0  # another replica's look
    query = sa.select(sa.func.count()).where(record_lines.c.action == "run.complete")
    assert await home.coordinator.db.read(lambda conn: conn.execute(query).scalar_one()) == 1
    assert (await home.coordinator.runs.queries.info("tiny")).state == "completed"
    assert (await ann.verdict(unmerged.contribution)).state == "superseded"
    assert decode(await ann.get("/workers/me"), Me).pending_micro == 0
    refused(await ann.post(f"/tasks/{lease.task}/begin", {"attempt": lease.attempt}), 410)


async def test_a_run_that_was_paused_between_look_and_end_goes_on(home: LocalCoordinator) -> None:
    await home.start_run(ALONE + "[stop]\nversions = 1\n")
    await versions(home, 1)
    await home.coordinator.runs.pause("tiny")
    end = home.coordinator.upkeep._end
    assert await home.coordinator.db.write(lambda conn: end(conn, 1)) == 0
    assert (await home.coordinator.runs.queries.info("tiny")).state == "paused"


async def test_no_version_is_pruned_that_somebody_may_want(home: LocalCoordinator) -> None:
    """Version 0, the newest, the best, and those that somebody works from or will measure."""
    await home.start_run(ALONE + "[retention]\nlatest = 2\nevery = 0\n")
    ann = await versions(home, 1)
    lease = await ann.claim()
    assert (await ann.begin(lease)).version == 1
    await versions(home, 5, ann)
    best = sa.update(runs).values(best=3)
    await home.coordinator.db.write(lambda conn: conn.execute(best))
    assert await home.coordinator.upkeep.prune() == 0
    await measured(home)
    assert await home.coordinator.upkeep.prune() == 2
    assert await pruned(home) == [2, 4]
    assert await home.coordinator.upkeep.prune() == 0
    await ann.post(f"/tasks/{lease.task}/release", {"attempt": lease.attempt})
    assert await home.coordinator.upkeep.prune() == 1
    assert await pruned(home) == [1, 2, 4]
    row = await home.coordinator.db.read(lambda conn: run_rows.by_id(conn, 1))
    assert (row.head, row.best) == (6, 3)


async def test_a_sweep_leaves_young_files_and_what_is_not_its_own(
    home: LocalCoordinator, tmp_path: Path
) -> None:
    await home.start_run(ALONE)
    scratch = home.coordinator.blobs.scratch()
    old, young, folder = scratch / "old", scratch / "young", scratch / "folder"
    old.write_text("left by a killed process")
    young.write_text("written now")
    folder.mkdir(exist_ok=True)
    now = home.clock.now()
    os.utime(old, (now - upkeep.ORPHAN_AGE_S - 1,) * 2)
    os.utime(young, (now - upkeep.ORPHAN_AGE_S + 1,) * 2)
    os.utime(folder, (now - upkeep.ORPHAN_AGE_S - 1,) * 2)
    await home.coordinator.upkeep.sweep()
    assert [path.exists() for path in (old, young, folder)] == [False, True, True]


async def test_a_store_that_is_another_databases_too_loses_nothing(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await home.start_run(ALONE + "[retention]\nlatest = 1\nevery = 0\n")
    await versions(home, 3)
    await measured(home)
    await home.coordinator.upkeep.prune()
    assert await pruned(home) == [1, 2]
    await home.clock.advance(2 * upkeep.ORPHAN_AGE_S)

    async def theirs() -> bool:
        return False

    blobs = home.coordinator.blobs
    before = {entry.sha256 async for entry in blobs.entries()}
    with monkeypatch.context() as patched:
        patched.setattr(home.coordinator.store_marks, "renew", theirs)
        assert await home.coordinator.upkeep.sweep() == 0
    assert {entry.sha256 async for entry in blobs.entries()} == before
    assert await home.coordinator.upkeep.sweep() > 0


async def test_a_chore_that_fails_keeps_no_other_from_its_turn(home: LocalCoordinator) -> None:
    async def failing() -> None:
        raise Unavailable("the store rests")

    async def broken() -> None:
        raise ZeroDivisionError

    chore = home.coordinator.upkeep._try
    await chore("store", failing())
    with pytest.raises(ZeroDivisionError):  # a bug is not silenced
        await chore("store", broken())
