"""Tasks: every change of their state, in one transaction of the caller.

    todo ──claim──> doing ──accepted──> accepted ──merged──> done
    doing ──rejected, given back, overtaken, time ran out──> todo
    accepted ──its update is not merged after all──> todo
    doing ──failed or timed out too often──> discarded ──requeue──> todo
    todo, doing ──the run ended──> cancelled ──the run is extended──> todo
    todo ──its machine keeps its data no more──> cancelled

The attempt grows with every claim. A task whose time ran out is `returned`: its last holder may
still submit until another worker claims it. A task that waits for its verdict has no `renew_by`, so
it does not expire. A task whose update is accepted names its contribution, and is done when the
contribution is merged. Tasks without an update (games, matches, audits) are done when they are
accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.sql.dml import ReturningUpdate

from coordinator.database.contributions import UPDATES
from coordinator.database.engine.statements import among, equals, one_of
from coordinator.database.tables.accounts import volunteers, workers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.runs import members, runs
from coordinator.database.tables.tasks import failures, tasks
from coordinator.database.tables.versions import versions
from coordinator.database.volunteers import takes_part
from coordinator.rules.audits import AUDIT
from coordinator.rules.run_file import TaskSettings
from coordinator.rules.task_size import episodes_bytes_max, upload_bytes_max
from shared.decoding import decode
from shared.errors import Cancelled, Gone, Unavailable, UnknownTask, VolunteerError
from shared.protocol.base import TaskState
from shared.protocol.limits import AUDIT_BYTES
from shared.workloads.base import TaskKind, UpdateKind

StoredKind = TaskKind | Literal["audit"]
FailureKind = Literal["failure", "timeout"]

# A task is also discarded after this many times `max_failures` failures of one volunteer, if nobody
# else works for the run.
ALONE_FACTOR = 2
TIMED_OUT_MIN = 2  # volunteers that must time out on a task before it is discarded
# A volunteer works for a run if it claimed a task of it within this time, and holds that task or
# did it as one of this many newest done tasks.
LATELY_S, LATELY = 3600.0, 256
MESSAGE_CHARS = 500
BESIDE = ("learn", "evaluate", AUDIT)  # kinds of tasks that are not cut from a pass
GAMES = ("selfplay", "evaluate")  # kinds whose contributions are files of episodes
FREE: dict[str, object] = {
    "claim_id": None,
    "renew_by": None,
    "finish_by": None,
    "finish_limit": None,
}


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `tasks`; see tables/tasks.py."""

    id: int
    run_id: int
    kind: StoredKind
    pass_no: int
    start: int
    stop: int
    seed: int
    steps: int
    batch_size: int
    price_micro: int
    state: TaskState
    attempt: int
    claim_id: str | None
    worker_id: str | None
    volunteer_id: str | None
    device: str
    claimed_at: float | None
    begun_at: float | None
    base_version: int | None
    renew_by: float | None
    finish_by: float | None
    finish_limit: float | None
    returned: bool
    failures: int
    timeouts: int
    ended_at: float | None
    options: str
    update_kind: UpdateKind | Literal[""] = ""
    part_steps: int = 0
    contribution_id: int | None = None
    flops: float = 0.0
    home: str = ""


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """Start of work: the base version is bound."""

    task: TaskRow
    run: str
    version: int
    finish_by: float
    part: int = 0  # number of the part that is submitted next
    tries: int = 0  # tries of that part that were refused as too late


class TaskLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list of tasks."""

    id: int
    run: str
    state: str
    pass_no: int
    start: int
    stop: int
    failures: int
    timeouts: int
    workers: int  # distinct workers that failed the task
    message: str  # sentence of the last failure or timeout


def row_of(mapping: Any) -> TaskRow:
    """Return a row of `tasks` as a struct."""
    return TaskRow(**{**mapping, "returned": bool(mapping["returned"])})


def rows_of(result: sa.CursorResult[Any]) -> list[TaskRow]:
    """Return the rows of a result, with all columns of `tasks`, as structs."""
    names = tuple(result.keys())
    return [row_of(dict(zip(names, row, strict=True))) for row in result]


_BY_ID = sa.select(tasks).where(equals(tasks.c.id))
_BY_ID_LOCKED = _BY_ID.with_for_update()


def holder(conn: sa.Connection, task_id: int, *, for_update: bool = True) -> TaskRow:
    """Return a task with its holder, locked until the transaction ends unless `for_update` is
    False. Raises UnknownTask.
    """
    query = _BY_ID_LOCKED if for_update else _BY_ID
    row = conn.execute(query, {"where_id": task_id}).mappings().first()
    if row is None:
        raise UnknownTask(f"there is no task {task_id} of yours")
    return row_of(row)


_BY_IDS = sa.select(tasks).where(among(tasks.c.id, "ids")).order_by(tasks.c.id).with_for_update()


def holders(conn: sa.Connection, task_ids: Sequence[int]) -> dict[int, TaskRow]:
    """Lock and return the existing tasks with their holders, by number."""
    return {row.id: row for row in rows_of(conn.execute(_BY_IDS, {"ids": sorted({*task_ids})}))}


def in_order(*conditions: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    """Return a condition for an UPDATE of tasks, which locks the tasks that fulfil `conditions` in
    the order of their numbers, as `holders` does: two transactions cannot wait for each other.
    """
    ids = sa.select(tasks.c.id).where(*conditions).order_by(tasks.c.id).correlate(None)
    return tasks.c.id.in_(ids.with_for_update(of=tasks, key_share=True))


def may_submit(row: TaskRow, worker_id: str, attempt: int) -> None:
    """Check that an attempt may submit. Raises UnknownTask, Cancelled, Gone for a lost lease."""
    if row.worker_id != worker_id:
        if 0 < attempt < row.attempt:
            raise Gone(f"task {row.id} was given to somebody else")
        raise UnknownTask(f"there is no task {row.id} of yours")
    if row.state == "cancelled":
        why = (
            "the organiser did it, or its run has ended"
            if row.kind == AUDIT
            else "its run has ended"
        )
        raise Cancelled(f"task {row.id} was cancelled: {why}")
    if attempt > row.attempt or attempt < 1:
        raise UnknownTask(f"task {row.id} was never given out with attempt {attempt}")
    if attempt < row.attempt or not (
        row.state == "doing" or (row.state == "todo" and row.returned)
    ):
        raise Gone(f"task {row.id} is no longer yours")


_PARAMETERS = sa.select(runs.c.parameters).where(equals(runs.c.id))


def grant_bytes(conn: sa.Connection, row: TaskRow, of_runs: dict[int, int]) -> int:
    """Return the maximum size of one update for this task; `of_runs` caches the size of each
    run.
    """
    if row.kind == AUDIT:
        return AUDIT_BYTES
    if row.kind in GAMES:
        return episodes_bytes_max(row.stop - row.start)
    if row.run_id not in of_runs:
        parameters = conn.execute(_PARAMETERS, {"where_id": row.run_id}).scalar_one()
        of_runs[row.run_id] = upload_bytes_max(int(parameters))
    return of_runs[row.run_id]


_V = versions.c
_HEAD = sa.select(runs.c.head).where(runs.c.id == tasks.c.run_id).correlate(tasks).scalar_subquery()
# The column is written as text: in RETURNING, SQLAlchemy would leave out the table's name.
_ITS_RUN: sa.ColumnElement[int] = sa.literal_column("tasks.run_id")
_RUN = sa.select(runs.c.name).where(runs.c.id == _ITS_RUN).scalar_subquery()
_BEGUN = sa.select(tasks, _RUN.label("run")).where(among(tasks.c.id, "ids"))
_GRANTED = tasks.c.finish_limit - tasks.c.claimed_at  # twice the time that the claim granted
_NOW: sa.ColumnElement[float] = sa.bindparam("now", type_=sa.Double())
_TIME: dict[str, object] = {"finish_by": _NOW + _GRANTED / 2, "finish_limit": _NOW + _GRANTED}


def _bound(base: sa.ColumnElement[Any], **values: object) -> ReturningUpdate[Any]:
    """Return the statement that binds tasks to a version, if there is such a version."""
    is_there = sa.exists().where(_V.run_id == tasks.c.run_id, _V.version == base).correlate(tasks)
    bound = sa.update(tasks).where(among(tasks.c.id, "ids"), is_there)
    return bound.values(base_version=base, **values).returning(*tasks.c, _RUN.label("run"))


_REBASE = _bound(_HEAD)
_BEGIN = _bound(_HEAD, begun_at=_NOW, **_TIME)
_BEGIN_AT = _bound(sa.bindparam("base", type_=sa.Integer()), begun_at=_NOW, **_TIME)


def add_beside(conn: sa.Connection, values: dict[str, object]) -> int:
    """Add a task outside the pass, which waits for any capable worker; return its number."""
    fixed = {
        "pass_no": 0,
        "state": "todo",
        "attempt": 0,
        "device": "",
        "returned": False,
        "failures": 0,
        "timeouts": 0,
    }
    made = sa.insert(tasks).values(**fixed, **values).returning(tasks.c.id)
    return int(conn.execute(made).scalar_one())


def begin_all(
    conn: sa.Connection, rows: Sequence[TaskRow], now: float
) -> list[Begun | VolunteerError]:
    """Bind the newest versions as the bases of locked tasks that have not begun; return each start
    of work, or the reason why work cannot start.
    """
    ready = [row.id for row in rows if row.kind != AUDIT and _is_ready(row)]
    bound = conn.execute(_BEGIN, {"now": now, "ids": ready}).mappings().all() if ready else []
    starts: dict[int, Begun | VolunteerError] = {
        columns["id"]: _begun(columns, now) for columns in bound
    }
    for row in rows:
        if row.kind == AUDIT and _is_ready(row):  # an audit begins from the base of its task
            base = int(decode(row.options)["base_version"])
            starts[row.id] = _bind(conn, _BEGIN_AT, row, now, base)
    return [starts.get(row.id) or _unbound(row) for row in rows]


def resume(
    conn: sa.Connection, row: TaskRow, now: float, *, newest: bool
) -> Begun | VolunteerError:
    """Return the start of work of a locked task that has begun before, or the reason why it cannot
    go on; with `newest` it is bound to the newest version.
    """
    return _bind(conn, _REBASE if newest and row.kind != AUDIT else _BEGUN, row, now)


def _is_ready(row: TaskRow) -> bool:
    return row.state == "doing" and row.finish_limit is not None and row.claimed_at is not None


def _unbound(row: TaskRow, version: object = "yet") -> VolunteerError:
    """Return why a task has no base: its time is over, or its run has no such version."""
    if row.begun_at is None and not _is_ready(row):
        return Gone(f"the time of task {row.id} ran out before it began")
    return Unavailable(f"the run of task {row.id} has no version {version}", retry_after_s=10)


def _bind(
    conn: sa.Connection, query: sa.Executable, row: TaskRow, now: float, base: int | None = None
) -> Begun | VolunteerError:
    values = {"ids": [row.id], "now": now, "base": base}
    columns = conn.execute(query, values).mappings().first()
    if columns is None or columns["base_version"] is None:
        return _unbound(row, "yet" if base is None else base)
    return _begun(columns, now)


def _begun(columns: sa.RowMapping, now: float) -> Begun:
    row = row_of({name: columns[name] for name in TaskRow.__struct_fields__})
    assert row.base_version is not None
    return Begun(
        task=row,
        run=columns["run"],
        version=row.base_version,
        finish_by=row.finish_by if row.finish_by is not None else now,
    )


_W = contributions.c
_AWAITED = sa.exists().where(
    _W.run_id == tasks.c.run_id,
    _W.worker_id == tasks.c.worker_id,
    one_of(_W.kind, UPDATES),
    one_of(_W.state, ("received", "checking", "accepted")),
    _W.unproven.is_(False),  # a contribution that waits for its recompute may wait for hours
)
_AWAITS = sa.select(tasks.c.id, tasks.c.run_id).where(
    among(tasks.c.id, "ids"), tasks.c.begun_at.is_(None), _AWAITED
)


def await_merge(conn: sa.Connection, task_ids: Sequence[int]) -> dict[int, int]:
    """Return, by task, the runs of tasks that have not begun because their worker's contribution
    waits for a merge.
    """
    return {row.id: row.run_id for row in conn.execute(_AWAITS, {"ids": task_ids})}


_FINISH = sa.update(tasks).where(
    among(tasks.c.id, "ids"),
    (tasks.c.state == "doing") | sa.and_(tasks.c.state == "todo", tasks.c.returned),
)
_HELD_ONE = (tasks.c.state == "doing") | sa.and_(tasks.c.state == "todo", tasks.c.returned)
_ACCEPT = sa.update(tasks).where(equals(tasks.c.id), _HELD_ONE)
ACCEPTED: dict[str, object] = {"state": "accepted", "returned": False, **FREE}
_DONE: dict[str, object] = {"state": "done", "returned": False, **FREE}


def finish_all(conn: sa.Connection, task_ids: Sequence[int], now: float) -> int:
    """Move tasks whose accepted contributions need no merge from doing (or returned) to done.
    Return how many had not ended before.
    """
    return conn.execute(_FINISH, {"ids": task_ids, "ended_at": now} | _DONE).rowcount


def accept_all(conn: sa.Connection, updates: Mapping[int, int], now: float) -> None:
    """Move tasks from doing (or returned) to accepted, where they wait for a merge; `updates` has
    the contribution of each task.
    """
    lines = [
        {"where_id": task_id, "contribution_id": contribution_id, "ended_at": now} | ACCEPTED
        for task_id, contribution_id in sorted(updates.items())
    ]
    if lines:
        conn.execute(_ACCEPT, lines)


_OF_UPDATES = sa.and_(among(tasks.c.contribution_id, "ids"), tasks.c.state == "accepted")
_MERGED = sa.update(tasks).where(_OF_UPDATES).values(state="done")
_RETURN = sa.update(tasks).where(_OF_UPDATES)
UNCLAIMED: dict[str, object] = {
    "state": "todo",
    "returned": False,
    "begun_at": None,
    "base_version": None,
    "ended_at": None,
    "contribution_id": None,
    **FREE,
}


def finish_merged(conn: sa.Connection, contribution_ids: Sequence[int]) -> None:
    """Move the tasks of merged contributions from accepted to done."""
    conn.execute(_MERGED, {"ids": contribution_ids})


def return_all(conn: sa.Connection, contribution_ids: Sequence[int]) -> None:
    """Put the tasks of contributions that will not be merged back into the queue."""
    if contribution_ids:
        conn.execute(_RETURN, {"ids": contribution_ids} | UNCLAIMED)


def put_back(  # noqa: PLR0913 - each is a word of the verdict
    conn: sa.Connection,
    task_id: int,
    *,
    worker_id: str,
    kind: FailureKind | None,
    message: str,
    now: float,
    settings: TaskSettings,
) -> TaskState:
    """Set a task back to todo, or to discarded after failures by several volunteers; with `kind`
    None no failure counts. Return the new state.

    If another worker holds the task by now, only the failure is recorded. Raises UnknownTask.
    """
    row = holder(conn, task_id)
    values: dict[str, object] = {}
    if kind is not None:
        note = {"task_id": task_id, "attempt": row.attempt, "worker_id": worker_id, "kind": kind}
        conn.execute(sa.insert(failures).values(**note, message=message[:MESSAGE_CHARS], at=now))
        counted = "failures" if kind == "failure" else "timeouts"
        values[counted] = getattr(row, counted) + 1
    state: TaskState = row.state
    if row.worker_id == worker_id and row.state in ("doing", "todo"):
        counted_now = msgspec.structs.replace(row, **values)
        over = kind is not None and is_hopeless(conn, counted_now, settings, now)
        state = "discarded" if over else "todo"
        values |= UNCLAIMED | {"state": state, "ended_at": now if over else None}
    if values:
        conn.execute(sa.update(tasks).where(tasks.c.id == task_id).values(**values))
    return state


def is_hopeless(conn: sa.Connection, row: TaskRow, settings: TaskSettings, now: float) -> bool:
    """Return True if enough different volunteers have failed a task, or timed out on it.

    One volunteer is one voice, whatever its number of machines, and only vetted volunteers count if
    any of them works for the run. A vetted volunteer decides alone only if nobody else works for
    the run, or if the task is over data of its own.
    """
    most = settings.max_failures
    if row.home:
        return row.failures >= most or row.timeouts >= settings.max_timeouts
    alone = row.failures >= ALONE_FACTOR * most
    if row.failures >= most and _condemned(conn, row, "failure", most, now, alone=alone):
        return True
    timed_out = row.timeouts >= settings.max_timeouts
    return timed_out and _condemned(conn, row, "timeout", TIMED_OUT_MIN, now, alone=True)


def _condemned(
    conn: sa.Connection, row: TaskRow, kind: FailureKind, least: int, now: float, *, alone: bool
) -> bool:
    """Return True if `least` volunteers failed a task, or with `alone` all volunteers that work for
    the run. Only vetted volunteers count if any works for the run or failed the task.
    """
    voices = _voices(conn, row.id, kind)
    against = {who for who, is_vetted in voices.items() if is_vetted}
    working = {who for who, is_vetted in _at_work(conn, row.run_id, now).items() if is_vetted}
    if not (against or working):
        return len(voices) >= least
    return len(against) >= least or (alone and bool(against) and working <= against)


def _voices(conn: sa.Connection, task_id: int, kind: FailureKind) -> dict[str, bool]:
    """Return the volunteers that failed a task, and which are vetted."""
    v = volunteers.c
    query = sa.select(v.id, v.standing).join_from(
        failures, workers, workers.c.id == failures.c.worker_id
    )
    query = query.join(volunteers, v.id == workers.c.volunteer_id)
    query = query.where(failures.c.task_id == task_id, failures.c.kind == kind)
    rows = conn.execute(query.distinct())
    return {volunteer: standing == "vetted" for volunteer, standing in rows}


def _at_work(conn: sa.Connection, run_id: int, now: float) -> dict[str, bool]:
    """Return the volunteers that recently held or did tasks of a run, and which are vetted."""
    of_run = sa.select(tasks.c.volunteer_id, tasks.c.claimed_at).where(tasks.c.run_id == run_id)
    doing = of_run.where(tasks.c.state == "doing")
    done = of_run.where(tasks.c.state == "done").order_by(tasks.c.id.desc()).limit(LATELY)
    claims = [*conn.execute(doing), *conn.execute(done)]
    ids = {volunteer for volunteer, at in claims if volunteer and at and at > now - LATELY_S}
    query = sa.select(volunteers.c.id, volunteers.c.standing)
    rows = conn.execute(query.where(volunteers.c.id.in_(ids), takes_part()))
    return {volunteer: standing == "vetted" for volunteer, standing in rows}


def expire(conn: sa.Connection, now: float, limit: int) -> list[TaskRow]:
    """Requeue the tasks whose time ran out and count a timeout each; holders may submit late."""
    late = sa.and_(tasks.c.state == "doing", (tasks.c.renew_by < now) | (tasks.c.finish_by < now))
    picked = sa.select(tasks.c.id).where(late).order_by(tasks.c.id).limit(limit)
    ids = conn.execute(picked.with_for_update(skip_locked=True)).scalars().all()
    if not ids:
        return []
    values = {"state": "todo", "returned": True, "timeouts": tasks.c.timeouts + 1, **FREE}
    changed = sa.update(tasks).where(tasks.c.id.in_(ids)).values(**values).returning(*tasks.c)
    rows = rows_of(conn.execute(changed))
    notes = [
        {"task_id": r.id, "attempt": r.attempt, "worker_id": r.worker_id, "kind": "timeout"}
        for r in rows
    ]
    message = "no heartbeat or result came in time"
    conn.execute(sa.insert(failures), [{**note, "message": message, "at": now} for note in notes])
    return rows


def discard(conn: sa.Connection, ids: Sequence[int], now: float) -> None:
    """Discard waiting tasks: they are listed as failed until they are requeued."""
    if ids:
        values = {"state": "discarded", "returned": False, "ended_at": now, **FREE}
        conn.execute(sa.update(tasks).where(tasks.c.id.in_(ids)).values(**values))


def cancel_run(conn: sa.Connection, run_id: int, now: float) -> int:
    """Cancel all unfinished tasks of an ended run; return their number."""
    open_tasks = sa.and_(tasks.c.run_id == run_id, tasks.c.state.in_(("todo", "doing")))
    values = {"state": "cancelled", "returned": False, "ended_at": now, **FREE}
    return conn.execute(sa.update(tasks).where(in_order(open_tasks)).values(**values)).rowcount


def cancel_absent(conn: sa.Connection, now: float) -> None:
    """Cancel the waiting tasks over data that their machines no longer keep; a task in work may
    still be submitted.
    """
    of_members = tasks.c.run_id.in_(sa.select(members.c.run_id)) & ~of_present_data()
    waiting = sa.and_(of_members, tasks.c.state == "todo", ~awaits_verdict())
    values = {"state": "cancelled", "returned": False, "ended_at": now, **FREE}
    conn.execute(sa.update(tasks).where(in_order(waiting)).values(**values))


def reopen_run(conn: sa.Connection, run_id: int) -> int:
    """Reopen the tasks that a run's end cancelled, with higher attempts; return their number."""
    ended = sa.and_(tasks.c.run_id == run_id, tasks.c.state == "cancelled", of_present_data())
    values = {"state": "todo", "attempt": tasks.c.attempt + 1, "ended_at": None}
    return conn.execute(sa.update(tasks).where(in_order(ended)).values(**values)).rowcount


def of_present_data() -> sa.ColumnElement[bool]:
    """Return the condition that a task is over the run's dataset, or over data that its machine
    still keeps: a change of the data begins a later pass.
    """
    m = members.c
    of_home = sa.and_(m.run_id == tasks.c.run_id, m.worker_id == tasks.c.home)
    present = sa.and_(m.declared_at.is_not(None), m.first_pass <= tasks.c.pass_no)
    return (tasks.c.home == "") | sa.exists().where(of_home, present).correlate(tasks)


def recall(conn: sa.Connection, run_id: int, *, above: int) -> int:
    """Cancel the leases on versions above `above`, which a rollback reverts, with no failure
    counted; return their number.

    A task that awaits its verdict is kept, since the verdict decides.
    """
    return _take_back(conn, run_id, tasks.c.base_version > above)


def overtake(conn: sa.Connection, run_id: int, *, head: int) -> int:
    """Cancel the leases on versions below `head`, which a merge has overtaken, like `recall`."""
    return _take_back(conn, run_id, tasks.c.base_version < head)


def _take_back(conn: sa.Connection, run_id: int, based: sa.ColumnElement[bool]) -> int:
    """Put tasks of these bases back to todo; the attempt grows, so that their holders get 410."""
    doing = sa.and_(tasks.c.state == "doing", tasks.c.renew_by.is_not(None))
    late = sa.and_(tasks.c.state == "todo", tasks.c.returned)
    recalled = sa.and_(tasks.c.run_id == run_id, based, tasks.c.kind != AUDIT, ~awaits_verdict())
    values = {"state": "todo", "returned": False, "attempt": tasks.c.attempt + 1}
    values |= {"begun_at": None, "base_version": None, **FREE}
    return conn.execute(
        sa.update(tasks).where(in_order(recalled & (doing | late))).values(**values)
    ).rowcount


def awaits_verdict() -> sa.ColumnElement[bool]:
    """Return the condition that the current attempt has submitted and awaits its verdict."""
    c = contributions.c
    waiting = sa.select(c.id).where(
        c.task_id == tasks.c.id, c.attempt == tasks.c.attempt, c.state.in_(("received", "checking"))
    )
    return waiting.exists()


def bases_in_use(conn: sa.Connection, run_id: int) -> list[int]:
    """Return the base versions of a run's leases: their files must stay."""
    open_ = tasks.c.state.in_(("doing", "todo"))
    may_submit_ = (tasks.c.state == "doing") | tasks.c.returned
    query = sa.select(tasks.c.base_version).distinct()
    query = query.where(
        tasks.c.run_id == run_id, open_, may_submit_, tasks.c.base_version.is_not(None)
    )
    return sorted(int(base) for base in conn.execute(query).scalars())


def lines(
    conn: sa.Connection, states: Sequence[str], run_id: int | None = None, limit: int = 1000
) -> list[TaskLine]:
    """Return the tasks in these states, oldest first, of one run or of all."""
    f, t = failures.c, tasks.c
    counted = sa.and_(f.task_id == t.id, f.kind != "forgiven")
    last = sa.select(f.message).where(counted).order_by(f.id.desc()).limit(1).scalar_subquery()
    who = sa.select(sa.func.count(f.worker_id.distinct())).where(counted, f.kind == "failure")
    query = sa.select(
        t.id, runs.c.name.label("run"), t.state, t.pass_no, t.start, t.stop, t.failures, t.timeouts
    )
    query = query.add_columns(who.scalar_subquery().label("workers"))
    query = query.add_columns(sa.func.coalesce(last, "").label("message"))
    query = query.join_from(tasks, runs).where(t.state.in_(states))
    if run_id is not None:
        query = query.where(t.run_id == run_id)
    rows = conn.execute(query.order_by(t.id).limit(limit)).mappings()
    return [TaskLine(**row) for row in rows]


def requeue(conn: sa.Connection, ids: Sequence[int] | None, run_id: int | None = None) -> list[int]:
    """Requeue discarded tasks without counting a failure: the tasks `ids`, or all of a run; return
    the ids.
    """
    conditions = [tasks.c.state == "discarded", runs.c.state.in_(("running", "paused"))]
    if ids is not None:
        conditions.append(tasks.c.id.in_(ids))
    if run_id is not None:
        conditions.append(tasks.c.run_id == run_id)
    query = sa.select(tasks.c.id).join_from(tasks, runs).where(*conditions)
    requeued = list(conn.execute(query).scalars())
    clean = {"state": "todo", "failures": 0, "timeouts": 0, "ended_at": None}
    conn.execute(sa.update(tasks).where(tasks.c.id.in_(requeued)).values(**clean))
    of_tasks = failures.c.task_id.in_(requeued)
    conn.execute(sa.update(failures).where(of_tasks).values(kind="forgiven"))
    return requeued
