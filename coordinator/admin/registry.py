"""The organiser's commands: one registry for the command line and for a running server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.admin import checkers, datasets, people, record, runs, tasks
from coordinator.admin.command import Ask, Command, Nothing
from coordinator.rules.overview import Overview
from coordinator.upkeep.alerts import Delivered, Standing
from coordinator.upkeep.backup import Saved
from coordinator.upkeep.backup import backup as make_backup
from coordinator.upkeep.checks import CheckReport

if TYPE_CHECKING:
    from coordinator.services import Coordinator


class Backup(Ask, frozen=True, kw_only=True):
    """`to` is a folder of the machine that runs the command."""

    to: str


async def check(coordinator: Coordinator, ask: Nothing) -> CheckReport:
    return await coordinator.checks.run()


async def top(coordinator: Coordinator, ask: Nothing) -> Overview:
    return await coordinator.overviews.get()


async def backup(coordinator: Coordinator, ask: Backup) -> Saved:
    c = coordinator
    return await make_backup(c.db, c.blobs, c.settings, c.clock, Path(ask.to))


async def alerts_test(coordinator: Coordinator, ask: Nothing) -> Delivered:
    return await coordinator.alerts.test()


async def alerts_list(coordinator: Coordinator, ask: Nothing) -> tuple[Standing, ...]:
    return await coordinator.alerts.list()


UPKEEP = (
    Command(name="alerts.test", request=Nothing, reply=Delivered, run=alerts_test),
    Command(
        name="alerts.list",
        request=Nothing,
        reply=tuple[Standing, ...],
        run=alerts_list,
        needs="database",
    ),
    Command(name="top", request=Nothing, reply=Overview, run=top, needs="database"),
    Command(name="check", request=Nothing, reply=CheckReport, run=check),
    Command(name="backup", request=Backup, reply=Saved, run=backup, remote=False),
)

COMMANDS: dict[str, Command] = {
    command.name: command
    for commands in (
        runs.COMMANDS,
        datasets.COMMANDS,
        tasks.COMMANDS,
        people.COMMANDS,
        checkers.COMMANDS,
        record.COMMANDS,
        UPKEEP,
    )
    for command in commands
}
