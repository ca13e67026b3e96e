"""Volunteers that may not go on: each process ends with 78 and a sentence that says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.errors import VolunteerError
from tests.support.local_volunteer import LocalMachine, local_machine
from volunteer.control import commands, events


async def ended_with(machine: LocalMachine) -> str:
    """Return the last words of the machine's process, which must exit with 78."""
    async with machine.working() as process:
        assert await process.ended() == 78
        return process.all(events.Stopped)[-1].message


async def test_a_wrong_secret_ends_the_process(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine:
        (identity,) = machine.path.rglob("identity.json")
        stored = json.loads(identity.read_text())
        identity.write_text(json.dumps(stored | {"secret": "x" * 43}))
        assert "wrong secret: ask your organiser for a link of your own" in await ended_with(
            machine
        )


async def test_a_reissued_account_comes_back_by_its_new_link_alone(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine:
        people = machine.home.coordinator.volunteers
        before = (await people.show("Ann")).person.volunteer_id
        code = await people.reissue("Ann")
        assert "join again with a code from your organiser" in await ended_with(machine)
        link = f"{machine.link}+code={code.code}"
        await machine.engine().control.do(commands.Join(link=link, name=""))
        async with machine.working(max_tasks=1) as process:
            assert await process.ended() == 0
        assert (await people.show("Ann")).person.volunteer_id == before
        assert (await people.show("Ann")).person.work.accepted == 1


async def test_a_link_code_adds_one_machine_and_no_second(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine:
        async with machine.working() as process:
            await process.until(events.Claimed)
            link = await process.control.do(commands.MakeLink())
        assert "+code=" in link.link
        second, third = (
            LocalMachine(tmp_path / name, machine.home) for name in ("second", "third")
        )
        joined = await second.engine().control.do(commands.Join(link=link.link, name=""))
        assert joined.nickname == "Ann"
        with pytest.raises(VolunteerError, match="used already"):
            await third.engine().control.do(commands.Join(link=link.link, name=""))
        shown = await machine.home.coordinator.volunteers.show("Ann")
        assert len(shown.machines) == 2
