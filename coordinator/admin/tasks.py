"""Commands about tasks that failed too often."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from coordinator.admin.command import Ask, Command
from coordinator.database.tasks import FailedTask
from shared.errors import BadRequest, NotFound

if TYPE_CHECKING:
    from coordinator.services import Coordinator


class ListTasks(Ask, frozen=True, kw_only=True):
    """Of one run, or of all."""

    run: str = ""


class Requeue(Ask, frozen=True, kw_only=True):
    """The tasks with these numbers, or every failed one (of a run)."""

    ids: tuple[int, ...] = ()
    run: str = ""
    every: bool = False


class Requeued(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks that wait again."""

    ids: tuple[int, ...]


async def failed(coordinator: Coordinator, ask: ListTasks) -> tuple[FailedTask, ...]:
    return tuple(await coordinator.queue.failed(ask.run or None))


async def requeue(coordinator: Coordinator, ask: Requeue) -> Requeued:
    if bool(ask.ids) == ask.every:
        raise BadRequest("give the numbers of the tasks, or --all")
    ids = await coordinator.queue.requeue(ask.run or None, ask.ids or None)
    if missing := sorted(set(ask.ids) - set(ids)):
        numbers = ", ".join(map(str, missing[:20]))
        again = f"{len(ids)} queued again; " if ids else ""
        raise NotFound(
            f"{again}no task that failed in a running or paused run has the number {numbers}:"
            " `coordinator task list --failed` shows all"
        )
    return Requeued(ids=tuple(ids))


COMMANDS = (
    Command(
        name="task.list",
        request=ListTasks,
        reply=tuple[FailedTask, ...],
        run=failed,
        needs="database",
    ),
    Command(name="task.requeue", request=Requeue, reply=Requeued, run=requeue, needs="database"),
)
