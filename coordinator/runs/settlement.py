"""Settlement of contributions that a merge left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from coordinator.database import contributions, submissions, tasks, verdicts
from coordinator.database.contributions import ContributionRow
from coordinator.database.ledger import escrow, payments
from coordinator.database.runs import RunRow
from coordinator.rules.validation import PAID
from coordinator.runs.definition import definition
from shared.protocol.base import Reason

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.tasks import FailureKind


def set_aside(
    conn: Connection,
    run: RunRow,
    row: ContributionRow,
    why: str,
    now: float,
    kind: FailureKind | None,
) -> None:
    """Set aside a contribution that makes merges fail: requeue its task and void its pending
    credit. With `kind` None no failure counts.
    """
    message = f"set aside: the merge failed with it ({why})"[:500]
    # the task is looked up first, since the verdict returns it to the queue
    task_id = submissions.task_of(conn, row)
    verdicts.decide(
        conn, row, "rejected", now=now, reason=Reason.MERGE_FAILED.value, message=message
    )
    payments.post_step(conn, "void", [payments.Payment.of(row)], now)
    row = msgspec.structs.replace(row, task_id=task_id)
    put_back(conn, row, run, kind, message, now)


def put_back(
    conn: Connection,
    row: ContributionRow,
    run: RunRow,
    kind: FailureKind | None,
    message: str,
    now: float,
) -> None:
    """Return a refused contribution's task to the queue; with `kind` None no failure counts."""
    tasks.put_back(
        conn,
        row.task_id,
        worker_id=row.worker_id,
        kind=kind,
        message=message,
        now=now,
        settings=definition(run).file.task,
    )


def overtake(conn: Connection, run: RunRow, head: int, now: float) -> None:
    """Settle the contributions that a new version overtakes: updates that no later merge can use
    are superseded and paid, and their ranges are done again.

    If the plan cancels leases, workers on an older version are told to stop.
    """
    plan = definition(run).plan
    if plan.in_flight == "cancel":
        tasks.overtake(conn, run.id, head=head)
    leave_behind(conn, run, head, f"version {head} was merged without it", now)


def leave_behind(conn: Connection, run: RunRow, head: int, why: str, now: float) -> None:
    """Supersede and pay the updates that no merge into version `head` or a later version can
    use.
    """
    plan = definition(run).plan
    late = contributions.left_behind(conn, run.id, head - plan.max_staleness, plan.update)
    for row in late:
        verdicts.decide(conn, row, "superseded", now=now, message=f"{why}; {PAID}")
    escrow.pay(conn, late, now)


def settle_accepted(conn: Connection, run_id: int, now: float) -> int:
    """Supersede and pay an ended run's accepted, unmerged contributions; return their number."""
    count = 0
    while rows := contributions.left_over(conn, run_id):  # one batch at a time
        for row in rows:
            verdicts.decide(
                conn,
                row,
                "superseded",
                now=now,
                message=f"the run ended before the next merge; {PAID}",
            )
        escrow.pay(conn, rows, now)
        count += len(rows)
    return count
