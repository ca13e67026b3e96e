"""The visibility of a nickname can be changed on the screen while the coordinator is away."""

from __future__ import annotations

from pathlib import Path

from tests.support.local_volunteer import local_machine
from volunteer.control import commands, events
from volunteer.engine import Engine


def shown(told: events.Credits) -> bool:
    return told.me.public


def hidden(told: events.Credits) -> bool:
    return not told.me.public


def waiting(engine: Engine) -> bool | None:
    """Return the choice that the coordinator does not have yet."""
    identity = engine.profile.current()
    assert identity is not None
    return engine.profile.home(identity).memory.show_name


async def test_the_coordinator_is_told_at_once_and_again_when_it_was_away(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine, machine.working() as process:
        await process.until(events.Credits, shown)
        await process.control.do(commands.SetSettings(changes={"public": False}))
        await process.until(events.Credits, hidden)
        process.told.clear()
        process.network.refuse("/workers/visibility")
        await process.control.do(commands.SetSettings(changes={"public": True}))
        assert waiting(process.engine) is True
        process.network.heal()
        await process.until(events.Credits, shown)
        assert waiting(process.engine) is None


async def test_it_is_remembered_over_a_restart(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine:
        async with machine.working() as process:
            await process.until(events.Credits)
            process.network.cut = True
            await process.control.do(commands.SetSettings(changes={"public": False}))
        async with machine.working() as process:
            await process.until(events.Credits, hidden)
