"""Leaving: what is there is listed, tasks go back, and nothing is removed that was to stay."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from coordinator.database.tables.accounts import workers
from coordinator.database.tables.tasks import tasks
from shared.clock import SystemClock
from shared.errors import Configuration
from tests.support.local_coordinator import LocalCoordinator
from tests.support.local_volunteer import FastClock, local_machine
from volunteer.account.instance_lock import instance_lock
from volunteer.account.profile_directory import Profile
from volunteer.cli.main import run_command
from volunteer.control import events
from volunteer.engine import Engine, World
from volunteer.net.client import Client
from volunteer.net.tls import Address
from volunteer.service.uninstall import Belonging, belongings, other_profiles, release_tasks, remove
from volunteer.settings.host_profile import machine_mark
from volunteer.settings.settings import Directories, directories


def home(path: Path, profile: str = "") -> Directories:
    """The directories of a volunteer that has been at work, with something in each."""
    places = directories({"VOLUNTEER_HOME": str(path)}, profile)
    (places.config / "config.toml").write_text("threads = 1\n")
    (places.cache / "weights").write_bytes(b"w" * 5000)
    (places.profile / "current").write_text("abc")
    (places.profile / "abc").mkdir()
    (places.profile / "abc" / "identity.json").write_text("secret")
    (places.profile / "abc" / "identity.json").chmod(0o600)
    for name, size in (("tasks", 340), ("outbox", 7)):
        (places.profile / "abc" / name).mkdir()
        (places.profile / "abc" / name / "some.safetensors").write_bytes(b"x" * size)
    own = places.profile / "abc" / "members" / "run" / "build"
    own.mkdir(parents=True)
    (own / "chunk").write_bytes(b"o" * 55)
    return places


# -------------------------------------------------------------------------------- what is there


def test_the_account_and_the_settings_stay_unless_all_is_to_go(tmp_path: Path) -> None:
    places = home(tmp_path / "volunteer")
    unit = tmp_path / "volunteer.service"
    unit.write_text("[Unit]\n")
    found = belongings(places, (unit,), whole=False)
    sizes = {item.what: sum(i.size for i in found if i.what == item.what) for item in found}
    listed = {item.what: (sizes[item.what], item.goes) for item in found}
    mark = len(machine_mark())
    assert listed == {
        "service": (7, True),
        "downloads": (5000, True),
        "half-done training": (340, True),
        "copies of your own data": (55, True),
        "account, results not yet submitted": (16 + mark, False),
        "settings": (12, False),
    }
    assert all(item.goes for item in belongings(places, (unit,), whole=True))


def test_what_is_not_there_is_not_listed(tmp_path: Path) -> None:
    places = directories({"VOLUNTEER_HOME": str(tmp_path)})
    listed = [item.what for item in belongings(places, (), whole=True)]
    assert listed == [
        "downloads",
        "account, results not yet submitted",
    ]


def test_removing_keeps_the_account_and_all_leaves_nothing(tmp_path: Path) -> None:
    places = home(tmp_path / "volunteer")
    assert remove(belongings(places, (), whole=False)) == []
    assert not places.cache.exists()
    assert (places.profile / "abc" / "identity.json").read_text() == "secret"
    assert not list(places.profile.rglob("tasks/*"))
    assert not list(places.profile.rglob("members*"))
    assert list(places.profile.rglob("outbox/*"))
    assert (places.config / "config.toml").exists()
    assert remove(belongings(places, (), whole=True)) == []
    assert list(tmp_path.iterdir()) == []


def test_another_profile_and_the_settings_it_shares_are_left_alone(tmp_path: Path) -> None:
    places, night = home(tmp_path / "volunteer"), home(tmp_path / "volunteer", "night")
    assert other_profiles(places) == (night.profile.name,)
    assert remove(belongings(places, (), whole=True)) == []
    assert not places.profile.exists()
    assert (night.profile / "abc" / "identity.json").exists()
    assert (night.config / "config.toml").exists()


def test_what_cannot_be_removed_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    inside = Belonging(what="service", path=tmp_path / "file" / "unit", size=1, goes=True)
    assert remove((inside,)) == [f"{inside.path} cannot be removed: not a directory"]


# --------------------------------------------------------------------------------- handing back


async def states(house: LocalCoordinator) -> tuple[list[str], list[str]]:
    """States of all tasks and of all machines."""
    db = house.coordinator.db
    return (
        await db.read(lambda conn: [r.state for r in conn.execute(tasks.select())]),
        await db.read(lambda conn: [r.state for r in conn.execute(workers.select())]),
    )


async def test_a_task_of_an_earlier_process_goes_back_and_the_machine_leaves(
    tmp_path: Path,
) -> None:
    async with local_machine(tmp_path) as machine:
        async with machine.working() as process:
            await process.until(events.Claimed)
        assert "doing" in (await states(machine.home))[0]
        profile = Profile(machine.directories.profile)
        said = await release_tasks(profile, machine.connect(), FastClock())
        assert said == "1 task given back"
        left, machines = await states(machine.home)
        assert "doing" not in left
        assert machines == ["left"]
        again = await release_tasks(profile, machine.connect(), FastClock())
        assert again == "no task was left to give back"


async def test_a_coordinator_that_is_away_does_not_keep_anybody(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine:
        profile = Profile(machine.directories.profile)
    said = await release_tasks(profile, machine.connect(), FastClock())
    assert said.startswith("the coordinator was not notified (")
    assert said.endswith("the leases expire by themselves")


async def test_the_running_volunteer_is_ended(tmp_path: Path) -> None:
    places = directories({"VOLUNTEER_HOME": str(tmp_path)})
    profile = Profile(places.profile)
    running = asyncio.ensure_future(Engine(places, world=World(clock=SystemClock())).run())
    async with asyncio.timeout(120):
        while not profile.endpoint.exists():
            await asyncio.sleep(0.01)
        said = await release_tasks(profile, connect_nobody, SystemClock())
        assert said == "the running volunteer has ended and given its task back"
        assert await running == 0


async def test_nothing_is_given_back_under_a_volunteer_that_does_not_answer(
    tmp_path: Path,
) -> None:
    profile = Profile(home(tmp_path).profile)  # its volunteer has no socket: it starts, or hangs
    with instance_lock(profile.path), pytest.raises(Configuration, match="does not end"):
        await release_tasks(profile, connect_nobody, FastClock())


async def test_a_damaged_account_is_no_reason_to_stay(tmp_path: Path) -> None:
    places = home(tmp_path)
    said = await release_tasks(Profile(places.profile), connect_nobody, SystemClock())
    assert said.startswith("no task was given back: ")
    assert "is damaged" in said


async def test_without_an_account_there_is_nothing_to_give_back(tmp_path: Path) -> None:
    places = directories({"VOLUNTEER_HOME": str(tmp_path)})
    said = await release_tasks(Profile(places.profile), connect_nobody, SystemClock())
    assert said == "there was no task to give back"


def connect_nobody(address: Address, token: str) -> Client:
    raise AssertionError("nobody is to be asked")


# ----------------------------------------------------------------------------------- the command


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose home is a test's, with a `systemctl` that does nothing."""
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("VOLUNTEER_HOME", str(tmp_path / "volunteer"))
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def test_the_command_lists_asks_and_removes(
    at_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = home(at_home / "volunteer")
    (places.profile / "current").unlink()
    unit = at_home / ".config" / "systemd" / "user" / "volunteer.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Unit]\n")

    assert run_command(["uninstall"]) == 1  # nobody is there to agree
    said = capsys.readouterr()
    assert "add --yes" in said.err
    assert "nothing was changed" in said.out
    assert unit.exists()
    assert places.cache.exists()

    assert run_command(["uninstall", "--yes"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert f"goes       5 kB  {places.cache}  (downloads)" in lines
    assert any(line.startswith("stays") and "account" in line for line in lines)
    assert "there was no task to give back" in lines
    assert lines[-1].endswith(" uninstall volunteer`")
    assert not unit.exists()
    assert "--user disable --now volunteer" in (at_home / "calls").read_text()
    assert (places.config / "config.toml").exists()

    assert run_command(["uninstall", "--all", "--yes"]) == 0
    assert not (at_home / "volunteer").exists()


def test_where_there_are_no_services_the_rest_goes_all_the_same(
    at_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volunteer.service.service_units.describe", _no_services)
    places = home(at_home / "volunteer")
    (places.profile / "current").unlink()
    assert run_command(["uninstall", "--yes"]) == 0
    assert not places.cache.exists()


def _no_services(target: object) -> object:
    from shared.errors import Configuration

    raise Configuration("services are not supported on plan9")
