"""Submissions of a lease, part by part. An accepted part is split off its task, so that no sample
is submitted twice, whatever happens to the rest.

    task [start, stop) ──part accepted──> done task [start, start + n) of this contribution
                                        + the task [start + n, stop)
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Connection, Select, bindparam, exists, func, insert, select, update

from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.statements import its, one_of
from coordinator.database.evaluations import NEWEST_LOSS
from coordinator.database.runs import RunRow
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.contributions import contributions, uploads
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import tasks
from coordinator.database.tables.versions import versions
from coordinator.database.tasks import FREE, TaskRow, finish, holder
from coordinator.rules.sizing import first_part
from coordinator.rules.standing import State
from shared.errors import Conflict, NotFound
from shared.protocol.contributions import SubmitRequest
from shared.protocol.limits import RENEW_S

GOOD = ("accepted", "merged", "superseded")
WAITING = ("received", "checking")


class NextPart(msgspec.Struct, frozen=True, kw_only=True):
    """Next part to be submitted: fixed by the task, never by the client."""

    steps: int
    samples: int
    price_micro: int
    last: bool


_C, _U, _V = contributions.c, uploads.c, volunteers.c
_MINE = its(_C.task_id) & its(_C.attempt)
_PARTS = select(func.count()).where(_MINE, one_of(_C.state, GOOD)).scalar_subquery()
_LATE = (
    select(func.count()).where(_MINE, _C.part == _PARTS, _C.state == "rejected").scalar_subquery()
)
_STANDS = select(_PARTS, _LATE)


def wanted(conn: Connection, task: TaskRow) -> tuple[int, int]:
    """Return the part that this attempt submits next, and the number of its tries that came too
    late.
    """
    mine = {"its_task_id": task.id, "its_attempt": task.attempt}
    number, tries = conn.execute(_STANDS, mine).one()
    return int(number), int(tries)


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """Submission and its task: the stored facts of both."""

    run: RunRow
    known: int | None  # number of the contribution, if it was submitted before
    part: int  # number of the next wanted part
    tries: int  # number of its tries that were refused as too late
    checked: bool  # another part is being checked now
    uploaded: bool  # all bytes have been uploaded
    standing: State  # standing of the account
    network: str


_SAID = _C.attempt == bindparam("said_attempt")
_KNOWN = select(_C.id).where(its(_C.task_id), _SAID, its(_C.part), its(_C.tries))
_UPLOADED = exists().where(
    _U.task_id == bindparam("its_task_id"),
    _U.attempt == bindparam("said_attempt"),
    its(_U.worker_id),
    its(_U.sha256),
    its(_U.size),
    _U.complete,
    _U.evidence_of.is_(None),
)
_ARRIVAL = (
    select(runs)
    .add_columns(
        _KNOWN.scalar_subquery().label("known"),
        _PARTS.label("part"),
        _LATE.label("tries"),
        exists().where(_MINE, one_of(_C.state, WAITING)).label("checked"),
        _UPLOADED.label("uploaded"),
        _V.standing,
        _V.network,
    )
    .join_from(runs, volunteers, _V.id == bindparam("volunteer"))
    .where(its(runs.c.id))
)


def arrival(
    conn: Connection, task: TaskRow, volunteer_id: str, worker_id: str, request: SubmitRequest
) -> Arrival:
    """Read the stored facts that judge a submission for a locked task. Raises NotFound."""
    given = {
        "its_id": task.run_id,
        "its_task_id": task.id,
        "its_attempt": task.attempt,
        "said_attempt": request.attempt,
        "its_part": request.part,
        "its_tries": request.tries,
        "its_worker_id": worker_id,
        "its_sha256": request.sha256,
        "its_size": request.size,
        "volunteer": volunteer_id,
    }
    row = _with_run(conn, _ARRIVAL, given, f'there is no volunteer "{volunteer_id}"')
    flags = {name: bool(row[name]) for name in ("checked", "uploaded")}
    return Arrival(**row | flags)


def _with_run(
    conn: Connection, query: Select[Any], given: dict[str, Any], missing: str
) -> dict[str, Any]:
    """Return the only row of a query joined with a run; its "run" is the run's struct."""
    found = conn.execute(query, given).mappings().first()
    if found is None:
        raise NotFound(missing)
    row = dict(found)
    run = RunRow(**{name: row.pop(name) for name in RunRow.__struct_fields__})
    return row | {"run": run}


class Background(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence about a contribution's account and run; its cohort is read elsewhere."""

    run: RunRow
    trust: float  # trust in the account
    standing: State
    global_step: int  # optimiser steps of the run at its base version
    phase: int
    loss: float | None  # the newest loss of the run
    replayed: bool  # the same bytes were submitted for another task, or for another part of it
    invited: bool
    lost_to: int  # contributions of the account up to this one are not paid


_BASE = versions.alias("base")
_B = _BASE.c
_ELSEWHERE = (_C.task_id != bindparam("task")) | (
    (_C.attempt == bindparam("attempt")) & (_C.part != bindparam("part"))
)
_BACKGROUND = (
    select(runs)
    .add_columns(
        _V.trust,
        _V.standing,
        _V.invited,
        _V.lost_to,
        _B.global_step.label("base_step"),
        _B.phase.label("base_phase"),
        NEWEST_LOSS.scalar_subquery().label("loss"),
        exists().where(its(_C.sha256), its(_C.run_id), _ELSEWHERE).label("replayed"),
    )
    .join_from(runs, volunteers, _V.id == bindparam("volunteer"))
    .join(_BASE, (_B.run_id == runs.c.id) & (_B.version == bindparam("base")))
    .where(its(runs.c.id))
)


def background(conn: Connection, row: ContributionRow) -> Background:
    """Read the background of a contribution. Raises NotFound."""
    given = {
        "its_id": row.run_id,
        "its_run_id": row.run_id,
        "its_sha256": row.sha256,
        "task": row.task_id,
        "attempt": row.attempt,
        "part": row.part,
        "volunteer": row.volunteer_id,
        "base": row.base_version,
    }
    found = _with_run(conn, _BACKGROUND, given, f"this run has no version {row.base_version}")
    based = {"global_step": found.pop("base_step"), "phase": found.pop("base_phase")}
    return Background(
        **found | based | {name: bool(found[name]) for name in ("replayed", "invited")}
    )


def expect(task: TaskRow, request: SubmitRequest, found: Arrival) -> NextPart:
    """Return the next part, which this submission must match. Raises Conflict otherwise."""
    if found.checked:
        raise Conflict(f"another submission of task {task.id} is still being checked")
    if (request.part, request.tries) != (found.part, found.tries):
        raise Conflict(
            f"part {request.part}, try {request.tries} of task {task.id} is not wanted: "
            f"its next is part {found.part}, try {found.tries}"
        )
    steps, price = first_part(task.steps, task.price_micro, task.part_steps)
    last = steps == task.steps
    samples = task.stop - task.start
    return NextPart(
        steps=steps,
        samples=samples if last else min(samples, steps * task.batch_size),
        price_micro=price,
        last=last,
    )


def held(conn: Connection, row: ContributionRow) -> TaskRow | None:
    """Return the task of a contribution, locked; None unless its attempt is still current."""
    task = holder(conn, row.task_id)
    ours = task.attempt == row.attempt and task.state in ("doing", "todo", "cancelled")
    return task if ours else None


def through(conn: Connection, row: ContributionRow, task: TaskRow, now: float) -> None:
    """Advance a locked task past an accepted part; the last part finishes it."""
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
        "begun_at": now,  # the next part's time is measured from here
    }
    conn.execute(update(tasks).where(tasks.c.id == task.id).values(**rest))


def once_more(conn: Connection, row: ContributionRow, now: float) -> None:
    """Extend the lease after a late part, up to its limit."""
    again = {"renew_by": now + RENEW_S, "finish_by": tasks.c.finish_limit}
    live = (tasks.c.id == row.task_id) & (tasks.c.state == "doing")
    conn.execute(update(tasks).where(live, tasks.c.attempt == row.attempt).values(**again))


def goes_on(conn: Connection, row: ContributionRow) -> bool:
    """Return True if the same lease may submit a refused part again."""
    task = holder(conn, row.task_id, for_update=False)
    held = (task.state, task.attempt, task.worker_id) == ("doing", row.attempt, row.worker_id)
    return held and wanted(conn, task) == (row.part, row.tries + 1)


def task_of(conn: Connection, row: ContributionRow) -> int:
    """Return the task that a contribution completed: the one split off for it, else its lease's."""
    query = select(tasks.c.id).where(tasks.c.contribution_id == row.id)
    found = conn.execute(query).scalar()
    return row.task_id if found is None else int(found)
