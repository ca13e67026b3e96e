"""A coordinator that was restored from a backup, and the volunteers that saw what came after."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from coordinator.config import Settings
from coordinator.database import runs
from coordinator.upkeep.backup import backup, restore
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import SHORT, LocalMachine, Process
from volunteer.control import events
from volunteer.storage.receipts import ReceiptBook

MACHINES = int(os.environ.get("RESTORED_MACHINES", "2"))
PATIENCE_S = 90 * MACHINES


async def head(home: LocalCoordinator) -> int:
    return (await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))).head


async def at_work(machines: list[LocalMachine], home: LocalCoordinator, to: int) -> None:
    """Let all machines work until each has seen a version."""
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:

        async def work(machine: LocalMachine) -> None:
            machine.home = home
            async with machine.working() as process:
                while (agent := process.engine._agent) is None or (
                    agent.store.receipts.newest("tiny") < to
                ):
                    await asyncio.sleep(0.02)
                await process.kill()

        for machine in machines:
            group.create_task(work(machine))


@pytest.mark.timeout(120 + 3 * PATIENCE_S)
async def test_volunteers_go_on_by_themselves_and_keep_what_was_lost(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "one") as home:
        await home.start_run(SHORT)
        coordinator = home.coordinator
        machines = [LocalMachine(tmp_path / f"machine{n}", home) for n in range(MACHINES)]
        async with coordinator.working():
            for number, machine in enumerate(machines):
                await machine.join(f"Ann {number}")
            await at_work(machines, home, 2)
            await backup(
                coordinator.db,
                coordinator.blobs,
                coordinator.settings,
                coordinator.clock,
                tmp_path / "saved",
            )
            saved = await head(home)
            await at_work(machines, home, saved + 2)
        await coordinator.transparency.seal()
    await restore(Settings(data_dir=str(tmp_path / "two"), space_floor_bytes=0), tmp_path / "saved")
    async with local_coordinator(tmp_path / "two") as home, home.coordinator.working():
        assert await head(home) <= saved
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            going_on = [group.create_task(gone_on(machine, home)) for machine in machines]
        said = [notice for each in going_on for notice in each.result()]
        assert any("from a backup of" in notice for notice in said)
    assert len([*tmp_path.glob("machine*/**/receipts.1")]) == len(said)


async def gone_on(machine: LocalMachine, home: LocalCoordinator) -> list[str]:
    """Let a machine work until it is paid again; what it said of the restore."""
    machine.home = home
    async with machine.working() as process:
        await process.until(events.Judged)
        assert not failures(process)
        await process.kill()
        notices = process.all(events.Notice)
        return [each.message for each in notices if "was restored on" in each.message]


async def test_an_older_version_without_a_word_is_idleness_and_no_failure(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "one") as home, home.coordinator.working():
        await home.start_run(SHORT)
        machine = LocalMachine(tmp_path / "machine", home)
        await machine.join()
        async with machine.working() as process:
            await process.until(events.Judged)
            await process.kill()
        (folder,) = tmp_path.glob("machine/**/receipts")
        ReceiptBook(folder).note_version("tiny", 1000)
        async with machine.working() as process:
            idle = await process.until(events.Idle, lambda each: each.reason == "refused")
            assert "has not signed that it was restored" in idle.message
            assert not failures(process)
            await process.kill()


def failures(process: Process) -> list[str]:
    ended = process.all(events.TaskEnded)
    return [each.message for each in ended if each.how == "failed"] + [
        f"{each.reason}: {each.message}"
        for each in process.all(events.Idle)
        if each.reason == "failing"
    ]
