"""Passes: how far the samples of a run are cut into tasks, and what became of them."""

from __future__ import annotations

from statistics import median

import msgspec
from sqlalchemy import Connection, case, func, select, update

from coordinator.database.engine.statements import its
from coordinator.database.tables.accounts import workers
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import tasks
from coordinator.database.tasks import BESIDE
from coordinator.rules.sizing import Pace, pass_seed
from shared.errors import NotFound

LATELY = 64  # tasks whose times make the median
PACE_MIN = 3  # fewer say nothing


class PassState(msgspec.Struct, frozen=True, kw_only=True):
    """Position of the current pass."""

    pass_no: int
    todo: int  # tasks that wait
    doing: int
    cut: int  # samples handed out so far
    total: int  # samples of the pass


def open_pass(conn: Connection, run_id: int, now: float) -> int:
    """Begin the next pass at its first sample, in an order of its own.

    Gives its number, 1 for the first.
    """
    row = conn.execute(select(runs.c.pass_no, runs.c.seed).where(runs.c.id == run_id)).first()
    if row is None:
        raise NotFound(f"there is no run {run_id}")
    move(conn, run_id, row.seed, row.pass_no + 1, 0)
    return int(row.pass_no) + 1


_MOVE = update(runs).where(its(runs.c.id))


def move(conn: Connection, run_id: int, seed: int, pass_no: int, cursor: int) -> None:
    """Set the pass and the next uncut position of a run whose row is locked."""
    values = {"pass_no": pass_no, "pass_seed": pass_seed(seed, pass_no), "cursor": cursor}
    conn.execute(_MOVE, {"its_id": run_id} | values)


def pass_state(conn: Connection, run_id: int) -> PassState:
    """Return where the pass of a run stands. Raises NotFound."""
    r, t = runs.c, tasks.c
    query = select(r.pass_no, r.cursor, r.samples_total).where(r.id == run_id)
    row = conn.execute(query).first()
    if row is None:
        raise NotFound(f"there is no run {run_id}")
    counts = select(
        func.count(case((t.state == "todo", 1))), func.count(case((t.state == "doing", 1)))
    )
    todo, doing = conn.execute(
        counts.where(t.run_id == run_id, t.state.in_(("todo", "doing")))
    ).one()
    return PassState(
        pass_no=row.pass_no, todo=todo, doing=doing, cut=row.cursor, total=row.samples_total
    )


def measure(conn: Connection, run_id: int) -> Pace | None:
    """Return how fast the last tasks of a run were done, and by how fast workers; None while too
    few are.

    Their median time is kept with the run, for those who look.
    """
    t = tasks.c
    query = select(t.steps, t.ended_at - t.begun_at, workers.c.step_flops)
    query = query.join_from(tasks, workers).where(
        t.run_id == run_id,
        t.state == "done",
        t.begun_at.is_not(None),
        t.kind.not_in(BESIDE),
    )
    rows = conn.execute(query.order_by(t.id.desc()).limit(LATELY)).all()
    if len(rows) < PACE_MIN:
        return None
    times = {"median_task_s": median(float(took) for _, took, _ in rows)}
    conn.execute(update(runs).where(runs.c.id == run_id).values(**times))
    paces = [max(1e-6, float(took) / steps) for steps, took, _ in rows]
    speeds = [float(flops) for _, _, flops in rows]
    if min(speeds) <= 0:
        return Pace(step_s=median(paces), flops=0.0)
    # Of each step what it took of its own machine: the median of the times of unequal machines is
    # nobody's time.
    work = median(pace * speed for pace, speed in zip(paces, speeds, strict=True))
    return Pace(step_s=work / median(speeds), flops=median(speeds))
