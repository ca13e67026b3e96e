"""Registry of the organiser's commands, for the command line and for a running server."""

from __future__ import annotations

from typing import Any

from coordinator.admin import (
    checker_commands,
    datasets,
    people_commands,
    runs,
    tasks,
    upkeep_commands,
)
from coordinator.admin.command import OrganiserCommand

COMMANDS: dict[str, OrganiserCommand[Any, Any]] = {
    command.name: command
    for module in (runs, datasets, tasks, people_commands, checker_commands, upkeep_commands)
    for command in vars(module).values()
    if isinstance(command, OrganiserCommand)
}
