"""Gauges of the whole installation, read by one statement: the queue, the machines, the runs.

Every part goes along an index, or over a table that grows with people and not with history: what
is done is never counted here.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import (
    CTE,
    Connection,
    Select,
    bindparam,
    case,
    func,
    literal,
    select,
    union_all,
)

from coordinator.database import key_values
from coordinator.database.engine.statements import one_of
from coordinator.database.tables.accounts import volunteers, workers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.record import meta
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import tasks
from coordinator.database.tables.trust import recomputes
from coordinator.database.tables.versions import evaluations, versions
from coordinator.database.volunteers import OFFLINE_S

RUNS_MAX = 100  # that are named; all others count as one, "other"

_R, _T, _C, _W = runs.c, tasks.c, contributions.c, workers.c


class Gauge(msgspec.Struct, frozen=True):
    """One number of the metrics: its name, run ("" = none), label (such as a state), and value."""

    name: str
    run: str
    label: str
    value: float


_ANSWERED = case((recomputes.c.answer_id.is_(None), "open"), else_="answered")


def _row(name: str, run: Any, label: Any, value: Any) -> tuple[Any, ...]:
    return (
        literal(name).label("name"),
        run.label("run"),
        label.label("label"),
        (value * 1.0).label("value"),
    )


def _opened() -> CTE:
    """Return open tasks by run and state, with their machines: one walk over thousands of rows."""
    return (
        select(_T.run_id, _T.state, func.count().label("n"))
        .add_columns(func.count(_T.worker_id.distinct()).label("machines"))
        .where(one_of(_T.state, ("todo", "doing")))
        .group_by(_T.run_id, _T.state)
        .cte("opened")
    )


def _statement() -> Any:
    # The runs that are on first, then the newest: what an organiser makes does not end.
    on = case((_R.state.in_(("running", "paused")), 0), else_=1)
    told = (_R.id, _R.name, _R.state, _R.head, _R.global_step, _R.tokens)
    named = select(*told).order_by(on, _R.id.desc()).limit(RUNS_MAX).cte("named")
    empty = literal("")
    failed = _T.state == "discarded"
    o = _opened().c
    counted = [
        select(literal("tasks"), _T.run_id, _T.state, func.count()).where(failed),
        select(literal("contributions_waiting"), _C.run_id, _C.state, func.count()).where(
            (_C.state == "checking") | (_C.state == "accepted") & (_C.kind != "games")
        ),
    ]
    grouped = [each.group_by(*list(each.selected_columns)[1:3]) for each in counted]
    by_id = union_all(
        select(literal("tasks"), o.run_id, o.state, o.n),
        select(literal("run_workers"), o.run_id, empty, o.machines).where(o.state == "doing"),
        *grouped,
    ).subquery()
    what, run_id, label, count = by_id.c
    name = func.coalesce(named.c.name, "other")
    queue = (
        select(what, name, label, func.sum(count) * 1.0)
        .select_from(by_id.outerjoin(named, named.c.id == run_id))
        .group_by(what, name, label)
    )
    late = _W.last_seen_at < bindparam("now") - OFFLINE_S
    known = _W.state.in_(("training", "paused", "left"))
    state = case((_W.state == "left", "left"), (late, "offline"), (known, _W.state), else_="online")
    machines = (
        select(*_row("workers", empty, state, func.count()))
        .where(_W.revoked_at.is_(None))
        .group_by(state)
    )
    v = volunteers.c
    accounts = (
        select(*_row("accounts", empty, v.standing, func.count()))
        .where(v.state == "active")
        .group_by(v.standing)
    )
    redone = (
        select(*_row("recomputes_waiting", empty, recomputes.c.state, func.count()))
        .where(recomputes.c.state.in_(("asked", "revealed")))
        .group_by(recomputes.c.state)
    )
    audited = (
        select(*_row("audits_waiting", empty, _ANSWERED, func.count()))
        .where(recomputes.c.state == "revealed", recomputes.c.audit_id.is_not(None))
        .group_by(_ANSWERED)
    )
    unmeasured = select(*_row("evaluations_waiting", empty, empty, func.count())).where(
        evaluations.c.state.in_(("waiting", "running"))
    )
    saved = select(*_row("backup", empty, meta.c.value, literal(0.0))).where(
        meta.c.key == key_values.BACKUP
    )
    return union_all(
        machines, accounts, redone, audited, unmeasured, saved, queue, *_of_runs(named)
    )


def _of_runs(named: Any) -> list[Select[Any]]:
    """Return the gauges of each named run: its state, head, totals, loss and age."""
    r, e, v = named.c, evaluations.c, versions.c
    measured = (e.run_id == r.id) & e.loss.is_not(None)
    loss = select(e.loss).where(measured).order_by(e.version.desc()).limit(1).scalar_subquery()
    made_at = select(v.created_at).where(v.run_id == r.id, v.version == r.head).scalar_subquery()
    figures = {
        "run_version": r.head,
        "run_steps": r.global_step,
        "run_tokens": r.tokens,
        "run_loss": loss,
        "run_version_at": made_at,
        "run_state": literal(1),
    }
    return [
        select(*_row(figure, r.name, r.state if figure == "run_state" else literal(""), value))
        for figure, value in figures.items()
    ]


_STATEMENT = _statement()


def gauges(conn: Connection, now: float) -> list[Gauge]:
    """Return every gauge; runs beyond `RUNS_MAX` are summed as "other"."""
    found = conn.execute(_STATEMENT, {"now": now})
    return [
        Gauge(name, run, label, float(value))
        for name, run, label, value in found
        if value is not None
    ]
