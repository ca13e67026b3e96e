"""Commands about tasks: open tasks, and tasks that failed too often."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from coordinator.accounts.suspension import reason_line
from coordinator.admin.command import CommandRequest, organiser_command
from coordinator.database.tasks import TaskLine
from shared.errors import BadRequest, NotFound

if TYPE_CHECKING:
    from coordinator.services import Coordinator


class ListTasks(CommandRequest, frozen=True, kw_only=True):
    """Request for tasks of one run or of all runs: only failed tasks, or the open tasks too."""

    run: str = ""
    failed: bool = False


class Requeue(CommandRequest, frozen=True, kw_only=True):
    """Request to requeue the tasks with these numbers, or all failed tasks (of a run)."""

    ids: tuple[int, ...] = ()
    run: str = ""
    every: bool = False
    reason: str = ""


class RequeuedTasks(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of the tasks that were queued again."""

    ids: tuple[int, ...]


@organiser_command("task.list", needs="database")
async def listing(coordinator: Coordinator, ask: ListTasks) -> tuple[TaskLine, ...]:
    return tuple(await coordinator.task_list.lines(ask.run or None, failed=ask.failed))


@organiser_command("task.requeue", needs="database")
async def requeue(coordinator: Coordinator, ask: Requeue) -> RequeuedTasks:
    if bool(ask.ids) == ask.every:
        raise BadRequest("give the numbers of the tasks, or --all")
    ids = await coordinator.task_list.requeue(
        ask.run or None, ask.ids or None, reason_line(ask.reason)
    )
    if missing := sorted(set(ask.ids) - set(ids)):
        numbers = ", ".join(map(str, missing[:20]))
        again = f"{len(ids)} queued again; " if ids else ""
        raise NotFound(
            f"{again}no task that failed in a running or paused run has the number {numbers}:"
            " `coordinator task list --failed` shows all"
        )
    return RequeuedTasks(ids=tuple(ids))
