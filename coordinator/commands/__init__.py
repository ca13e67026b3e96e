"""The organiser's commands: one registry for the command line and for a running server."""

from __future__ import annotations

from coordinator.commands import checks, datasets, people, runs, tasks
from coordinator.commands.registry import Command

COMMANDS: dict[str, Command] = {
    command.name: command
    for part in (runs, datasets, tasks, people, checks)
    for command in part.COMMANDS
}
