"""Passes: the cursor of a run's samples, and the pace of its last tasks."""

from __future__ import annotations

from statistics import median

from sqlalchemy import Connection, select, update

from coordinator.database.engine.statements import its
from coordinator.database.tables.accounts import volunteers, workers
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import tasks
from coordinator.database.tasks import BESIDE
from coordinator.rules.sizing import RunPace
from shared.errors import NotFound

LATELY = 64  # newest tasks whose times give the medians
PACE_MIN = 3  # least number of tasks for a median


def open_pass(conn: Connection, run_id: int) -> int:
    """Open the next pass at its first sample; return its number, from 1. Raises NotFound."""
    pass_no = conn.execute(select(runs.c.pass_no).where(runs.c.id == run_id)).scalar()
    if pass_no is None:
        raise NotFound(f"there is no run {run_id}")
    move(conn, run_id, pass_no + 1, 0)
    return int(pass_no) + 1


_MOVE = update(runs).where(its(runs.c.id))


def move(conn: Connection, run_id: int, pass_no: int, cursor: int) -> None:
    """Set the pass of a run, whose row is locked, and its first sample that no task has yet."""
    conn.execute(_MOVE, {"its_id": run_id, "pass_no": pass_no, "cursor": cursor})


def measure(conn: Connection, run_id: int) -> RunPace | None:
    """Return the pace of a run's last tasks and of their workers; None if there are too few.

    Each volunteer is one voice, the median of its tasks; only vetted ones count if there are any.
    """
    t, v = tasks.c, volunteers.c
    query = select(v.id, v.standing, t.steps, t.ended_at - t.begun_at, workers.c.step_flops)
    query = (
        query.join_from(tasks, workers)
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
    by: dict[str, list[tuple[float, float]]] = {}
    for who, standing, steps, took, flops in rows:
        if standing == "vetted" or not vetted:
            by.setdefault(who, []).append((max(1e-6, float(took) / steps), float(flops)))
    voices = [_voice(own) for own in by.values()]
    pace = median(step_s for step_s, _, _ in voices)
    if min(flops for *_, flops in voices) <= 0:
        return RunPace(step_s=pace, flops=0.0)
    # Times of unequal machines have no common median: the median operations a step, divided by the
    # median speed, give the time.
    speed = median(flops for *_, flops in voices)
    return RunPace(step_s=median(work for _, work, _ in voices) / speed, flops=speed)


def _voice(own: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the medians of a volunteer's tasks: seconds a step, operations a step, and the speed
    of its machines; 0 = unknown.
    """
    speeds = [flops for _, flops in own]
    known = median(speeds) if min(speeds) > 0 else 0.0
    return median(s for s, _ in own), median(s * flops for s, flops in own), known
