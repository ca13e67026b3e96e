"""Live rows of the overview: runs, open tasks, queues, merges.

Only rows of open things, and the newest of growing tables, are read, so that the cost is the same
after 50,000 versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from coordinator.database.contributions import UPDATES
from coordinator.database.engine.statements import equals, one_of
from coordinator.database.monitoring import machine_hours
from coordinator.database.recomputes import IS_OPEN
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.experience import harvests
from coordinator.database.tables.inference import usage
from coordinator.database.tables.merges import merge_parts, merges
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import tasks
from coordinator.database.tables.trust import recomputes
from coordinator.database.tables.versions import evaluations, versions
from coordinator.database.versions import PACE_VERSIONS
from coordinator.rules.machine_time import MachineSeconds
from coordinator.rules.overview import Flow, MergeLine, RunLine, TaskCount
from shared.decoding import decode

RUNS_MAX = 100  # listed runs, the open ones first
MERGES_MAX = 20
COUNTED_MAX = 10_000  # most rows of one queue that are counted

_OPEN = ("running", "paused")


class OpenRun(msgspec.Struct, frozen=True, kw_only=True):
    """Run with its number, which joins it with the census."""

    id: int
    line: RunLine


# --- runs ---

_R, _V, _E, _T, _C = runs.c, versions.c, evaluations.c, tasks.c, contributions.c
_OLD = versions.alias("old")
_FIRST = sa.case((_R.head > PACE_VERSIONS, _R.head - PACE_VERSIONS), else_=0)
_LOSS = (
    sa.select(_E.loss)
    .where(_E.run_id == _R.id, _E.state == "done", _E.loss.is_not(None))
    .order_by(_E.version.desc())
    .limit(1)
    .scalar_subquery()
)
_RUNS = (
    sa.select(_R.id, _R.name, _R.state, _R.workload, _R.head, _R.started_at, _LOSS.label("loss"))
    .add_columns(_R.global_step, _R.tokens, _V.created_at.label("head_at"))
    .add_columns(_OLD.c.version.label("first"), _OLD.c.created_at.label("first_at"))
    .join(versions, (_V.run_id == _R.id) & (_V.version == _R.head), isouter=True)
    .join(_OLD, (_OLD.c.run_id == _R.id) & (_OLD.c.version == _FIRST), isouter=True)
    .order_by(
        sa.case({"running": 0, "paused": 1, "draft": 2}, value=_R.state, else_=3), _R.id.desc()
    )
    .limit(RUNS_MAX)
)
_OPEN_TASKS = (
    sa.select(_T.run_id, _T.kind, _T.state, sa.func.count(), sa.func.count(_T.worker_id.distinct()))
    .where(one_of(_T.state, ("todo", "doing")))  # the condition of the partial index
    .group_by(_T.run_id, _T.kind, _T.state)
)
_WAITING = (
    sa.select(_C.kind)
    .where(_C.state == "accepted", equals(_C.run_id))
    .order_by(_C.id.desc())
    .limit(COUNTED_MAX // 10)
    .subquery()
)
_CHECKING = sa.select(_C.run_id, sa.func.count()).where(_C.state == "checking").group_by(_C.run_id)
_UNMERGED = sa.select(sa.func.count()).select_from(_WAITING).where(_WAITING.c.kind.in_(UPDATES))
_OPEN_RUNS = sa.select(_R.id).where(_R.state.in_(_OPEN))
_DISCARDED = (
    sa.select(_T.run_id)
    .where(_T.state == "discarded", _T.run_id.in_(_OPEN_RUNS))
    .limit(COUNTED_MAX)
    .subquery()
)
_FAILED = sa.select(_DISCARDED.c.run_id, sa.func.count()).group_by(_DISCARDED.c.run_id)


def listing(conn: sa.Connection, now: float) -> tuple[list[OpenRun], tuple[TaskCount, ...]]:
    """Return the runs, open ones first, and the counts of open tasks by kind and state."""
    opened = [tuple(row) for row in conn.execute(_OPEN_TASKS)]
    failed = {run: int(count) for run, count in conn.execute(_FAILED)}
    hours = machine_hours.lately(conn, now)
    checking = {run: int(count) for run, count in conn.execute(_CHECKING)}
    open_runs = []
    for row in map(dict, conn.execute(_RUNS).mappings()):
        doing = [
            (int(n), int(machines))
            for run, _, s, n, machines in opened
            if (run, s) == (row["id"], "doing")
        ]
        todo = [int(n) for run, _, s, n, _ in opened if (run, s) == (row["id"], "todo")]
        line = RunLine(
            name=row["name"],
            state=row["state"],
            workload=row["workload"],
            loss=row["loss"],
            started_at=row["started_at"],
            head_at=row["head_at"],
            tokens=row["tokens"],
            time=hours.get(row["id"], MachineSeconds()).shares,
            version=row["head"],
            versions_an_hour=_pace(row, now),
            workers=max((machines for _, machines in doing), default=0),
            todo=sum(todo),
            doing=sum(count for count, _ in doing),
            failed=failed.get(row["id"], 0),
            checking=checking.get(row["id"], 0),
            steps=row["global_step"],
            accepted=conn.execute(_UNMERGED, {"where_run_id": row["id"]}).scalar_one()
            if row["state"] in _OPEN
            else 0,
            pushed=Flow(),
            pulled=Flow(),
        )
        open_runs.append(OpenRun(id=row["id"], line=line))
    counted: dict[tuple[str, str], int] = {}
    for _, kind, state, count, _ in opened:
        counted[kind, state] = counted.get((kind, state), 0) + int(count)
    counts = tuple(TaskCount(kind=k, state=s, count=n) for (k, s), n in sorted(counted.items()))
    return open_runs, counts


def _pace(row: Mapping[str, Any], now: float) -> float:
    """Return the recent number of versions an hour; it falls while no version is made."""
    if row["state"] != "running" or row["first_at"] is None or row["head"] <= row["first"]:
        return 0.0
    return float(3600 * (row["head"] - row["first"]) / max(1.0, now - row["first_at"]))


def runs_total(conn: sa.Connection) -> int:
    """Return the number of all runs."""
    return int(conn.execute(sa.select(sa.func.count()).select_from(runs)).scalar_one())


# --- queues ---


def _length(name: str, table: sa.FromClause, *which: sa.ColumnElement[bool]) -> Any:
    some = sa.select(sa.literal(1)).select_from(table).where(*which).limit(COUNTED_MAX).subquery()
    return sa.select(
        sa.literal(name, sa.String).label("name"), sa.func.count().label("n")
    ).select_from(some)


_AUDITED = IS_OPEN & recomputes.c.audit_id.is_not(None)
_QUEUES = sa.union_all(
    _length("tasks", tasks, _T.state == "todo"),
    _length("overdue", tasks, _T.state == "doing", _T.renew_by < sa.bindparam("now")),
    _length("verdicts", contributions, _C.state.in_(("received", "checking"))),
    _length("experience", harvests, harvests.c.chunk.is_(None), harvests.c.run_id.in_(_OPEN_RUNS)),
    _length("evaluations", evaluations, _E.state.in_(("waiting", "running"))),
    _length("recomputes", recomputes, IS_OPEN),
    _length("audits", recomputes, _AUDITED, recomputes.c.answer_id.is_(None)),
    _length("answered audits", recomputes, _AUDITED, recomputes.c.answer_id.is_not(None)),
    _length("merge parts", merge_parts, merge_parts.c.state.in_(("todo", "leased"))),
    _length("answers", usage, usage.c.state == "open"),
)


def queues(conn: sa.Connection, now: float) -> dict[str, int]:
    """Return the lengths of the queues, by name, each counted up to `COUNTED_MAX`."""
    rows = conn.execute(_QUEUES, {"now": now})
    return {row.name: int(row.n) for row in rows}


# --- merges ---

_M = merges.c
_MERGES = (
    sa.select(_R.name, _M.base, _M.state, _M.contributions, _M.message, _M.created_at, _M.ended_at)
    .join(runs, _R.id == _M.run_id)
    .where(_M.shard == 0)
    .order_by(_M.id.desc())
    .limit(MERGES_MAX)
)


def newest_merges(
    conn: sa.Connection, staleness: Mapping[str, Sequence[float]], now: float
) -> tuple[MergeLine, ...]:
    """Return the newest merges, with the staleness of their contributions if known."""
    lines = []
    for row in conn.execute(_MERGES):
        mean, most = staleness.get(f"{row.name} {row.base + 1}", (None, None))
        lines.append(
            MergeLine(
                run=row.name,
                version=row.base + 1,
                state=row.state,
                at=row.ended_at or row.created_at,
                seconds=(row.ended_at or now) - row.created_at,
                contributions=len(decode(row.contributions, list[int])),
                staleness=mean,
                staleness_max=None if most is None else int(most),
                message=row.message[:200],
            )
        )
    return tuple(lines)
