"""Replicas whose disk is full, whose clock is wrong, or whose database takes no more connections."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from sqlalchemy import text

from coordinator.config import Settings
from coordinator.database import runs
from coordinator.database.engine.open_database import Database
from coordinator.database.engine.postgres import POOL
from coordinator.services import opened
from coordinator.upkeep.backup import backup, restore
from shared.clock import machine_time
from shared.errors import StorageFull, Unavailable
from shared.units import HOUR_S
from tests.support.databases import Postgres
from tests.support.local_coordinator import RUN, LocalCoordinator, local_coordinator, refused
from tests.support.virtual_clock import VirtualClock

SHORT = RUN.replace("quorum = 2", "quorum = 1")


@pytest.fixture
async def fleet(postgres: Postgres, tmp_path: Path) -> AsyncIterator[list[LocalCoordinator]]:
    """Three replicas on one clock."""
    url, blobs, clock = await postgres.fresh(), str(tmp_path / "blobs"), VirtualClock()
    async with AsyncExitStack() as stack:
        made = list[LocalCoordinator]()
        for name in ("one", "two", "three"):
            (tmp_path / name).mkdir()
            if made:
                shutil.copy(tmp_path / "one" / "signing.key", tmp_path / name)
            data_dir = str(tmp_path / name)
            settings = Settings(data_dir=data_dir, database=url, blobs=blobs, space_floor_bytes=0)
            replica = await stack.enter_async_context(opened(settings, clock))
            made.append(LocalCoordinator(replica, clock))
        yield made


async def test_a_replica_with_a_full_disk_holds_up_nobody(
    fleet: list[LocalCoordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    full, roomy, _ = fleet
    await full.start_run(SHORT)
    ann = await full.join("Ann")
    lease = await ann.claim()
    begun = await ann.begin(lease)
    data = await ann.update("tiny", 1)

    async def no_room(sha256: str, path: Path) -> None:
        raise StorageFull("no space is left")

    monkeypatch.setattr(full.coordinator.blobs, "store_file", no_room)
    info = (await ann.announce(lease, data)).json()
    assert refused(await ann.put(info["upload_id"], 0, data), 507).code == "storage_full"
    ann.http = roomy.client(f"{ann.worker_id}.{ann.secret}")
    await ann.upload(lease, data)
    assert (await ann.submit(lease, begun, data)).state == "accepted"
    row = await roomy.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
    with pytest.raises(StorageFull):
        await full.coordinator.merger.merge_if_due(row.id)
    assert await roomy.coordinator.merger.merge_if_due(row.id)
    row = await roomy.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
    assert row.head == 1


async def test_a_backup_made_while_three_replicas_work_is_whole(
    fleet: list[LocalCoordinator], tmp_path: Path
) -> None:
    one = fleet[0].coordinator
    await fleet[0].start_run(SHORT)
    run = await one.db.read(lambda conn: runs.by_name(conn, "tiny"))
    workers = [
        await home.join(name) for home, name in zip(fleet, ("Ann", "Bob", "Cem"), strict=True)
    ]

    async def work(rounds: Iterable[int]) -> None:
        for number in rounds:
            assert (await workers[number % 3].work(number)).state != "rejected"
            other = fleet[(number + 1) % 3].coordinator
            assert await other.merger.merge_if_due(run.id)
            await other.upkeep.sweep()

    await work([0])
    saved, place = tmp_path / "saved", Settings(data_dir=str(tmp_path / "drill"))
    clock = fleet[0].clock
    await asyncio.gather(backup(one.db, one.blobs, one.settings, clock, saved), work(range(1, 7)))
    await restore(place, saved)
    async with opened(place, VirtualClock()) as drill:
        report = await drill.checks.run()
        row = await drill.db.read(lambda conn: runs.by_name(conn, "tiny"))
    assert report.breaches == ()
    assert 1 <= row.head <= 7


async def test_a_wrong_clock_of_a_machine_deletes_no_file_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_coordinator(tmp_path) as home:
        whole = home.coordinator
        monkeypatch.setattr(home.clock, "offset_s", 72 * HOUR_S, raising=False)  # it is behind
        used = [whole.blobs.scratch() / "merge-1", whole.blobs.scratch() / "uploads" / ("a" * 32)]
        now = machine_time(home.clock)
        for path in used:
            path.write_bytes(b"half")
            os.utime(path, (now, now))
        await whole.uploads.expire()
        await whole.upkeep.sweep()
        assert [path.read_bytes() for path in used] == [b"half", b"half"]


async def test_a_database_without_free_connections_says_so_and_is_used_again(
    postgres: Postgres,
) -> None:
    url = await postgres.fresh()
    name = url.split("@/")[1].split("?")[0]
    await postgres.admin(
        f"CREATE ROLE few_{name} LOGIN CONNECTION LIMIT 2",
        f"GRANT ALL ON ALL TABLES IN SCHEMA public TO few_{name}",
        database=name,
    )
    database = await Database.open(url.replace("tester@", f"few_{name}@"))
    asked = [
        database.read(lambda conn: conn.execute(text("SELECT pg_sleep(0.2)")).close())
        for _ in range(POOL)
    ]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    refusals = [each for each in outcomes if each is not None]
    assert 0 < len(refusals) < POOL
    for refusal in refusals:
        assert isinstance(refusal, Unavailable)
        assert "takes no more connections" in refusal.message
    await database.read(lambda conn: conn.execute(text("SELECT 1")).close())
    await database.close()
