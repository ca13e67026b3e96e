"""Passes: the cursor over a run's samples, the end of a pass, and the pace of a run's last tasks.

A sample is done when its update is merged. The next pass begins when every range of the present
pass was submitted: updates of the last ranges may still wait for their merge, or their ranges come
back to the queue.
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from msgspec.structs import replace
from sqlalchemy import Connection, bindparam, func, select, update

from coordinator.database.engine.statements import equals
from coordinator.database.runs import RunRow
from coordinator.database.tables.accounts import volunteers, workers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import tasks
from coordinator.database.tasks import BESIDE
from coordinator.rules.task_size import RunPace, TaskInWork
from shared.errors import NotFound

LATELY = 64  # most tasks whose times give the medians: the newest
PACE_MIN = 3  # least number of tasks for a median

# seconds of training of a task's accepted update, as its worker reports them
_TRAINED = (
    select(func.max(contributions.c.train_s))
    .where(contributions.c.task_id == tasks.c.id, contributions.c.worker_id == tasks.c.worker_id)
    .correlate(tasks)
    .scalar_subquery()
)


def open_pass(conn: Connection, run_id: int) -> int:
    """Open the next pass at its first sample; return its number, from 1. Raises NotFound."""
    pass_no = conn.execute(select(runs.c.pass_no).where(runs.c.id == run_id)).scalar()
    if pass_no is None:
        raise NotFound(f"there is no run {run_id}")
    set_cursor(conn, run_id, pass_no + 1, 0)
    return int(pass_no) + 1


_MOVE = update(runs).where(equals(runs.c.id))


def set_cursor(conn: Connection, run_id: int, pass_no: int, cursor: int) -> None:
    """Set the pass of a run, whose row is locked, and its first sample that no task has yet."""
    conn.execute(_MOVE, {"where_id": run_id, "pass_no": pass_no, "cursor": cursor})


_UNDONE = (
    select(tasks.c.id)
    .where(
        equals(tasks.c.run_id), equals(tasks.c.state), tasks.c.pass_no.between(1, bindparam("last"))
    )
    .limit(1)
)


def is_over(conn: Connection, run: RunRow, last: int) -> bool:
    """Return True if every sample of a run's passes up to `last` is merged or discarded."""
    if run.pass_no < last or (run.pass_no == last and run.cursor < run.samples_total):
        return False
    values = {"where_run_id": run.id, "last": last}
    undone = ("todo", "doing", "accepted", "cancelled")
    return not any(
        conn.execute(_UNDONE, values | {"where_state": state}).first() for state in undone
    )


def measure(conn: Connection, run_id: int) -> RunPace | None:
    """Return the pace of a run's last tasks and of their workers; None if there are too few tasks.

    Each volunteer is one voice, the median of its tasks; only vetted volunteers count if any is
    vetted.
    """
    t, v = tasks.c, volunteers.c
    columns = (v.id, v.standing, t.steps, t.ended_at - t.begun_at, t.flops)
    query = (
        select(*columns, func.coalesce(_TRAINED, 0.0))
        .join_from(tasks, workers)
        .join(volunteers, v.id == workers.c.volunteer_id)
        .where(
            t.run_id == run_id,
            t.state == "done",
            t.begun_at.is_not(None),
            t.kind.not_in(BESIDE),
        )
    )
    rows = conn.execute(query.order_by(t.id.desc()).limit(LATELY)).all()
    if len(rows) < PACE_MIN:
        return None
    vetted = any(standing == "vetted" for _, standing, *_ in rows)
    tasks_of: dict[str, list[_Times]] = {}
    for volunteer_id, standing, steps, seconds, flops, train_s in rows:
        if standing == "vetted" or not vetted:
            times = _Times(int(steps), float(seconds), float(flops), train_s)
            tasks_of.setdefault(volunteer_id, []).append(times)
    voices = [_voice(times) for times in tasks_of.values()]
    pace = RunPace(
        step_s=median(voice.step_s for voice in voices),
        flops=0.0,
        train_step_s=median(voice.train_step_s for voice in voices),
        transfer_s=median(voice.transfer_s for voice in voices),
    )
    if min(voice.flops for voice in voices) <= 0:
        return pace
    # Times of unequal machines have no common median: the median operations a step, divided by the
    # median speed, give the time.
    speed = median(voice.flops for voice in voices)
    work = median(voice.step_work for voice in voices)
    return replace(pace, step_s=work / speed, flops=speed)


_IN_WORK = select(tasks.c.worker_id, tasks.c.device, tasks.c.begun_at, tasks.c.steps)
_IN_WORK = _IN_WORK.add_columns(tasks.c.flops).where(
    equals(tasks.c.run_id),
    tasks.c.state == "doing",
    tasks.c.begun_at.is_not(None),
    tasks.c.kind.not_in(BESIDE),
)
_WAITING = select(func.count()).where(
    equals(tasks.c.run_id), tasks.c.state == "accepted", tasks.c.kind.not_in(BESIDE)
)


def in_work(conn: Connection, run_id: int) -> tuple[list[TaskInWork], int]:
    """Return the begun tasks of a run's passes, and how many tasks wait for a merge."""
    values = {"where_run_id": run_id}
    works = [
        TaskInWork(row.worker_id, row.device, row.begun_at, row.steps, row.flops)
        for row in conn.execute(_IN_WORK, values)
    ]
    return works, int(conn.execute(_WAITING, values).scalar_one())


class _Times(NamedTuple):
    """Times of one finished task."""

    steps: int
    seconds: float
    flops: float
    train_s: float

    @property
    def step_s(self) -> float:
        return max(1e-6, self.seconds / self.steps)


class _Voice(NamedTuple):
    """Medians of one volunteer's tasks."""

    step_s: float
    step_work: float  # operations
    flops: float  # speed of its machines; 0 = unknown
    train_step_s: float
    transfer_s: float


def _voice(times: list[_Times]) -> _Voice:
    return _Voice(
        step_s=median(task.step_s for task in times),
        step_work=median(task.step_s * task.flops for task in times),
        flops=median(task.flops for task in times)
        if min(task.flops for task in times) > 0
        else 0.0,
        train_step_s=median(task.train_s / task.steps for task in times),
        transfer_s=median(max(0.0, task.seconds - task.train_s) for task in times),
    )
