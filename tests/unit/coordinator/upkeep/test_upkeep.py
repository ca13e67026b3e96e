"""Maintenance that must not be: ends of runs that go on, files that are still wanted."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs
from typing_extensions import override

from coordinator.database import datasets, unreferenced_blobs
from coordinator.database import recomputes as recompute_rows
from coordinator.database import runs as run_rows
from coordinator.database import versions as version_rows
from coordinator.database.experience import KEPT_S
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.contributions import contributions, uploads
from coordinator.database.tables.experience import chunks
from coordinator.database.tables.merges import merge_parts, merges, state_parts
from coordinator.database.tables.record import record_lines
from coordinator.database.tables.runs import runs
from coordinator.database.tables.trust import recomputes
from coordinator.database.tables.versions import evaluations
from coordinator.database.unreferenced_blobs import SWEEPER_S
from coordinator.rules import run_file
from coordinator.storage.staging import Staging
from coordinator.upkeep import upkeep
from coordinator.upkeep.backup import copy_blob
from coordinator.upkeep.store_mark import RENEW_S, stored_mark
from shared.errors import Unavailable
from shared.files.deletions import Reason as DeletionReason
from shared.protocol.accounts import Me
from shared.units import DAY_S
from tests.support.failpoints import fail, faults
from tests.support.local_coordinator import (
    RUN,
    LocalCoordinator,
    Worker,
    decode,
    local_coordinator,
    refused,
)
from tests.support.rollouts_run import RUN as ROLLOUTS

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
    with capture_logs() as lines:
        assert await home.coordinator.upkeep.end_runs() == 1
    (told,) = [line for line in lines if line["event"] == "run completed"]
    assert (told["run"], told["reason"]) == ("tiny", "version 1 of 1 is merged")
    end = home.coordinator.upkeep._end
    assert await home.coordinator.db.write(lambda conn: end(conn, 1)) == 0  # another replica's look
    r = record_lines.c
    query = sa.select(r.at, r.actor, r.subject, r.detail).where(r.action == "run.complete")
    entries = await home.coordinator.db.read(lambda conn: conn.execute(query).all())
    now, why = home.clock.now(), "version 1 of 1 is merged"
    assert [tuple(entry) for entry in entries] == [(now, "coordinator", "tiny", why)]
    row = await home.coordinator.db.read(lambda conn: run_rows.by_id(conn, 1))
    assert (row.state, row.ended_at, row.state_since) == ("completed", now, now)
    assert (row.state_actor, row.state_reason) == ("coordinator", why)
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
    kept = "[retention]\nlatest = 2\nevery = 0\n"
    await home.start_run(ALONE + kept)
    ann = await versions(home, 1)
    lease = await ann.claim()
    assert (await ann.begin(lease)).version == 1
    await versions(home, 5, ann)
    best = sa.update(runs).values(best=3)
    await home.coordinator.db.write(lambda conn: conn.execute(best))
    assert await home.coordinator.upkeep.prune() == 0
    await measured(home)
    own = (await home.coordinator.db.read(lambda conn: run_rows.by_id(conn, 1))).file
    # games that began at a version may have swapped to any later one
    for file, count in ((run_file.encode(run_file.parse(ROLLOUTS + kept)), 0), (own, 2)):
        taught = sa.update(runs).values(file=file)
        await home.coordinator.db.write(partial(sa.Connection.execute, statement=taught))
        assert await home.coordinator.upkeep.prune() == count
    assert await pruned(home) == [2, 4]
    assert await home.coordinator.upkeep.prune() == 0
    await ann.post(f"/tasks/{lease.task}/release", {"attempt": lease.attempt})
    assert await home.coordinator.upkeep.prune() == 1
    assert await pruned(home) == [1, 2, 4]
    row = await home.coordinator.db.read(lambda conn: run_rows.by_id(conn, 1))
    assert (row.head, row.best) == (6, 3)


async def test_pieces_of_uploads_stay_until_every_upload_that_had_them_has_ended(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pieces(Staging):
        def __init__(self) -> None:
            self.swept = list[float]()

        @override
        async def sweep(self, before: float) -> None:
            self.swept.append(before)

    pieces = Pieces()
    monkeypatch.setattr(home.coordinator.blobs, "staging", pieces)
    await home.coordinator.upkeep.sweep()
    assert pieces.swept == [home.clock.now() - 2 * DAY_S]


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

    before = await stored(home)
    with monkeypatch.context() as patched:
        patched.setattr(home.coordinator.store_marks, "renew", theirs)
        assert await home.coordinator.upkeep.sweep() == 0
    assert await stored(home) == before
    assert await home.coordinator.upkeep.sweep() > 0


async def test_a_backup_keeps_nothing_of_a_blob_that_the_store_damaged(
    home: LocalCoordinator, tmp_path: Path
) -> None:
    blobs, folder = home.coordinator.blobs, tmp_path / "saved"
    sound, victim = [await blobs.put_bytes(data) for data in (b"sound", b"damaged")]
    path = await blobs.local(victim)
    path.chmod(0o600)
    path.write_bytes(b"DAMAGED")
    assert not await copy_blob(blobs, "0" * 64, folder / "missing")
    assert not await copy_blob(blobs, victim, folder / victim)
    assert await copy_blob(blobs, sound, folder / sound)
    assert [path.name for path in folder.iterdir()] == [sound]


async def stored(home: LocalCoordinator) -> set[str]:
    return {entry.sha256 async for entry in home.coordinator.blobs.entries()}


async def test_no_file_goes_that_a_recompute_still_needs(home: LocalCoordinator) -> None:
    """Of an update that was merged long ago, and of its base, which retention let go."""
    kept = "[retention]\nlatest = 1\nevery = 0\n[trust]\nrecompute = 1.0\n"
    await home.start_run(ALONE + kept)
    await versions(home, 3)
    await measured(home)
    await home.coordinator.upkeep.prune()
    assert await pruned(home) == [1, 2]
    needed = await home.coordinator.db.read(recompute_rows.blobs_in_use)
    assert len(needed) == 6  # three updates and their bases
    await home.clock.advance(2 * upkeep.ORPHAN_AGE_S)
    await home.coordinator.upkeep.sweep()
    assert needed <= await stored(home)
    done = sa.update(recomputes).values(state="done", result="passed")
    await home.coordinator.db.write(lambda conn: conn.execute(done))
    await home.clock.advance(2 * upkeep.ORPHAN_AGE_S)
    assert await home.coordinator.upkeep.sweep() == 5
    assert len(needed & await stored(home)) == 1  # version 0 stays


async def test_no_file_goes_to_which_a_row_refers(home: LocalCoordinator) -> None:
    """Of uploads that were not submitted, of games, of merges in parts, and of states."""
    await home.start_run(ALONE)
    ann = await home.join("Ann")
    lease = await ann.claim()
    begun = await ann.begin(lease)
    data = await ann.update(lease.run, 1)
    await ann.upload(lease, data)
    put = home.coordinator.blobs.put_bytes
    chunk, part, state, in_shards = [await put(b"file %d" % number) for number in range(4)]
    now = home.clock.now()
    base = await home.coordinator.db.read(lambda conn: version_rows.get(conn, 1, 0))
    used = base.master_sha256  # a name of a kept version
    lease_row = {"owner": "another", "attempt": 1, "failures": 0, "message": ""}
    merge = lease_row | {
        "id": 1, "run_id": 1, "base": 0, "shard": 0, "state": "leased", "contributions": "[]",
        "lease_until": now + 4 * upkeep.ORPHAN_AGE_S, "terms": "{}", "created_at": now,
    }  # fmt: skip
    made = json.dumps({"sha256": part, "size": 6, "state_sha256": state})
    rows = [
        (chunks, {
            "run_id": 1, "number": 0, "sha256": chunk, "size": 6, "episodes": 1, "samples": 1,
            "sealed_at": now,
        }),
        (merges, merge),
        (merge_parts, lease_row | {
            "merge_id": 1, "phase": "merge", "shard": 0, "state": "done", "result": made,
            "lease_until": now,
        }),
        (state_parts, {"state_sha256": used, "shard": 0, "sha256": in_shards, "size": 6}),
    ]  # fmt: skip

    def add(conn: sa.Connection) -> None:
        for table, row in rows:
            conn.execute(sa.insert(table).values(**row))

    await home.coordinator.db.write(add)
    await home.clock.advance(2 * upkeep.ORPHAN_AGE_S)
    assert await home.coordinator.upkeep.sweep() == 0
    assert {chunk, part, state, in_shards} <= await stored(home)
    assert (await ann.submit(lease, begun, data)).state == "accepted"

    def free(conn: sa.Connection) -> None:
        later = home.clock.now()
        conn.execute(sa.update(chunks).values(retired_at=now - KEPT_S))
        conn.execute(sa.update(merges).values(lease_until=later - upkeep.ORPHAN_AGE_S - 1))
        conn.execute(sa.update(state_parts).values(state_sha256="0" * 64))

    await home.coordinator.db.write(free)
    assert await home.coordinator.upkeep.sweep() == 4
    assert not {chunk, part, state, in_shards} & await stored(home)


async def test_the_network_of_a_forgotten_account_is_forgotten_a_day_later(
    home: LocalCoordinator,
) -> None:
    await home.join("Ann")
    gone = sa.update(volunteers).values(state="forgotten", network="192.0.2.0")
    await home.coordinator.db.write(lambda conn: conn.execute(gone))
    networks = sa.select(volunteers.c.network)
    for days, network in ((0.9, "192.0.2.0"), (0.2, "")):
        await home.clock.advance(days * DAY_S)
        await home.coordinator.upkeep.sweep()
        read = await home.coordinator.db.read(lambda conn: conn.execute(networks).scalar_one())
        assert read == network


async def let_go(home: LocalCoordinator, count: int) -> set[str]:
    """So many old blobs to which nothing refers."""
    put = home.coordinator.blobs.put_bytes
    names = {await put(b"blob %d" % number) for number in range(count)}
    await home.clock.advance(2 * upkeep.ORPHAN_AGE_S)
    return names


async def test_a_sweep_deletes_few_files_so_that_a_mistake_takes_hours(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await home.start_run(ALONE)
    registered = len(await home.coordinator.db.read(datasets.all_registered))
    monkeypatch.setattr(upkeep, "SWEPT_MIN", 2)
    names = await let_go(home, 9)
    with capture_logs() as lines:
        assert await home.coordinator.upkeep.sweep() == 2
    assert [line["blobs"] for line in lines if line["event"] == "swept"] == [2]
    assert len(names & await stored(home)) == 7
    monkeypatch.setattr(upkeep, "SWEPT_SHARE", 4.5 / registered)
    assert await home.coordinator.upkeep.sweep() == 4
    assert len(names & await stored(home)) == 3


async def test_a_sweep_that_fails_or_takes_long_leaves_the_rest_to_the_next(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another sweeper may hold them by then, and whoever writes them again must not wait."""
    names, delete = await let_go(home, 5), home.coordinator.blobs.delete
    deleted = list[str]()

    async def slow(name: str, why: DeletionReason) -> None:
        assert why == "let go"
        await delete(name, why)
        deleted.append(name)
        await home.clock.advance(2.0 if len(deleted) > 1 else SWEEPER_S / 2 - 1)

    async def failing(name: str, why: DeletionReason) -> None:
        if len(deleted) == 3:
            raise Unavailable("the store rests")
        await delete(name, why)
        deleted.append(name)

    with monkeypatch.context() as patched:
        patched.setattr(home.coordinator.blobs, "delete", slow)
        assert await home.coordinator.upkeep.sweep() == 2
    assert names - {*deleted} == names & await stored(home)
    await home.clock.advance(2 * upkeep.ORPHAN_AGE_S)
    with monkeypatch.context() as patched:
        patched.setattr(home.coordinator.blobs, "delete", failing)
        with pytest.raises(Unavailable):
            await home.coordinator.upkeep.sweep()
    left = names - {*deleted}
    assert (len(left), left) == (2, names & await stored(home))
    announce = partial(unreferenced_blobs.announce, names=left, since=home.clock.now())
    assert (await home.coordinator.db.write(announce)).keys() == left  # nobody deletes them now
    assert await home.coordinator.upkeep.sweep() == 0  # they are young again
    await home.clock.advance(2 * upkeep.ORPHAN_AGE_S)
    assert await home.coordinator.upkeep.sweep() == 2


async def test_who_waits_for_the_end_of_a_run_hears_of_it(home: LocalCoordinator) -> None:
    await home.start_run(ALONE + "[stop]\nversions = 1\n")
    await versions(home, 1)
    topics = ("run:1", "runs", "queue", "versions")
    watches = [home.coordinator.signals.watch(topic) for topic in topics]
    assert not any([await watch.wait(0) for watch in watches])
    assert await home.coordinator.upkeep.end_runs() == 1
    assert all([await watch.wait(0) for watch in watches])
    assert await home.coordinator.upkeep.end_runs() == 0
    assert not any([await watch.wait(0) for watch in watches])


async def until(
    home: LocalCoordinator, job: asyncio.Future[None], holds: Callable[[], Awaitable[bool]]
) -> None:
    """Let time pass until something holds."""
    async with asyncio.timeout(120):
        while not await holds():
            assert not job.done()
            await home.clock.advance(upkeep.TICK_S)


async def test_chores_come_each_in_its_time_until_the_server_stops(home: LocalCoordinator) -> None:
    """What a dead process left is decided first, and a stop gives the store up."""
    await home.start_run(ALONE + "[stop]\nversions = 1\n")
    ann = await home.join("Ann")
    with faults(fail(RuntimeError("the process is gone")).after("write _receive")).installed():
        lease = await ann.claim()
        begun = await ann.begin(lease)
        data = await ann.update(lease.run, 1)
        await ann.upload(lease, data)
        left = ann.submission(lease, begun, data)
        refused(await ann.post(f"/tasks/{lease.task}/submit", left), 500)
    bob = await home.join("Bob")
    given_up = await bob.claim()
    await bob.begin(given_up)
    await bob.upload(given_up, await bob.update(given_up.run, 2))  # and never submits it
    old = home.coordinator.blobs.scratch() / "old"
    old.write_text("left by a killed process")
    os.utime(old, (home.clock.now() - upkeep.ORPHAN_AGE_S - 1,) * 2)
    coordinator, began = home.coordinator, home.clock.now()

    async def decided() -> bool:
        query = sa.select(contributions.c.state)
        states = await coordinator.db.read(lambda conn: conn.execute(query).scalars().all())
        return "checking" not in states

    async def lease_end() -> float:
        mark = await stored_mark(coordinator.blobs)
        assert mark is not None
        return mark.until

    async def renewed() -> bool:
        return await lease_end() > first_end

    async def ended() -> bool:
        return (await coordinator.runs.queries.info("tiny")).state == "completed"

    async def swept() -> bool:
        return not old.exists()

    stop = asyncio.Event()
    job = asyncio.ensure_future(coordinator.upkeep.run(stop))
    await until(home, job, decided)
    first_end = await lease_end()
    assert first_end > began
    merged_at = home.clock.now()
    assert await coordinator.merger.merge_if_due(1)
    for _ in range(1000):  # without any time passing
        if await ended():
            break
        await asyncio.sleep(0.001)
    assert await ended()
    assert home.clock.now() == merged_at
    await until(home, job, renewed)
    assert home.clock.now() - began > RENEW_S
    await until(home, job, swept)
    assert home.clock.now() - began > upkeep.SWEEP_S
    count = sa.select(sa.func.count()).select_from(uploads)
    assert await coordinator.db.read(lambda conn: conn.execute(count).scalar_one()) == 0
    stop.set()
    async with asyncio.timeout(120):
        while not job.done():
            await home.clock.advance(upkeep.TICK_S)
    await job
    assert await lease_end() <= home.clock.now()


async def test_a_sweep_prunes_and_decides_what_other_processes_left_meanwhile(
    home: LocalCoordinator,
) -> None:
    await home.start_run(ALONE + "[retention]\nlatest = 1\nevery = 0\n")
    ann = await versions(home, 3)
    await measured(home)
    stop, signals = asyncio.Event(), home.coordinator.signals
    job = asyncio.ensure_future(home.coordinator.upkeep.run(stop))
    while home.clock.next_at is None:  # until it waits for its next turn
        await asyncio.sleep(0.001)
    with faults(fail(RuntimeError("the process is gone")).after("write _receive")).installed():
        lease = await ann.claim()
        begun = await ann.begin(lease)
        data = await ann.update(lease.run, 9)
        await ann.upload(lease, data)
        refused(
            await ann.post(f"/tasks/{lease.task}/submit", ann.submission(lease, begun, data)), 500
        )

    async def decided() -> bool:
        query = sa.select(contributions.c.state)
        states = await home.coordinator.db.read(lambda conn: conn.execute(query).scalars().all())
        return "checking" not in states

    async def is_pruned() -> bool:
        return await pruned(home) == [1, 2]

    assert not await decided()
    for chore in (decided, is_pruned):
        await until(home, job, chore)
    stop.set()
    signals.deliver(None)
    await job


async def test_a_chore_that_fails_keeps_no_other_from_its_turn(home: LocalCoordinator) -> None:
    async def failing() -> None:
        raise Unavailable("the store rests")

    async def broken() -> None:
        raise ZeroDivisionError

    chore = home.coordinator.upkeep._try
    with capture_logs() as lines:
        await chore(failing)
    (line,) = lines
    assert (line["event"], line["error"]) == ("chore failed", "the store rests")
    assert line["chore"].endswith("failing")
    with pytest.raises(ZeroDivisionError):  # a bug is not silenced
        await chore(broken)
