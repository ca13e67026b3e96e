"""Settlement of contributions that a merge left out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from coordinator.database import contributions, submissions, tasks, verdicts
from coordinator.database import volunteers as accounts
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


def lock_accounts(
    conn: Connection, run: RunRow, head: int, rows: Sequence[ContributionRow] = ()
) -> frozenset[str]:
    """Lock the accounts of `rows`, and of the updates that no merge into version `head` or a later
    version can use; return them. The run is locked.
    """
    owners = frozenset(row.volunteer_id for row in (*rows, *_left_behind(conn, run, head)))
    accounts.lock(conn, owners)
    return owners


def overtake(
    conn: Connection,
    run: RunRow,
    head: int,
    merged: Sequence[ContributionRow],
    owners: Collection[str],
    now: float,
) -> None:
    """Pay the contributions that a new version merged. Supersede and pay the updates of locked
    accounts that no later merge can use; their ranges are done again.

    If the plan cancels leases, workers on an older version are told to stop.
    """
    plan = definition(run).plan
    if plan.in_flight == "cancel":
        tasks.overtake(conn, run.id, head=head)
    late = _supersede(conn, run, head, owners, f"version {head} was merged without it", now)
    escrow.pay(conn, [*merged, *late], now)


def leave_behind(
    conn: Connection, run: RunRow, head: int, owners: Collection[str], why: str, now: float
) -> None:
    """Supersede and pay the updates of locked accounts that no merge into version `head` or a later
    version can use.
    """
    escrow.pay(conn, _supersede(conn, run, head, owners, why, now), now)


def _supersede(
    conn: Connection, run: RunRow, head: int, owners: Collection[str], why: str, now: float
) -> list[ContributionRow]:
    late = [row for row in _left_behind(conn, run, head) if row.volunteer_id in owners]
    for row in late:
        verdicts.decide(conn, row, "superseded", now=now, message=f"{why}; {PAID}")
    return late


def _left_behind(conn: Connection, run: RunRow, head: int) -> list[ContributionRow]:
    plan = definition(run).plan
    return contributions.left_behind(conn, run.id, head - plan.max_staleness, plan.update)


def close(conn: Connection, run_id: int, now: float) -> int:
    """Cancel the open tasks of an ended, locked run; supersede and pay its accepted, unmerged
    contributions, and return their number.
    """
    owners = contributions.left_over_owners(conn, run_id)
    accounts.lock(conn, owners)
    late: list[ContributionRow] = []
    while rows := contributions.left_over(conn, run_id, owners):  # one batch at a time
        for row in rows:
            verdicts.decide(
                conn,
                row,
                "superseded",
                now=now,
                message=f"the run ended before the next merge; {PAID}",
            )
        late += rows
    tasks.cancel_run(conn, run_id, now)  # the tasks that were returned just now, too
    escrow.pay(conn, late, now)
    return len(late)
