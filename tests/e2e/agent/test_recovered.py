"""PostgreSQL brought back to a moment by its own means, and the volunteers that saw what came
after.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from coordinator.config import Settings
from coordinator.upkeep.backup import state_recovery
from tests.e2e.agent.test_restored import at_work, failures, gone_on, head
from tests.support.databases import Postgres, _run, prepare_postgres, start_postgres
from tests.support.local_coordinator import local_coordinator
from tests.support.local_volunteer import SHORT, LocalMachine
from volunteer.control import events

pytestmark = pytest.mark.slow
OPTIONS = ("--checkpoint=fast", "--wal-method=none")


@pytest.fixture
def archiving() -> Iterator[Postgres]:
    """A server that copies its log of writes, as an organiser would configure it."""
    server = start_postgres(
        "archive_mode=on", "archive_command=mkdir -p ../archive && cp %p ../archive/%f"
    )
    _run(prepare_postgres(server))
    yield server
    server.stop()


def base_backup(server: Postgres) -> None:
    """Run pg_basebackup into the folder `base`, as the user that the server is run by."""
    program = Path(str(server.process.args[0])).with_name("pg_basebackup")  # type: ignore[index]
    owner = (server.directory / "data").stat()
    subprocess.run(
        [
            program,
            "-h",
            server.directory,
            "-U",
            "tester",
            "-D",
            server.directory / "base",
            *OPTIONS,
        ],
        check=True,
        capture_output=True,
        user=owner.st_uid if os.geteuid() == 0 else None,
        group=owner.st_gid if os.geteuid() == 0 else None,
        extra_groups=[] if os.geteuid() == 0 else None,
        cwd="/",
    )


async def now(server: Postgres) -> str:
    connection = await asyncpg.connect(
        host=str(server.directory), user="tester", database="postgres"
    )
    try:
        return str(await connection.fetchval("SELECT clock_timestamp()"))
    finally:
        await connection.close()


async def recovered(server: Postgres, moment: str) -> None:
    """Start from the base backup, up to a moment."""
    await server.admin("SELECT pg_switch_wal()")
    await asyncio.to_thread(server.end)  # which waits for the archive
    (server.directory / "data").rename(server.directory / "lost")
    (server.directory / "base").rename(server.directory / "data")
    (server.directory / "data" / "recovery.signal").touch()
    server.process = server.start(
        "restore_command=cp ../archive/%f %p",
        f"recovery_target_time={moment}",
        "recovery_target_action=promote",
    )
    await server.answers("SELECT 1")


async def test_a_moment_of_the_database_comes_back_and_volunteers_go_on(
    tmp_path: Path, archiving: Postgres
) -> None:
    url = await archiving.fresh()
    settings = Settings(data_dir=str(tmp_path / "one"), database=url, space_floor_bytes=0)
    async with local_coordinator(tmp_path / "one", database=url) as home:
        await home.start_run(SHORT)
        machine = LocalMachine(tmp_path / "machine", home)
        async with home.coordinator.working():
            await machine.join()
            await at_work([machine], home, 1)
            await asyncio.to_thread(base_backup, archiving)
            await at_work([machine], home, 3)
            kept, moment = -1, ""
            while kept != await head(home):
                kept, moment = await head(home), await now(archiving)
            await at_work([machine], home, kept + 2)
            await home.coordinator.transparency.seal()
    await recovered(archiving, moment)
    async with local_coordinator(tmp_path / "one", database=url) as home:
        assert await head(home) == kept
        assert (await home.coordinator.checks.run()).breaches == ()
        async with home.coordinator.working():
            machine.home = home
            async with machine.working() as process:
                await process.until(events.Idle, lambda each: each.reason == "refused")
                assert not failures(process)
                await process.kill()
    await state_recovery(settings)
    async with local_coordinator(tmp_path / "one", database=url) as home:
        async with home.coordinator.working():
            (said,) = await gone_on(machine, home)
        assert "was restored on" in said
        assert (await home.coordinator.checks.run()).breaches == ()


async def test_servers_that_never_stopped_tell_volunteers_of_the_recovery(
    tmp_path: Path, postgres: Postgres
) -> None:
    url = await postgres.fresh()
    settings = Settings(data_dir=str(tmp_path / "one"), database=url, space_floor_bytes=0)
    async with local_coordinator(tmp_path / "one", database=url) as home:
        await home.start_run(SHORT)
        machine = LocalMachine(tmp_path / "machine", home)
        async with home.coordinator.working():
            await machine.join()
            await at_work([machine], home, 1)
    earlier = await postgres.copy(url)
    async with local_coordinator(tmp_path / "one", database=url) as home:
        async with home.coordinator.working():
            await at_work([machine], home, await head(home) + 2)
            await home.coordinator.transparency.seal()
            await home.coordinator.losses.look()
            await postgres.replace(url, earlier)
            assert await home.coordinator.losses.look()
            machine.home = home
            async with machine.working() as process:
                await process.until(events.Idle, lambda each: each.reason == "refused")
                await state_recovery(settings)
                await home.clock.advance(2.0)
                await process.until(events.Judged)
                assert not failures(process)
                await process.kill()
                notices = [each.message for each in process.all(events.Notice)]
            assert any("was restored on" in notice for notice in notices)
            assert await home.coordinator.losses.look() == ""
        assert (await home.coordinator.checks.run()).breaches == ()
