"""Census: all workers and volunteers, and the newest contributions by result.

The cost grows with the workers, not with past work: only the newest contributions, failures and
checks are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from sqlalchemy import CTE, Connection, Select, case, func, select, text

from coordinator.database import key_values, standings
from coordinator.database.tables.accounts import volunteers, workers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.experience import harvests
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import failures, tasks
from coordinator.database.tables.trust import recomputes
from coordinator.database.volunteers import OFFLINE_S, worker_state
from coordinator.rules.overview import (
    Census,
    ContributionWindow,
    DatabaseFigures,
    DrawCounts,
    FailedLine,
    Figures,
    Flow,
    RefusalCount,
    WorkerLine,
)

WINDOW_S = 3600.0
WINDOW_MAX = 2000  # newest contributions that are read
FAILURES_MAX = 1000  # newest failures that are counted
CHECKS_MAX = 500
MACHINES_MAX = 100  # listed machines: failing ones first, then by last heartbeat
FAILED_MAX = 50
REASONS_MAX = 12
SPAN_MIN_S = 60.0  # shortest time over which a rate is measured
TEXT_MAX = 200
GOOD = ("accepted", "merged", "superseded")
UNDECIDED = ("received", "checking")

_C, _W, _V, _T = contributions.c, workers.c, volunteers.c, tasks.c


def figures(conn: Connection, now: float) -> Figures:
    """Return the counts of workers, volunteers and open checks, the database and its backup."""
    return Figures(
        at=now,
        workers=_worker_states(conn, now),
        volunteers=_standings(conn),
        backlog=standings.backlog(conn, now),
        database=DatabaseFigures(kind=conn.dialect.name, bytes=_bytes(conn)),
        backup_at=last_backup(conn),
    )


def census(conn: Connection, now: float) -> Census:
    """Count all workers and volunteers, and the newest contributions."""
    newest = _newest(now)
    window = _window(conn, newest, now)
    span = max(SPAN_MIN_S, now - window.since)
    pushed, pulled = _flows(conn, newest, 3600 / span)
    return Census(
        **msgspec.structs.asdict(figures(conn, now)),
        machines=_machines(conn, newest, now),
        window=window,
        pushed=pushed,
        pulled=pulled,
        staleness=_staleness(conn, newest),
        refusals=_refusals(conn, newest),
        recompute=_recompute(conn),
    )


# --- the window ---


def _newest(now: float) -> CTE:
    """Return a query of the newest contributions of the last hour, at most `WINDOW_MAX`."""
    some = (
        select(
            _C.id, _C.run_id, _C.kind, _C.state, _C.reason, _C.samples, _C.size, _C.worker_id,
            _C.base_version, _C.version, _C.received_at,
        )
        .order_by(_C.id.desc())
        .limit(WINDOW_MAX)
        .subquery()
    )  # fmt: skip
    return select(some).where(some.c.received_at >= now - WINDOW_S).cte("newest")


def _window(conn: Connection, newest: CTE, now: float) -> ContributionWindow:
    n = newest.c
    query = select(
        func.count(),
        func.coalesce(func.min(n.received_at), now),
        func.sum(case((n.state.in_(GOOD), 1), else_=0)),
        func.sum(case((n.state == "rejected", 1), else_=0)),
        func.sum(case((n.state.in_(UNDECIDED), 1), else_=0)),
        func.coalesce(func.sum(n.size), 0),
    )
    count, since, good, refused, undecided, size = conn.execute(query).one()
    return ContributionWindow(
        since=float(since),
        contributions=int(count),
        good=int(good or 0),
        refused=int(refused or 0),
        undecided=int(undecided or 0),
        bytes_an_hour=float(size) * 3600 / max(SPAN_MIN_S, now - float(since)),
    )


def _flows(
    conn: Connection, newest: CTE, an_hour: float
) -> tuple[dict[int, Flow], dict[int, Flow]]:
    """Return each run's submitted and merged work an hour; samples of self-play are positions."""
    n, h = newest.c, harvests.c
    query = (
        select(n.run_id, n.kind, n.state, func.count(), func.sum(n.samples))
        .add_columns(func.sum(h.episodes), func.sum(h.samples))
        .join(harvests, h.contribution_id == n.id, isouter=True)
        .where(n.state != "rejected")
        .group_by(n.run_id, n.kind, n.state)
    )
    rows = [tuple(row) for row in conn.execute(query)]
    plays = {row[0] for row in rows if row[1] == "experience"}
    pushed: dict[int, Flow] = {}
    pulled: dict[int, Flow] = {}
    for run, kind, state, count, samples, episodes, drawn in rows:
        if kind == "experience":
            _add(pushed, run, an_hour, count, drawn or 0, episodes or 0)
        elif kind != "evaluation":
            if run not in plays:  # only games count as submitted in self-play
                _add(pushed, run, an_hour, count, samples, 0)
            if state == "merged":
                _add(pulled, run, an_hour, count, samples, 0)
    return pushed, pulled


def _add(flows: dict[int, Flow], run: int, an_hour: float, *more: float) -> None:
    flow = flows.get(run, Flow())
    count, samples, episodes = more
    flows[run] = Flow(
        contributions=flow.contributions + count * an_hour,
        samples=flow.samples + float(samples) * an_hour,
        episodes=flow.episodes + float(episodes) * an_hour,
    )


def _staleness(conn: Connection, newest: CTE) -> dict[str, tuple[float, int]]:
    """Return the mean and the largest staleness of the contributions merged into each version, by
    "RUN VERSION".
    """
    n = newest.c
    gap = n.version - 1 - n.base_version
    query = (
        select(runs.c.name, n.version, func.avg(gap), func.max(gap))
        .join(runs, runs.c.id == n.run_id)
        .where(n.state == "merged")
        .group_by(runs.c.name, n.version)
    )
    return {
        f"{name} {version}": (float(mean), int(most))
        for name, version, mean, most in conn.execute(query)
    }


def _refusals(conn: Connection, newest: CTE) -> tuple[RefusalCount, ...]:
    n = newest.c
    query = (
        select(n.reason, func.count().label("n"), func.max(n.id).label("last"))
        .where(n.state == "rejected")
        .group_by(n.reason)
        .order_by(func.count().desc(), n.reason)
        .limit(REASONS_MAX)
    )
    counted = list(conn.execute(query))
    last = select(_C.id, _C.message, _C.received_at)
    rows = conn.execute(last.where(_C.id.in_([row.last for row in counted])))
    newest_rows = {row.id: row for row in rows}
    return tuple(
        RefusalCount(
            reason=row.reason or "other",
            count=int(row.n),
            newest=newest_rows[row.last].message[:TEXT_MAX],
            at=newest_rows[row.last].received_at,
        )
        for row in counted
        if row.last in newest_rows
    )


# --- workers and volunteers ---


def _worker_states(conn: Connection, now: float) -> dict[str, int]:
    silent = _W.last_seen_at < now - OFFLINE_S
    state = case((_W.state == "left", "left"), (silent, "offline"), else_=_W.state).label("is")
    query = select(state, func.count()).where(_W.revoked_at.is_(None)).group_by(state)
    return {name: int(count) for name, count in conn.execute(query)}


def _standings(conn: Connection) -> dict[str, int]:
    standing = case((_V.state == "active", _V.standing), else_=_V.state).label("is")
    query = select(standing, func.count()).group_by(standing)
    return {name: int(count) for name, count in conn.execute(query)}


def _machines(conn: Connection, newest: CTE, now: float) -> tuple[WorkerLine, ...]:
    """Return workers: the failing ones of the window first, then by newest heartbeat."""
    failed = _failures(conn, now)
    n = newest.c
    query = select(n.worker_id, n.state, func.count()).group_by(n.worker_id, n.state)
    work: Counter[tuple[str, bool]] = Counter()
    for worker, state, count in conn.execute(query):
        if state not in UNDECIDED:
            work[worker, state == "rejected"] += int(count)
    bad = failed + Counter({who: count for (who, refused), count in work.items() if refused})
    ids = [who for who, _ in bad.most_common(MACHINES_MAX // 2)]
    last = select(_W.id).where(_W.revoked_at.is_(None), _W.state != "left")
    recent = last.order_by(_W.last_seen_at.desc(), _W.id).limit(MACHINES_MAX - len(ids))
    ids += [who for who in conn.execute(recent).scalars() if who not in ids]
    rows = {row["id"]: row for row in conn.execute(_described(ids)).mappings()}
    leases = select(_T.worker_id, _T.id, runs.c.name).join(runs, runs.c.id == _T.run_id)
    leases = leases.where(_T.worker_id.in_(ids), _T.state == "doing").order_by(_T.id.desc())
    # of a worker with several leases, the oldest task is shown
    holding = {who: (task, run) for who, task, run in conn.execute(leases)}
    return tuple(
        WorkerLine(
            id=who,
            volunteer=rows[who]["nickname"],
            hostname=rows[who]["hostname"][:64],
            state=worker_state(rows[who]["state"], rows[who]["last_seen_at"], now),
            last_seen=rows[who]["last_seen_at"],
            step_flops=rows[who]["step_flops"],
            task=holding.get(who, (None, ""))[0],
            run=holding.get(who, (None, ""))[1],
            good=work[who, False],
            refused=work[who, True],
            failures=failed[who],
        )
        for who in ids
        if who in rows
    )


def _described(ids: Sequence[str]) -> Select[object]:
    query = select(_W.id, _W.hostname, _W.state, _W.last_seen_at, _W.step_flops, _V.nickname)
    return query.join(volunteers, _V.id == _W.volunteer_id).where(_W.id.in_(ids))


def _failures(conn: Connection, now: float) -> Counter[str]:
    """Return the number of each worker's failures among the newest ones of the last hour."""
    f = failures.c
    some = select(f.worker_id, f.kind, f.at).order_by(f.id.desc()).limit(FAILURES_MAX).subquery()
    query = select(some.c.worker_id, func.count()).where(
        some.c.kind != "forgiven", some.c.at >= now - WINDOW_S
    )
    counts = conn.execute(query.group_by(some.c.worker_id))
    return Counter({worker: int(count) for worker, count in counts})


# --- checks ---


def _recompute(conn: Connection) -> DrawCounts:
    """Return the results of the newest draws."""
    k = recomputes.c
    query = select(k.result).order_by(k.contribution_id.desc()).limit(CHECKS_MAX)
    counts = Counter(conn.execute(query).scalars())
    return DrawCounts(
        passed=counts["passed"],
        failed=counts["failed"],
        unproven=counts["unproven"],
        open=counts[""],
    )


# --- failed tasks, the database, the backup ---


def failed_tasks(conn: Connection) -> tuple[FailedLine, ...]:
    """Return discarded tasks of open runs, newest first."""
    f = failures.c
    open_runs = select(runs.c.id).where(runs.c.state.in_(("running", "paused")))
    some = select(_T.id).where(_T.state == "discarded", _T.run_id.in_(open_runs))
    some = some.limit(FAILURES_MAX)
    last = select(f.message).where(f.task_id == _T.id).order_by(f.id.desc()).limit(1)
    query = (
        select(_T.id, runs.c.name, _T.kind, _T.failures, _T.timeouts)
        .add_columns(func.coalesce(last.scalar_subquery(), "").label("message"))
        .join(runs, runs.c.id == _T.run_id)
        .where(_T.id.in_(some))
        .order_by(_T.id.desc())
        .limit(FAILED_MAX)
    )
    return tuple(
        FailedLine(
            id=row.id,
            kind=row.kind,
            failures=row.failures,
            timeouts=row.timeouts,
            run=row.name,
            message=row.message[:TEXT_MAX],
        )
        for row in conn.execute(query)
    )


def _bytes(conn: Connection) -> int:
    """Return the size of the database, without its write-ahead log."""
    if conn.dialect.name == "sqlite":
        pages, size = conn.exec_driver_sql("PRAGMA page_count"), "PRAGMA page_size"
        return int(pages.scalar_one()) * int(conn.exec_driver_sql(size).scalar_one())
    return int(conn.execute(text("SELECT pg_database_size(current_database())")).scalar_one())


def last_backup(conn: Connection) -> float | None:
    """Return the time of the last backup; None without a backup."""
    stored_text = key_values.get(conn, key_values.BACKUP)
    return float(stored_text) if stored_text else None
