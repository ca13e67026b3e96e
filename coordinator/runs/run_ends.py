"""Conditions of `[stop]` and `[privacy]` under which a run must end."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from coordinator.database import evaluations, passes, versions
from coordinator.rules.run_file import stop_at
from coordinator.runs.definition import definition

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.runs import RunRow


def budget_spent(conn: Connection, run: RunRow) -> bool:
    """Return True if the next merge would exceed the budget of `[privacy]`."""
    settings = definition(run).file.privacy
    return settings.on and versions.count_merges(conn, run.id) >= settings.merges


def why_end(conn: Connection, run: RunRow, at: float) -> str:
    """Return the reason why a run must end; "" if it continues."""
    file = definition(run).file
    stop = file.stop
    now = datetime.fromtimestamp(at, UTC)
    if stop.versions and run.head >= stop.versions:
        return f"version {run.head} of {stop.versions} is merged"
    if budget_spent(conn, run):
        return (
            f"the next version would exceed the privacy budget of epsilon {file.privacy.epsilon:g}"
        )
    if stop.passes and passes.is_over(conn, run, stop.passes):
        return f"{stop.passes} passes are done"
    if stop.tokens and run.tokens >= stop.tokens:
        return f"{run.tokens} of {stop.tokens} tokens are trained"
    if stop.date and now >= stop_at(stop):
        return f"it is {stop.date}"
    if stop.loss:
        loss = evaluations.newest_loss(conn, run.id)
        if loss is not None and loss <= stop.loss:
            return f"the loss {loss:.4f} is at or below {stop.loss:g}"
    return ""
