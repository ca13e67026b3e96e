"""The commands `coordinator record`: the log of actions, and the check that it was never
changed.
"""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from coordinator.admin.command import EmptyRequest
from coordinator.cli.listing import as_json, breach_state, table, when
from coordinator.cli.target import HERE, TargetOptions, call

app = App(
    name="record",
    help="The record of who did what: list its lines, verify that none was changed.",
)


@app.command(name="list")
def listing(
    *,
    limit: Annotated[int, Parameter(help="Number of lines, 1 to 500.")] = 100,
    before: Annotated[
        int | None,
        Parameter(help="Only lines below this number, such as the last one of the list before."),
    ] = None,
    where: TargetOptions = HERE,
) -> None:
    """List the actions of organisers, the coordinator and volunteers, newest first."""
    from coordinator.admin import upkeep_commands as commands

    request = commands.ListRecord(limit=limit, before=before)
    rows = call(where, commands.record_list, request).rows
    if where.json:
        as_json(rows)
        return
    table(
        rows,
        {
            "line": lambda row: row.id,
            "at": lambda row: when(row.at),
            "who": lambda row: row.actor,
            "what": lambda row: row.action,
            "to": lambda row: row.subject,
            "detail": lambda row: row.detail[:100],
        },
        "Nothing was done yet.",
    )


@app.command
def verify(*, where: TargetOptions = HERE) -> int:
    """Compute the Merkle tree of ledger and record again from their rows.

    Exit code 1 where anything was changed, removed or swapped.
    """
    from coordinator.admin import upkeep_commands as commands

    report = call(where, commands.record_verify, EmptyRequest())
    if where.json:
        as_json(report)
        return 1 if report.breaches else 0
    state = breach_state(report.breaches)
    waiting = f", {report.waiting:,} wait to be sealed" if report.waiting else ""
    print(
        f"{state}: {report.lines:,} lines of the record and {report.events:,} entries of the "
        f"ledger, {report.size:,} in the tree with the root {report.root[:16]}{waiting}"
    )
    return 1 if report.breaches else 0


def add_to(parent: App) -> None:
    parent.command(app)
