"""Open what a released version left on disks, and go on with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.config import Settings
from coordinator.upkeep.backup import restore
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import LocalMachine
from tests.support.released import GOLDEN, VOLUNTEER, unpack
from volunteer.account.profile_directory import Profile
from volunteer.control import events

RELEASES = sorted(GOLDEN.glob("released-*.tar.gz"))
AGAIN = "not released yet? make the files anew: python -m tests.support.released"


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    unpack(request.param, tmp_path)
    return tmp_path


async def sound(home: LocalCoordinator) -> None:
    """Every invariant holds, and what the release knew is known."""
    found = await home.coordinator.checks.run()
    assert found.breaches == (), AGAIN
    (run,) = await home.coordinator.runs.queries.listing()
    assert (run.state, run.version >= 1) == ("running", True)
    assert [row.nickname for row in await home.coordinator.volunteers.list()] == [VOLUNTEER]


async def goes_on(home: LocalCoordinator) -> None:
    """A newcomer's work is merged."""
    (run,) = await home.coordinator.runs.queries.listing()
    bob = await home.join("Bob")
    assert (await bob.work(1)).state == "accepted"
    assert await home.coordinator.merger.merge_if_due(1)
    assert (await home.coordinator.runs.queries.listing())[0].version == run.version + 1
    assert (await home.coordinator.checks.run()).breaches == ()


async def test_a_data_directory_of_a_release_is_served(folder: Path) -> None:
    async with local_coordinator(folder / "coordinator") as home:
        await sound(home)
        await goes_on(home)


async def test_a_backup_of_a_release_is_restored(folder: Path) -> None:
    settings = Settings(data_dir=str(folder / "new"), space_floor_bytes=0)
    await restore(settings, folder / "backup")
    async with local_coordinator(folder / "new") as home:
        await sound(home)
        await goes_on(home)


async def test_a_volunteer_of_a_release_sends_what_it_kept_and_works_on(folder: Path) -> None:
    async with local_coordinator(folder / "coordinator") as home:
        machine = LocalMachine(folder / "machine", home)
        profile = Profile(machine.directories.profile)
        identity = profile.current()
        assert identity is not None, AGAIN
        assert identity.nickname == VOLUNTEER
        assert profile.verdicts() != ()
        async with home.coordinator.working(), machine.working(max_tasks=2) as process:
            assert await process.ended() == 0
        assert len(process.all(events.Submitted)) == 1 + 2
        assert (await home.coordinator.checks.run()).breaches == ()
