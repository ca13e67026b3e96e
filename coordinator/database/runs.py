"""Runs: rows and their transitions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec
import sqlalchemy as sa

from coordinator.database.contributions import UPDATES
from coordinator.database.engine.statements import among, deletion, equals, one_of
from coordinator.database.tables.accounts import volunteers, workers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import tasks
from coordinator.database.tables.versions import versions
from coordinator.database.volunteers import takes_part
from coordinator.rules import run_file
from coordinator.rules.run_file import RunFile
from shared.errors import Conflict, InvalidRunFile, NotFound
from shared.protocol.base import RunState
from shared.workloads.base import absence

TRANSITIONS: frozenset[tuple[RunState, RunState]] = frozenset(
    {
        ("draft", "running"),
        ("running", "paused"),
        ("paused", "running"),
        ("running", "completed"),
        ("paused", "completed"),
        ("draft", "failed"),
        ("running", "failed"),
        ("paused", "failed"),
        ("completed", "running"),  # extended by new stop conditions
    }
)

INSTALL = "install it where the server runs, then start the server again"
LATELY = 4  # a worker delivers if one of the newest LATELY versions contains its work
# states in which contributions are accepted and merged
OPEN: tuple[RunState, ...] = ("running", "paused")


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `runs`; see tables/runs.py."""

    id: int
    name: str
    state: RunState
    file: str
    workload: str
    workload_version: int
    dataset_id: int | None
    seed: int
    head: int
    best: int | None
    global_step: int
    tokens: int
    parameters: int
    samples_total: int
    samples_per_chunk: str
    sample_size: int
    pass_no: int
    cursor: int
    step_flops: float
    price_micro: int
    weight: float
    state_since: float | None
    state_actor: str
    state_reason: str
    created_at: float
    started_at: float | None
    ended_at: float | None
    steps_provable: int = 0
    drift: float | None = None
    drift_version: int | None = None
    idle_s: float = 0.0


def _row(mapping: Any) -> RunRow:
    return RunRow(**mapping)


def check_free(conn: sa.Connection, name: str) -> None:
    """Raise Conflict when the name of a run is taken."""
    if conn.execute(sa.select(runs.c.id).where(runs.c.name == name)).first():
        raise Conflict(f'there is a run called "{name}" already; choose another name')


def add(conn: sa.Connection, values: dict[str, Any]) -> int:
    """Insert a draft. Raises Conflict when the name is taken."""
    check_free(conn, values["name"])
    return int(conn.execute(sa.insert(runs).values(**values).returning(runs.c.id)).scalar_one())


# Columns of a run before its start.
UNSTARTED: dict[str, object] = {
    "head": -1,
    "best": None,
    "global_step": 0,
    "tokens": 0,
    "pass_no": 0,
    "cursor": 0,
    "state_since": None,
    "state_actor": "",
    "state_reason": "",
    "started_at": None,
    "ended_at": None,
    "idle_s": 0.0,
}


def remove(conn: sa.Connection, run_id: int) -> None:
    """Delete a draft, to which no other row refers yet."""
    conn.execute(deletion(runs, "asked").where(runs.c.id == run_id, runs.c.state == "draft"))


_BY_NAME = sa.select(runs).where(equals(runs.c.name))
_BY_ID = sa.select(runs).where(equals(runs.c.id))
_BY_ID_LOCKED = _BY_ID.with_for_update(key_share=True)  # rows that refer to the run can be inserted
_EVERY = sa.select(runs).where(runs.c.state != "deleted").order_by(runs.c.id)
_IN_STATES = _EVERY.where(among(runs.c.state, "states"))


def by_name(conn: sa.Connection, name: str) -> RunRow:
    """Find a run by name. Raises NotFound, which lists the five newest runs."""
    row = conn.execute(_BY_NAME, {"where_name": name}).mappings().first()
    if row is None:
        newest = sa.select(runs.c.name).where(runs.c.state != "deleted").order_by(runs.c.id.desc())
        names = conn.execute(newest.limit(5)).scalars().all()
        raise NotFound(f'there is no run called "{name}"; runs: {", ".join(names) or "none yet"}')
    return _row(row)


def by_id(conn: sa.Connection, run_id: int, *, lock: bool = False) -> RunRow:
    """Find a run by id. Raises NotFound."""
    query = _BY_ID_LOCKED if lock else _BY_ID
    row = conn.execute(query, {"where_id": run_id}).mappings().first()
    if row is None:
        raise NotFound(f"there is no run {run_id}")
    return _row(row)


class Damage(NamedTuple):
    """Reason why this process cannot work on a run, and the remedy."""

    why: str
    todo: str
    here_only: bool = False  # other servers may be able to


@lru_cache(maxsize=64)
def _read(text: str) -> RunFile | Damage:
    try:
        return run_file.decode(text)
    except InvalidRunFile as error:
        return Damage(error.message, "restore a backup")


def _damage(text: str) -> Damage | None:
    file = _read(text)
    if isinstance(file, Damage):
        return file
    absent = absence(file.workload)
    return None if absent is None else Damage(f"{absent}", INSTALL, here_only=True)


def damaged(conn: sa.Connection) -> list[tuple[str, Damage]]:
    """Return name and damage of each run whose stored file cannot be read, or whose workload is not
    installed here.
    """
    rows = conn.execute(_EVERY)
    return [(row.name, damage) for row in rows if (damage := _damage(row.file))]


def damaged_ids(conn: sa.Connection) -> list[int]:
    """Return the numbers of the runs on which this process cannot work."""
    return [row.id for row in conn.execute(_EVERY) if _damage(row.file)]


def users_of(conn: sa.Connection, dataset_id: int, name: str) -> list[str]:
    """Return the names of the runs that use a dataset, as their data or as a suite. Damaged runs
    count too; the suites of an unreadable file are unknown.
    """
    names = []
    for row in conn.execute(_EVERY):
        file = _read(row.file)
        suites = () if isinstance(file, Damage) else file.evaluation.suites
        if row.dataset_id == dataset_id or name in suites:
            names.append(row.name)
    return names


def every(conn: sa.Connection, states: Sequence[RunState] = ()) -> list[RunRow]:
    """Return all runs, or the runs in the given states, oldest first. Deleted and damaged runs are
    left out.
    """
    rows = conn.execute(_IN_STATES, {"states": states}) if states else conn.execute(_EVERY)
    return [_row(row) for row in rows.mappings() if not _damage(row["file"])]


class StateChange(msgspec.Struct, frozen=True, kw_only=True):
    """Change of a run's state: time, actor and reason."""

    at: float
    actor: Literal["organiser", "coordinator", "run"] = "organiser"
    reason: str = ""


def move(
    conn: sa.Connection, run: RunRow, state: RunState, change: StateChange, **values: object
) -> None:
    """Change the state. Raises Conflict for an impossible transition, or for a state that has just
    changed.
    """
    cause: dict[str, object] = {
        "state_since": change.at,
        "state_actor": change.actor,
        "state_reason": change.reason,
    }
    if state == "running" and run.started_at is not None and run.state_since is not None:
        cause |= {"idle_s": run.idle_s + max(0.0, change.at - run.state_since)}
    if (run.state, state) not in TRANSITIONS:
        raise Conflict(f'the run "{run.name}" is {run.state}, so it cannot become {state}')
    changed = conn.execute(
        sa.update(runs)
        .where(runs.c.id == run.id, runs.c.state == run.state)
        .values(state=state, **cause, **values)
    )
    if changed.rowcount != 1:
        raise Conflict(f'the run "{run.name}" has just changed; look again and retry')


_SET = sa.update(runs).where(equals(runs.c.id))
_SET_HEAD = _SET.where(equals(runs.c.head))


def set_head(conn: sa.Connection, run_id: int, base: int, **values: object) -> bool:
    """Compare-and-set the head; return False if another process has moved it."""
    key = {"where_id": run_id, "where_head": base, "head": base + 1}
    return conn.execute(_SET_HEAD, key | values).rowcount == 1


def set_values(conn: sa.Connection, run_id: int, **values: object) -> None:
    conn.execute(_SET, {"where_id": run_id} | values)


def _at_work() -> sa.ColumnElement[bool]:
    """Return the condition that a live worker holds a run's task or waits for its merge."""
    doing = one_of(tasks.c.state, ("doing",))
    holding = sa.select(tasks.c.worker_id).where(equals(tasks.c.run_id), doing)
    c = contributions.c
    waiting = sa.select(c.worker_id).where(
        equals(c.run_id),
        one_of(c.state, ("checking", "accepted")),
        (c.state == "checking") | one_of(c.kind, UPDATES),
    )
    is_live = workers.c.last_seen_at > sa.bindparam("since")
    return is_live & workers.c.id.in_(sa.union_all(holding, waiting))


def _steering(vetted: bool) -> sa.Select[int]:
    """Return the query that counts a run's delivering workers, at least 1 a volunteer."""
    c, w = contributions.c, workers.c
    good = sa.exists().where(
        c.volunteer_id == w.volunteer_id, c.worker_id == w.id, equals(c.run_id)
    )
    good = good.where(one_of(c.kind, UPDATES))
    # Two queries, each by an index: one query with OR would read all contributions of a volunteer.
    lately = good.where(c.version > sa.bindparam("before")) | good.where(c.state == "accepted")
    delivers = sa.func.sum(sa.case((lately, 1), else_=0))
    deliveries = sa.select(delivers.label("workers")).where(_at_work()).group_by(w.volunteer_id)
    deliveries = deliveries.join(volunteers, volunteers.c.id == w.volunteer_id).where(takes_part())
    is_vetted = volunteers.c.standing == "vetted"
    deliveries = deliveries.where(is_vetted if vetted else is_vetted | (volunteers.c.proofs > 0))
    count = deliveries.subquery().c.workers
    return sa.select(sa.func.coalesce(sa.func.sum(sa.case((count < 1, 1), else_=count)), 0))


_LIVE_WORKERS = sa.select(sa.func.count()).select_from(workers).where(_at_work())
_C, _V = contributions.alias("waiting").c, versions.c
_WAITS = (_C.state == "accepted") & one_of(_C.kind, UPDATES) & _C.unproven.is_(False)
_RUNNING = (
    sa.select(runs, sa.exists().where(_C.run_id == runs.c.id, _WAITS).label("waits"))
    .where(runs.c.state == "running")
    .order_by(runs.c.id)
)


class Turnout(msgspec.Struct, frozen=True, kw_only=True):
    """Updates waiting for a run's next merge, and the workers that steer it."""

    count: int
    steps: int
    samples: int
    oldest_at: float | None
    newest_at: float | None
    workers: int
    longest_s: float  # longest training of one of the updates


def _turnout(vetted: bool) -> sa.Select[Any]:
    of_run = _WAITS & (_C.run_id == sa.bindparam("where_run_id"))
    return sa.select(
        sa.func.count().label("count"),
        sa.func.coalesce(sa.func.sum(_C.steps), 0).label("steps"),
        sa.func.coalesce(sa.func.sum(_C.samples), 0).label("samples"),
        sa.func.min(_C.decided_at).label("oldest_at"),
        sa.func.max(_C.decided_at).label("newest_at"),
        _steering(vetted).scalar_subquery().label("workers"),
        sa.func.coalesce(sa.func.max(_C.train_s), 0.0).label("longest_s"),
    ).where(of_run & _C.vetted.is_(True) if vetted else of_run)


_TURNOUT = {vetted: _turnout(vetted) for vetted in (True, False)}


def live_workers(conn: sa.Connection, run_id: int, since: float) -> int:
    """Return how many workers seen since an instant are at work for a run."""
    values = {"where_run_id": run_id, "since": since}
    return int(conn.execute(_LIVE_WORKERS, values).scalar_one())


def turnout(conn: sa.Connection, run: RunRow, since: float, *, vetted: bool) -> Turnout:
    """Return the updates waiting for a run's next merge, and the workers that the merge waits for.

    The counted workers are those of each active volunteer with a part in the newest versions; a
    volunteer without such a worker counts as one, however many machines hold leases. `vetted`
    counts only vetted accounts; without it, accounts with one proof count too.
    """
    values = {"where_run_id": run.id, "since": since, "before": run.head - LATELY}
    row = dict(conn.execute(_TURNOUT[vetted], values).mappings().one())
    sums = {name: int(row[name]) for name in ("count", "steps", "samples", "workers")}
    return Turnout(**row | sums)


def running(conn: sa.Connection) -> list[tuple[RunRow, bool]]:
    """Return the running runs, oldest first, each with True if an update waits for a merge. Damaged
    runs are left out.
    """
    rows = conn.execute(_RUNNING).mappings()
    whole = [dict(row) for row in rows if not _damage(row["file"])]
    waits = [bool(row.pop("waits")) for row in whole]
    return [(_row(row), has_waiters) for row, has_waiters in zip(whole, waits, strict=True)]


def workers_of(conn: sa.Connection, run_id: int) -> list[dict[str, Any]]:
    """Return the workers with a leased task of the run, and that task."""
    t, w = tasks.c, workers.c
    query = sa.select(w.id, w.hostname, w.state, w.last_seen_at, w.benchmark)
    query = query.add_columns(t.device, t.id.label("task_id"))
    query = query.select_from(tasks.join(workers, w.id == t.worker_id)).where(
        t.run_id == run_id, t.state == "doing"
    )
    return [dict(row) for row in conn.execute(query.order_by(t.id)).mappings()]
