"""Submissions of a lease, part by part. An accepted part is split off its task, so that none of its
samples is submitted twice, whatever happens to the remaining part of the task.

    task [start, stop) ──part accepted──> accepted task [start, start + n) of this part
                                        + the task [start + n, stop)

A superseded part will not be merged, so its range goes back to the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.types import TypeEngine

from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.bulk_statements import BulkStatement
from coordinator.database.engine.statements import among, equals, one_of
from coordinator.database.evaluations import NEWEST_LOSS
from coordinator.database.runs import RunRow
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.contributions import contributions, uploads
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import tasks
from coordinator.database.tables.versions import versions
from coordinator.database.tasks import ACCEPTED, UNCLAIMED, TaskRow, accept_all, holder, holders
from coordinator.rules.standing import State
from coordinator.rules.task_size import first_part
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
_OF_ATTEMPT = equals(_C.task_id) & equals(_C.attempt)
_PARTS = sa.select(sa.func.count()).where(_OF_ATTEMPT, one_of(_C.state, GOOD)).scalar_subquery()
_LATE = (
    sa.select(sa.func.count())
    .where(_OF_ATTEMPT, _C.part == _PARTS, _C.state == "rejected")
    .scalar_subquery()
)
_NEXT_PART = sa.select(_PARTS, _LATE)


def next_part(conn: sa.Connection, task: TaskRow) -> tuple[int, int]:
    """Return the part that this attempt submits next, and the number of its tries that came too
    late.
    """
    values = {"where_task_id": task.id, "where_attempt": task.attempt}
    number, tries = conn.execute(_NEXT_PART, values).one()
    return int(number), int(tries)


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """Stored facts about a submission, its attempt and its account."""

    contribution_id: int | None  # None if it was not submitted before
    part: int  # number of the part that the attempt submits next
    tries: int  # tries of that part that were refused as too late
    is_checking: bool  # another part is being checked now
    upload: str | None  # id of the upload with all bytes
    standing: State  # standing of the account
    network: str


def _arrivals(lines: sa.CTE) -> sa.ClauseElement:
    g, other = lines.c, contributions.alias("other").c
    of_attempt = (_C.task_id == g.task_id) & (_C.attempt == g.attempt)
    same = of_attempt & (_C.part == g.part) & (_C.tries == g.tries)
    others_of_attempt = (other.task_id == g.task_id) & (other.attempt == g.attempt)
    good = (
        sa.select(sa.func.count())
        .where(others_of_attempt, one_of(other.state, GOOD))
        .correlate(lines)
    )
    late = of_attempt & (_C.part == good.scalar_subquery()) & (_C.state == "rejected")
    upload = sa.select(sa.func.min(_U.id)).where(
        *(_U[name] == g[name] for name in ("task_id", "attempt", "worker_id", "sha256", "size")),
        _U.complete,
    )
    is_checking = sa.exists().where(of_attempt, one_of(_C.state, WAITING))
    return sa.select(
        g.number,
        sa.select(_C.id).where(same).correlate(lines).scalar_subquery().label("contribution_id"),
        good.scalar_subquery().label("part"),
        sa.select(sa.func.count()).where(late).correlate(lines).scalar_subquery().label("tries"),
        is_checking.correlate(lines).label("is_checking"),
        upload.correlate(lines).scalar_subquery().label("upload"),
        _V.standing,
        _V.network,
    ).join_from(lines, volunteers, _V.id == g.volunteer_id)


_ARRIVED: dict[str, TypeEngine[Any]] = {
    **dict.fromkeys(("number", "task_id", "attempt", "part", "tries", "size"), sa.BigInteger()),
    **dict.fromkeys(("worker_id", "sha256", "volunteer_id"), sa.String()),
}
_ARRIVALS = BulkStatement("arrived", _ARRIVED, _arrivals, (0, 0, 0, 0, 0, 0, "", "", ""))


def arrivals(
    conn: sa.Connection, requests: Sequence[tuple[str, str, int, SubmitRequest]]
) -> dict[int, Arrival]:
    """Return the stored facts needed to judge submissions for locked tasks, by the position in
    `requests`, whose entries are volunteer, worker, task and request.
    """
    lines = [
        (
            place,
            task,
            request.attempt,
            request.part,
            request.tries,
            request.size,
            worker,
            request.sha256,
            volunteer,
        )
        for place, (volunteer, worker, task, request) in enumerate(requests)
    ]
    names = Arrival.__struct_fields__
    return {
        row.number: Arrival(**{name: getattr(row, name) for name in names})
        for row in _ARRIVALS.execute(conn, lines)
    }


class Background(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence about a contribution's account and run; its cohort is read elsewhere."""

    run: RunRow
    loss: float | None  # the newest loss of the run
    state: str  # state of the account
    standing: State
    global_step: int  # optimiser steps of the run at its base version
    replayed: bool  # the same bytes were submitted for another task, or for another part of it
    invited: bool


_BASE = versions.alias("base")
_B, _O = _BASE.c, contributions.alias("other").c
# A copy that was refused, or whose account was suspended, is held against no later honest work.
_ELSEWHERE = _O.state.not_in(("rejected", "superseded")) & (
    (_O.task_id != _C.task_id) | ((_O.attempt == _C.attempt) & (_O.part != _C.part))
)
_RUN = (
    sa.select(runs)
    .add_columns(NEWEST_LOSS.scalar_subquery().label("loss"))
    .where(equals(runs.c.id))
)
_BACKGROUNDS = (
    sa.select(
        _C.id,
        _V.state,
        _V.standing,
        _V.invited,
        _B.global_step,
        sa.exists()
        .where(_O.sha256 == _C.sha256, _O.run_id == _C.run_id, _ELSEWHERE)
        .correlate(contributions)
        .label("replayed"),
    )
    .join_from(contributions, volunteers, _V.id == _C.volunteer_id)
    .join(_BASE, (_B.run_id == _C.run_id) & (_B.version == _C.base_version))
    .where(among(_C.id, "ids"))
)


def backgrounds(conn: sa.Connection, rows: Sequence[ContributionRow]) -> dict[int, Background]:
    """Read the backgrounds of contributions, by their numbers. Raises NotFound for a base version
    that the run does not have.
    """
    of_run: dict[int, dict[str, Any]] = {}
    for number in sorted({row.run_id for row in rows}):
        run = dict(
            conn.execute(_RUN, {"where_id": number, "where_run_id": number}).mappings().one()
        )
        of_run[number] = {"loss": run.pop("loss"), "run": RunRow(**run)}
    fields_by_id: dict[int, dict[str, Any]] = {}
    for record in conn.execute(_BACKGROUNDS, {"ids": [row.id for row in rows]}).mappings():
        flags = {name: bool(record[name]) for name in ("replayed", "invited")}
        fields_by_id[record["id"]] = {name: record[name] for name in record if name != "id"} | flags
    for row in rows:
        if row.id not in fields_by_id:
            raise NotFound(f"this run has no version {row.base_version}")
    return {row.id: Background(**fields_by_id[row.id] | of_run[row.run_id]) for row in rows}


def expect(task: TaskRow, request: SubmitRequest, arrival: Arrival) -> NextPart:
    """Return the next part of a task. Raises Conflict if the submission does not match that
    part.
    """
    if arrival.is_checking:
        raise Conflict(f"another submission of task {task.id} is still being checked")
    if (request.part, request.tries) != (arrival.part, arrival.tries):
        raise Conflict(
            f"part {request.part}, try {request.tries} of task {task.id} is not wanted: "
            f"its next is part {arrival.part}, try {arrival.tries}"
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


def tasks_of(conn: sa.Connection, rows: Sequence[ContributionRow]) -> dict[int, TaskRow]:
    """Lock and return the tasks of contributions, by the contributions' numbers; a task that is
    done, discarded or at another attempt is left out.
    """
    tasks_by_id = holders(conn, [row.task_id for row in rows])
    return {
        row.id: task
        for row in rows
        if (task := tasks_by_id.get(row.task_id)) is not None
        and task.attempt == row.attempt
        and task.state in ("doing", "todo", "cancelled")
    }


class EndedPart(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a task that was accepted, or superseded."""

    row: ContributionRow
    task: TaskRow  # locked
    accepted: bool

    @property
    def is_last(self) -> bool:
        """Return True if no work of the task is left after this part."""
        return self.row.steps >= self.task.steps or self.task.state not in ("doing", "todo")


_SET_TASK = sa.update(tasks).where(equals(tasks.c.id))
_OPEN = one_of(tasks.c.state, ("doing", "todo"))


def advance(conn: sa.Connection, parts: Sequence[EndedPart], now: float) -> None:
    """Move the starts of locked tasks behind their ended parts. Accepted ranges wait for a merge,
    superseded ranges go back to the queue.
    """
    last = {part.task.id: part for part in parts if part.is_last}
    accepted = {task_id: part.row.id for task_id, part in last.items() if part.accepted}
    accept_all(conn, accepted, now)
    for task_id in sorted(last.keys() - accepted.keys()):
        conn.execute(_SET_TASK.where(_OPEN), {"where_id": task_id} | UNCLAIMED)
    for part in parts:
        if part.task.id not in last:
            _split_off(conn, part, now)


def _split_off(conn: sa.Connection, part: EndedPart, now: float) -> None:
    row, task = part.row, part.task
    until = task.start + row.samples
    outcome = ACCEPTED | {"ended_at": now, "contribution_id": row.id}
    piece = msgspec.structs.asdict(task) | {
        "stop": until,
        "steps": row.steps,
        "price_micro": row.price_micro,
        **(outcome if part.accepted else UNCLAIMED),
    }
    del piece["id"]
    conn.execute(sa.insert(tasks).values(**piece))
    rest = {
        "start": until,
        "steps": task.steps - row.steps,
        "price_micro": task.price_micro - row.price_micro,
        "begun_at": now,  # the next part's time is measured from here
    }
    conn.execute(_SET_TASK, {"where_id": task.id} | rest)


def extend_for_retry(conn: sa.Connection, row: ContributionRow, now: float) -> None:
    """Extend the lease of a task whose update came after a merge, so that the update can be
    computed again; the lease's `finish_limit` stays its end.
    """
    again = {"renew_by": now + RENEW_S, "finish_by": tasks.c.finish_limit}
    live = (tasks.c.id == row.task_id) & (tasks.c.state == "doing")
    conn.execute(sa.update(tasks).where(live, tasks.c.attempt == row.attempt).values(**again))


def may_retry(conn: sa.Connection, row: ContributionRow) -> bool:
    """Return True if the same lease may submit a refused part again."""
    task = holder(conn, row.task_id, for_update=False)
    is_held = (task.state, task.attempt, task.worker_id) == ("doing", row.attempt, row.worker_id)
    return is_held and next_part(conn, task) == (row.part, row.tries + 1)


def task_of(conn: sa.Connection, row: ContributionRow) -> int:
    """Return the number of the task over a contribution's range: of the task that names the
    contribution, else of the task that was leased.
    """
    query = sa.select(tasks.c.id).where(tasks.c.contribution_id == row.id)
    task_id = conn.execute(query).scalar()
    return row.task_id if task_id is None else int(task_id)
