"""The commands `coordinator task`: open and failed tasks, and requeueing of the failed ones."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from coordinator.cli.runs import Reason
from coordinator.cli.target import HERE, TargetOptions, listed, tell
from shared.text import counted

app = App(name="task", help="Tasks: list open and failed ones, requeue failed ones.")

OfRun = Annotated[str, Parameter(help="Only tasks of this run.")]


@app.command(name="list")
def listing(
    *,
    failed: Annotated[bool, Parameter(help="Only discarded tasks.", negative="")] = False,
    run: OfRun = "",
    where: TargetOptions = HERE,
) -> None:
    """List the tasks that wait, are held, or were discarded after several volunteers failed."""
    from coordinator.admin import tasks as commands

    listed(
        where,
        commands.listing,
        commands.ListTasks(run=run, failed=failed),
        {
            "task": lambda t: t.id,
            "run": lambda t: t.run,
            "state": lambda t: t.state,
            "pass": lambda t: t.pass_no,
            "samples": lambda t: f"{t.start}-{t.stop}",
            "failures": lambda t: t.failures,
            "timeouts": lambda t: t.timeouts,
            "by": lambda t: t.workers,
            "last": lambda t: t.message[:80],
        },
        "No task has failed for good." if failed else "No task is open.",
    )


@app.command
def requeue(
    *ids: Annotated[int, Parameter(help="Numbers of tasks.")],
    whole: Annotated[bool, Parameter(name="--all", help="Every failed task.", negative="")] = False,
    run: OfRun = "",
    reason: Reason = "",
    where: TargetOptions = HERE,
) -> None:
    """Queue failed tasks again and reset their failures."""
    from coordinator.admin import tasks as commands

    request = commands.Requeue(ids=ids, run=run, every=whole, reason=reason)
    tell(
        where,
        commands.requeue,
        request,
        lambda tasks: f"{counted(len(tasks.ids), 'task')} queued again.",
    )


def add_to(parent: App) -> None:
    parent.command(app)
