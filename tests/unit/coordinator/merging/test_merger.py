"""Merges that must not be: of runs that rest or ended, of leases that were lost, of bytes that are
not blamed on anybody.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.merges import merges
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import failures
from coordinator.database.tables.versions import versions
from coordinator.storage.blobs import DamagedBlob
from shared.errors import StorageFull, Unavailable
from shared.protocol.accounts import Me
from shared.protocol.contributions import Verdict
from tests.support.local_coordinator import RUN, LocalCoordinator, Worker, decode, local_coordinator


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path) as made:
        await made.start_run(RUN)
        yield made


async def team(home: LocalCoordinator) -> list[tuple[Worker, Verdict]]:
    """Two whose work may be merged."""
    workers = [await home.join(name) for name in ("Ann", "Bob")]
    return [(worker, await worker.work(seed)) for seed, worker in enumerate(workers)]


async def values(home: LocalCoordinator, *columns: Any) -> list[Any]:
    query = sa.select(*columns).order_by(next(iter(columns[0].table.primary_key)))
    rows = await home.coordinator.db.read(lambda conn: conn.execute(query).all())
    return [row[0] if len(columns) == 1 else tuple(row) for row in rows]


async def sound(home: LocalCoordinator) -> bool:
    report = await home.coordinator.checks.run()
    return report.breaches == () and await home.coordinator.ledger.check() == ()


async def earned(worker: Worker) -> int:
    return decode(await worker.get("/workers/me"), Me).earned_micro


def during(
    home: LocalCoordinator, patch: pytest.MonkeyPatch, act: Callable[[], Awaitable[object]]
) -> None:
    """Let something happen while a merge stores its files."""
    put_file, left = home.coordinator.blobs.put_file, [act]

    async def and_meanwhile(sha256: str, path: Path) -> None:
        await put_file(sha256, path)
        while left:
            await left.pop()()

    patch.setattr(home.coordinator.blobs, "put_file", and_meanwhile)


async def taken_over(home: LocalCoordinator) -> None:
    """Let another process have the merge, as after a silence of this one."""
    values = {"owner": "another", "attempt": merges.c.attempt + 1}
    await home.coordinator.db.write(lambda conn: conn.execute(sa.update(merges).values(**values)))


async def test_a_run_that_rests_is_not_merged(home: LocalCoordinator) -> None:
    await team(home)
    await home.coordinator.runs.pause("tiny")
    assert not await home.coordinator.merger.merge_if_due(1)
    assert await values(home, merges.c.id) == []  # not even tried
    assert await values(home, contributions.c.state) == ["accepted", "accepted"]
    await home.coordinator.runs.resume("tiny")
    assert await home.coordinator.merger.merge_if_due(1)


async def test_below_the_quorum_nothing_is_merged(home: LocalCoordinator) -> None:
    ann, bob = await home.join("Ann"), await home.join("Bob")
    await bob.claim()
    await ann.work(1)
    assert not await home.coordinator.merger.merge_if_due(1)
    assert await values(home, merges.c.id) == []


async def test_a_run_that_ends_during_a_merge_gets_no_version_and_pays_once(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await team(home)
    during(home, monkeypatch, lambda: home.coordinator.runs.stop("tiny"))
    assert not await home.coordinator.merger.merge_if_due(1)
    assert await values(home, runs.c.head) == [0]
    assert await values(home, contributions.c.state) == ["superseded", "superseded"]
    assert all([await earned(worker) > 0 for worker, _ in pair])
    assert home.coordinator.merger.outcomes == {("tiny", "overtaken"): 1}
    assert await sound(home)


async def test_a_run_that_is_paused_during_a_merge_gets_its_version_later(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await team(home)
    during(home, monkeypatch, lambda: home.coordinator.runs.pause("tiny"))
    assert not await home.coordinator.merger.merge_if_due(1)
    assert await values(home, runs.c.head) == [0]
    assert await values(home, contributions.c.state) == ["accepted", "accepted"]
    await home.coordinator.runs.resume("tiny")
    assert await home.coordinator.merger.merge_if_due(1)
    assert await sound(home)


async def test_who_lost_the_lease_of_a_merge_commits_nothing_and_ends_nothing(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await team(home)
    during(home, monkeypatch, lambda: taken_over(home))
    assert not await home.coordinator.merger.merge_if_due(1)
    assert await values(home, runs.c.head) == [0]
    assert await values(home, contributions.c.state) == ["accepted", "accepted"]
    assert await values(home, merges.c.state, merges.c.owner) == [("leased", "another")]
    assert not await home.coordinator.merger.merge_if_due(1)  # the other one makes it
    assert await sound(home)


async def damaged(home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch, sha256: str) -> None:
    """Let the store give other bytes for one name."""
    local = home.coordinator.blobs.local

    async def other(name: str) -> Path:
        if name == sha256:
            raise DamagedBlob(name)
        return await local(name)

    monkeypatch.setattr(home.coordinator.blobs, "local", other)


async def test_a_damaged_update_is_left_out_at_once_and_blamed_on_nobody(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, _ = await team(home)
    sha256 = (await values(home, contributions.c.sha256))[0]
    await damaged(home, monkeypatch, sha256)
    assert not await home.coordinator.merger.merge_if_due(1)
    assert await values(home, contributions.c.state) == ["rejected", "accepted"]
    assert await values(home, failures.c.id) == []
    assert await values(home, merges.c.state, merges.c.failures) == [("failed", 0)]
    assert await earned(ann[0]) == 0
    assert await sound(home)


async def test_a_damaged_base_sets_no_work_aside(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await team(home)
    await damaged(home, monkeypatch, (await values(home, versions.c.master_sha256))[0])
    for _ in range(3):
        with pytest.raises(DamagedBlob):
            await home.coordinator.merger.merge_if_due(1)
    assert await values(home, contributions.c.state) == ["accepted", "accepted"]
    assert await values(home, merges.c.state, merges.c.failures) == [("abandoned", 0)]


@pytest.mark.parametrize("error", [StorageFull("no space is left"), Unavailable("the store rests")])
async def test_a_store_that_is_full_or_away_counts_as_no_failure(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    await team(home)

    async def failing(sha256: str, path: Path) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(home.coordinator.blobs, "put_file", failing)
        for _ in range(3):
            with pytest.raises(type(error)):
                await home.coordinator.merger.merge_if_due(1)
    assert await values(home, contributions.c.state) == ["accepted", "accepted"]
    assert await values(home, merges.c.failures) == [0]
    assert await home.coordinator.merger.merge_if_due(1)


async def test_who_lost_the_lease_sets_nobody_aside(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await team(home)
    sha256 = await home.coordinator.blobs.put_bytes(b"this is no file of tensors")
    planted = sa.update(contributions).where(contributions.c.id == 1).values(sha256=sha256)
    await home.coordinator.db.write(lambda conn: conn.execute(planted))
    assert not await home.coordinator.merger.merge_if_due(1)
    assert await values(home, contributions.c.state) == ["accepted", "accepted"]  # a first failure
    local = home.coordinator.blobs.local

    async def and_meanwhile(name: str) -> Path:
        await taken_over(home)
        return await local(name)

    monkeypatch.setattr(home.coordinator.blobs, "local", and_meanwhile)
    assert not await home.coordinator.merger.merge_if_due(1)
    assert await values(home, contributions.c.state) == ["accepted", "accepted"]
    assert await values(home, volunteers.c.standing) == ["vetted", "vetted"]
    assert await values(home, merges.c.owner, merges.c.failures) == [("another", 1)]


async def test_the_merger_looks_past_a_merge_that_another_process_makes(
    home: LocalCoordinator,
) -> None:
    await team(home)
    look = home.coordinator.merger._look
    running, due = await home.coordinator.db.read(look)
    assert [run.id for run in running] == [run.id for run in due] == [1]
    bid = {"run_id": 1, "base": 0, "shard": 0, "contributions": "[]", "terms": "{}"}
    lease = {"owner": "another", "lease_until": home.clock.now() + 60.0, "state": "leased"}
    blank = {"attempt": 1, "failures": 0, "message": "", "created_at": 0.0, "ended_at": None}
    await home.coordinator.db.write(
        lambda conn: conn.execute(sa.insert(merges).values(**bid | lease | blank))
    )
    assert (await home.coordinator.db.read(look))[1] == []
    assert not await home.coordinator.merger.merge_if_due(1)
    await home.clock.advance(61.0)
    assert [run.id for run in (await home.coordinator.db.read(look))[1]] == [1]
    assert await home.coordinator.merger.merge_if_due(1)
