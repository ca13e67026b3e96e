"""Servers whose database loses its newest transactions, and how they go on."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, text

from coordinator.database import key_values, runs
from coordinator.database.engine.open_database import Database
from coordinator.services import Coordinator
from coordinator.upkeep.alerts import standing
from coordinator.upkeep.backup import state_recovery
from coordinator.upkeep.upkeep import ORPHAN_AGE_S
from shared.errors import Configuration, Unavailable
from tests.support.databases import Postgres
from tests.support.local_coordinator import RUN, LocalCoordinator, local_coordinator

SHORT = RUN.replace("quorum = 2", "quorum = 1")


async def merged(home: LocalCoordinator, name: str) -> None:
    """One volunteer's work becomes a version, and the record is sealed."""
    worker = await home.join(name)
    assert (await worker.work(sum(name.encode()))).state == "accepted"
    assert await home.coordinator.merger.merge_if_due(1)
    await home.coordinator.transparency.seal()


async def alerts(coordinator: Coordinator) -> dict[str, str]:
    await coordinator.alerts.look()
    return {each.kind: each.message for each in await coordinator.alerts.list()}


async def stored_loss(coordinator: Coordinator) -> str:
    return await coordinator.db.read(lambda conn: key_values.get(conn, key_values.LOST)) or ""


async def test_growth_is_no_loss(tmp_path: Path, database_url: str) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        coordinator = home.coordinator
        assert await coordinator.losses.look() == ""
        await home.start_run(SHORT)
        for name in ("Ann", "Bobby", "Carlotta"):
            await merged(home, name)
            assert await coordinator.losses.look() == ""
        await coordinator.runs.create(SHORT.replace('"tiny"', '"other"'))
        assert await coordinator.losses.look() == ""
        await coordinator.runs.rollback("tiny", 1)
        await coordinator.runs.stop("tiny")
        assert await coordinator.losses.look() == ""
        assert "database" not in await alerts(coordinator)


async def test_a_restarted_server_still_says_what_was_lost(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        await home.start_run(SHORT)
        await merged(home, "Ann")
        await home.coordinator.losses.look()
        await home.coordinator.db.write(forgotten)
        assert await home.coordinator.losses.look() == "tiny is at version 0 and was at 1"
        assert await home.coordinator.losses.look() == ""  # one loss is told once
    async with local_coordinator(tmp_path, database=database_url) as home:
        assert await home.coordinator.losses.look() == ""
        assert "tiny is at version 0 and was at 1" in (await alerts(home.coordinator))["database"]


async def test_a_loss_is_an_alert_at_once_and_not_at_the_next_look(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        coordinator = home.coordinator
        await home.start_run(SHORT)
        await merged(home, "Ann")
        assert await coordinator.losses.look() == ""
        looking = asyncio.create_task(coordinator.alerts.run(asyncio.Event()))
        while home.clock.next_at is None:  # until it waits for its next look
            await asyncio.sleep(0.01)
        assert not coordinator.alerts.standing()["database"]
        await coordinator.db.write(forgotten)
        assert await coordinator.losses.look()
        async with asyncio.timeout(10.0):
            while not coordinator.alerts.standing()["database"]:
                await asyncio.sleep(0.01)
        looking.cancel()


async def test_a_server_writes_nothing_to_a_database_that_a_newer_one_migrated(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        await home.start_run(SHORT)
        ann = await home.join("Ann")
        await home.coordinator.losses.look()
        await home.coordinator.db.write(migrated)
        with pytest.raises(Configuration, match="written by a newer version"):
            await home.coordinator.losses.look()
        reply = await ann.post("/claims", {"claim_id": "0" * 32, "codecs": ["float32"]})
        assert (reply.status_code, "newer version" in reply.text) == (503, True)
        assert (await home.client().get("/ready")).status_code == 503
        with pytest.raises(Unavailable, match="newer version"):
            await home.coordinator.db.write(lambda conn: None)
        assert "newer version" in (await home.coordinator.alerts.look())[0].message
    with pytest.raises(Configuration, match="newer version"):
        await Database.open(database_url)


def migrated(conn: Connection) -> None:
    conn.execute(text("UPDATE alembic_version SET version_num = '9999'"))


def forgotten(conn: Connection) -> None:
    runs.set_values(conn, runs.by_name(conn, "tiny").id, head=0)


# --- a database in the place of another, under two replicas ---


class Fleet:
    """Two replicas, and the database of an earlier moment."""

    def __init__(self, postgres: Postgres, url: str, replicas: list[LocalCoordinator]) -> None:
        self.postgres, self.url, self.replicas = postgres, url, replicas
        self.earlier = ""

    @property
    def coordinators(self) -> list[Coordinator]:
        return [replica.coordinator for replica in self.replicas]

    async def lose(self) -> None:
        """Put the earlier database in the place of the present one."""
        await self.postgres.replace(self.url, self.earlier)

    async def looked(self) -> list[str]:
        return [await each.losses.look() for each in self.coordinators]


@pytest.fixture
async def fleet(postgres: Postgres, tmp_path: Path) -> AsyncIterator[Fleet]:
    url = await postgres.fresh()
    blobs = str(tmp_path / "blobs")
    async with local_coordinator(tmp_path / "one", database=url, blobs=blobs) as home:
        await home.coordinator.store_marks.claim()
        await home.start_run(SHORT)
        await merged(home, "Ann")
    earlier = await postgres.copy(url)
    (tmp_path / "two").mkdir()
    shutil.copy(tmp_path / "one" / "signing.key", tmp_path / "two")
    async with (
        local_coordinator(tmp_path / "one", database=url, blobs=blobs) as one,
        local_coordinator(tmp_path / "two", database=url, blobs=blobs) as two,
    ):
        made = Fleet(postgres, url, [one, two])
        made.earlier = earlier
        yield made


async def test_every_replica_notices_and_none_deletes_until_it_is_recovered(fleet: Fleet) -> None:
    one, two = fleet.coordinators
    home = fleet.replicas[0]
    assert await fleet.looked() == ["", ""]
    await merged(home, "Bobby")
    await merged(home, "Carla")
    leftover = await one.blobs.put_bytes(b"announced, never registered")
    assert await fleet.looked() == ["", ""]
    eve = await home.join("Evelyn")
    await fleet.lose()
    for lost in await fleet.looked():
        assert lost.startswith("tiny is at version 1 and was at 3, the record has ")
    for each in fleet.coordinators:
        assert "lost its newest transactions: tiny is at" in (await alerts(each))["database"]
        await home.clock.advance(2 * ORPHAN_AGE_S)
        assert await each.upkeep.sweep() == 0
    assert await one.blobs.size(leftover)
    reply = await eve.post("/claims", {"claim_id": "0" * 32, "codecs": ["float32"]})
    assert reply.status_code == 401  # her account was lost, and no replica remembers it

    stated = await state_recovery(one.settings)
    assert stated.heads == {"tiny": 1}
    await home.clock.advance(2.0)
    await fleet.replicas[1].clock.advance(2.0)
    for each in fleet.coordinators:
        signed = (await each.server.info()).restored
        assert signed is not None
        assert '"tiny":1' in signed.payload
    assert await fleet.looked() == ["", ""]
    assert await stored_loss(two) == ""
    await merged(home, "Denise")
    assert await fleet.looked() == ["", ""]
    assert "database" not in await alerts(two)


async def test_a_replica_that_sees_the_database_only_after_the_recovery_reports_nothing(
    fleet: Fleet,
) -> None:
    await merged(fleet.replicas[0], "Bobby")
    await fleet.looked()
    await fleet.lose()
    one, two = fleet.coordinators
    assert await one.losses.look()
    await state_recovery(one.settings)
    assert await two.losses.look() == ""
    assert await stored_loss(two) == ""


async def test_versions_that_grew_again_are_no_proof_that_nothing_was_lost(fleet: Fleet) -> None:
    two = fleet.coordinators[1]
    await merged(fleet.replicas[0], "Bobby")
    assert await two.losses.look() == ""
    await fleet.lose()
    await merged(fleet.replicas[0], "Carlotta")
    await merged(fleet.replicas[0], "Denise")
    assert "tiny has another version 2 than before" in await two.losses.look()


@pytest.mark.slow
async def test_servers_at_work_notice_a_loss_within_ten_seconds(fleet: Fleet) -> None:
    await merged(fleet.replicas[0], "Bobby")
    assert await fleet.looked() == ["", ""]
    one, two = fleet.coordinators
    async with one.working(), two.working():
        await fleet.lose()
        async with asyncio.timeout(10.0):
            while "lost its newest transactions" not in await standing_alerts(two):
                await asyncio.sleep(0.05)
                for replica in fleet.replicas:
                    await replica.clock.advance(0.05)


async def standing_alerts(coordinator: Coordinator) -> str:
    try:
        alerts = await coordinator.db.read(standing)
    except Unavailable:  # the connections were cut
        return ""
    return "; ".join(alert.message for alert in alerts)
