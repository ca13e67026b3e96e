"""History of one task: holders, failures, submissions and verdicts."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, select

from coordinator.database.tables.accounts import volunteers, workers
from coordinator.database.tables.contributions import contributions, verdicts
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import failures, tasks
from shared.errors import NotFound

HISTORY_MAX = 200  # newest of each kind
TEXT_MAX = 300


class TaskEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event in a task's history."""

    at: float
    what: str  # created, claimed, begun, failure, timeout, forgiven, received, or a verdict
    attempt: int | None = None
    volunteer: str = ""
    worker: str = ""
    text: str = ""


class TaskShown(msgspec.Struct, frozen=True, kw_only=True):
    """A task and its history, oldest first."""

    id: int
    run: str
    kind: str
    state: str
    pass_no: int
    start: int
    stop: int
    steps: int
    attempt: int
    failures: int
    timeouts: int
    volunteer: str
    worker: str
    device: str
    base_version: int | None
    renew_by: float | None
    finish_by: float | None
    events: tuple[TaskEvent, ...]


_T, _W, _V, _R = tasks.c, workers.c, volunteers.c, runs.c


def show(conn: Connection, task_id: int) -> TaskShown:
    """Return one task. Raises NotFound."""
    query = (
        select(tasks, _R.name.label("run"), _V.nickname, _W.hostname)
        .join(runs, _R.id == _T.run_id)
        .join(workers, _W.id == _T.worker_id, isouter=True)
        .join(volunteers, _V.id == _W.volunteer_id, isouter=True)
        .where(_T.id == task_id)
    )
    row = conn.execute(query).mappings().first()
    if row is None:
        raise NotFound(f"there is no task {task_id}")
    events = [TaskEvent(at=row["created_at"], what="created")]
    events += [
        TaskEvent(
            at=row[f"{name}_at"],
            what=name,
            attempt=row["attempt"],
            volunteer=row["nickname"] or "",
            worker=(row["hostname"] or "")[:64],
        )
        for name in ("claimed", "begun")
        if row[f"{name}_at"] is not None
    ]
    events += _failures(conn, task_id)
    events += _contributions(conn, task_id)
    events.sort(key=lambda event: event.at)
    plain = ("id", "run", "kind", "state", "pass_no", "start", "stop", "steps", "attempt")
    more = ("failures", "timeouts", "device", "base_version", "renew_by", "finish_by")
    return TaskShown(
        **{name: row[name] for name in (*plain, *more)},
        volunteer=row["nickname"] or "",
        worker=(row["hostname"] or "")[:64],
        events=tuple(events),
    )


def _failures(conn: Connection, task_id: int) -> list[TaskEvent]:
    f = failures.c
    query = (
        select(f.at, f.kind, f.attempt, f.message, _V.nickname, _W.hostname)
        .join(workers, _W.id == f.worker_id, isouter=True)
        .join(volunteers, _V.id == _W.volunteer_id, isouter=True)
        .where(f.task_id == task_id)
        .order_by(f.id.desc())
        .limit(HISTORY_MAX)
    )
    return [
        TaskEvent(
            at=row.at,
            what=row.kind,
            attempt=row.attempt,
            volunteer=row.nickname or "",
            worker=(row.hostname or "")[:64],
            text=row.message[:TEXT_MAX],
        )
        for row in conn.execute(query)
    ]


def _contributions(conn: Connection, task_id: int) -> list[TaskEvent]:
    """Contributions of a task, and each verdict on them."""
    c, d = contributions.c, verdicts.c
    query = (
        select(c.id, c.attempt, c.part, c.kind, c.received_at, _V.nickname)
        .join(volunteers, _V.id == c.volunteer_id, isouter=True)
        .where(c.task_id == task_id)
        .order_by(c.id.desc())
        .limit(HISTORY_MAX)
    )
    handed_in = {row.id: row for row in conn.execute(query)}
    found = [
        TaskEvent(
            at=row.received_at,
            what="received",
            attempt=row.attempt,
            volunteer=row.nickname or "",
            text=f"contribution {row.id}: {row.kind}, part {row.part}",
        )
        for row in handed_in.values()
    ]
    decided = select(verdicts).where(d.contribution_id.in_(list(handed_in)))
    for row in conn.execute(decided.order_by(d.id.desc()).limit(HISTORY_MAX)):
        part = handed_in[row.contribution_id]
        into = f"into version {row.version}" if row.version is not None else ""
        said = ": ".join(text for text in (row.reason, row.message[:TEXT_MAX]) if text)
        found.append(
            TaskEvent(
                at=row.at,
                what=row.state,
                attempt=part.attempt,
                volunteer=part.nickname or "",
                text=" ".join(text for text in (into, said) if text),
            )
        )
    return found
