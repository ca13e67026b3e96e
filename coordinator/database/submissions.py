"""Submissions of a lease, part by part. What is accepted is split off its task, so that whatever
becomes of the rest, no sample is handed in twice.

    task [start, stop) ──part accepted──> a done task [start, start + n), of this contribution   +   the task [start + n, stop)
"""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, exists, func, insert, select, update

from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.statements import its
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.tasks import tasks
from coordinator.database.tasks import FREE, TaskRow, finish, holder
from coordinator.rules.sizing import first_part
from shared.errors import Conflict
from shared.protocol.contributions import SubmitRequest
from shared.protocol.limits import RENEW_S

GOOD = ("accepted", "merged", "superseded")
WAITING = ("received", "checking")


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The next part to be submitted: fixed by the task, never by the client."""

    steps: int
    samples: int
    price_micro: int
    last: bool


_C = contributions.c
_MINE = its(_C.task_id) & its(_C.attempt)
_PARTS = select(func.count()).where(_MINE, _C.state.in_(GOOD)).scalar_subquery()
_LATE = select(func.count()).where(_MINE, _C.part == _PARTS, _C.state == "rejected")
_CHECKED = exists().where(_MINE, _C.state.in_(WAITING))
_STANDS = select(_PARTS, _LATE.scalar_subquery(), _CHECKED)


def wanted(conn: Connection, task: TaskRow) -> tuple[int, int]:
    """The number of the part that the current attempt hands in next, and how often that part was
    refused as too late.
    """
    number, tries, _ = _stands(conn, task)
    return number, tries


def _stands(conn: Connection, task: TaskRow) -> tuple[int, int, bool]:
    """Return number and tries of the next part, and True if one is being checked now."""
    mine = {"its_task_id": task.id, "its_attempt": task.attempt}
    number, tries, checked = conn.execute(_STANDS, mine).one()
    return int(number), int(tries), bool(checked)


def expect(conn: Connection, task: TaskRow, request: SubmitRequest) -> Part:
    """Return what this submission has to be.

    Raises Conflict for a part, or a recomputation, whose turn it is not.
    """
    number, tries, checked = _stands(conn, task)
    if checked:
        raise Conflict(f"something else of task {task.id} is still being checked")
    if (request.part, request.tries) != (number, tries):
        raise Conflict(
            f"part {request.part}, try {request.tries} of task {task.id} is not wanted: "
            f"its next is part {number}, try {tries}"
        )
    steps, price = first_part(task.steps, task.price_micro, task.part_steps)
    last = steps == task.steps
    samples = task.stop - task.start
    return Part(
        steps=steps,
        samples=samples if last else min(samples, steps * task.batch_size),
        price_micro=price,
        last=last,
    )


def held(conn: Connection, row: ContributionRow) -> TaskRow | None:
    """Return the task of a contribution, locked; None unless it is still that of the attempt which
    handed it in.
    """
    task = holder(conn, row.task_id)
    ours = task.attempt == row.attempt and task.state in ("doing", "todo", "cancelled")
    return task if ours else None


def through(conn: Connection, row: ContributionRow, task: TaskRow, now: float) -> None:
    """A part is good: the task, which is locked, is done with its last, and goes on after any
    other.
    """
    if row.steps >= task.steps or task.state not in ("doing", "todo"):
        finish(conn, row.task_id, now)
        return
    until = task.start + row.samples
    done = msgspec.structs.asdict(task) | {
        "stop": until,
        "steps": row.steps,
        "price_micro": row.price_micro,
        "state": "done",
        "returned": False,
        "ended_at": now,
        "contribution_id": row.id,
        **FREE,
    }
    del done["id"]
    conn.execute(insert(tasks).values(**done))
    rest = {
        "start": until,
        "steps": task.steps - row.steps,
        "price_micro": task.price_micro - row.price_micro,
        "begun_at": now,  # the next part is measured from here
    }
    conn.execute(update(tasks).where(tasks.c.id == task.id).values(**rest))


def once_more(conn: Connection, row: ContributionRow, now: float) -> None:
    """The lease goes on after a part that came too late, and may take all the time it may ever
    have.
    """
    again = {"renew_by": now + RENEW_S, "finish_by": tasks.c.finish_limit}
    live = (tasks.c.id == row.task_id) & (tasks.c.state == "doing")
    conn.execute(update(tasks).where(live, tasks.c.attempt == row.attempt).values(**again))


def goes_on(conn: Connection, row: ContributionRow) -> bool:
    """Return True if a refused part is wanted again from the same lease."""
    task = holder(conn, row.task_id, for_update=False)
    held = (task.state, task.attempt, task.worker_id) == ("doing", row.attempt, row.worker_id)
    return held and wanted(conn, task) == (row.part, row.tries + 1)


def task_of(conn: Connection, row: ContributionRow) -> int:
    """The task that a good contribution has done: the part that was split off with it, or its
    lease's own.
    """
    query = select(tasks.c.id).where(tasks.c.contribution_id == row.id)
    found = conn.execute(query).scalar()
    return row.task_id if found is None else int(found)
