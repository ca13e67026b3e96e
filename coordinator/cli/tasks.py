"""task: what failed too often, and giving it another chance."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from coordinator.cli.listing import as_json, table
from coordinator.cli.runs import Json
from coordinator.cli.target import HERE, Where, call

app = App(name="task", help="Tasks: list the failed ones, queue them again.")

OfRun = Annotated[str, Parameter(help="Only tasks of this run.")]


@app.command(name="list")
def listing(
    *,
    failed: Annotated[bool, Parameter(help="Only discarded tasks.", negative="")],
    run: OfRun = "",
    where: Where = HERE,
    json: Json = False,
) -> None:
    """Tasks that were discarded after several volunteers failed, and why."""
    found = call(where, "task.list", run=run) if failed else ()
    if json:
        as_json(found)
        return
    columns = {
        "task": lambda t: t.id,
        "run": lambda t: t.run,
        "pass": lambda t: t.pass_no,
        "samples": lambda t: f"{t.start}-{t.stop}",
        "failures": lambda t: t.failures,
        "timeouts": lambda t: t.timeouts,
        "by": lambda t: t.workers,
        "last": lambda t: t.message[:80],
    }
    table(found, columns, "No task has failed for good.")


@app.command
def requeue(
    *ids: Annotated[int, Parameter(help="Numbers of tasks.")],
    every: Annotated[bool, Parameter(name="--all", help="Every failed task.", negative="")] = False,
    run: OfRun = "",
    where: Where = HERE,
    json: Json = False,
) -> None:
    """Queue failed tasks again and reset their failures."""
    done = call(where, "task.requeue", ids=ids, run=run, every=every)
    if json:
        as_json(done)
    else:
        print(f"{len(done.ids)} tasks queued again.")


def add_to(parent: App) -> None:
    parent.command(app)
