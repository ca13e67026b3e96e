"""The organiser's commands: one registry for the command line and for a running server."""

from __future__ import annotations

from coordinator.admin import checks, datasets, people, runs, tasks
from coordinator.admin.command import Command

COMMANDS: dict[str, Command] = {
    command.name: command
    for part in (runs, datasets, tasks, people, checks)
    for command in part.COMMANDS
}
