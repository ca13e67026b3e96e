"""Claims of many waiters in one transaction: the rows are read, the caller decides, leases are
written.

`view` locks the rows that `leases.take` changes: the running runs, whose cursors move, and the
waiting tasks that may be handed out. Two coordinators therefore never hand out the same range, and
wait for each other only as long as a claim takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import median
from typing import Any

import msgspec
from sqlalchemy import (
    Connection,
    and_,
    bindparam,
    case,
    func,
    literal_column,
    select,
    update,
)

from coordinator.database import passes
from coordinator.database.engine.statements import among, equals, one_of
from coordinator.database.members import member_rows
from coordinator.database.tables.accounts import volunteers, workers
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import failures, tasks
from coordinator.database.tasks import BESIDE, TaskRow, awaits_verdict, of_present_data, row_of
from coordinator.rules.audits import AUDIT
from coordinator.rules.dispatch import Holding, Load
from coordinator.rules.eligibility import Todo, Waiter
from coordinator.rules.standing import State
from shared.decoding import decode
from shared.protocol.accounts import Benchmark, Hardware
from shared.protocol.base import RunState

PAST = 16  # newest tasks of a worker that measure its speed


class LiveRun(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run for a claim; most figures change between claims."""

    id: int
    head: int
    global_step: int
    tokens: int
    pass_no: int
    cursor: int
    samples_total: int
    weight: float
    steps_provable: int  # most steps of a task whose drift is small enough; 0 = no bound


class ClaimView(msgspec.Struct, frozen=True, kw_only=True):
    """Complete input of a decision about some claims."""

    live: dict[str, TaskRow]  # leased tasks of claims that are repeated, by claim_id
    runs: tuple[LiveRun, ...]
    loads: tuple[Load, ...]
    holdings: tuple[Holding, ...]  # tasks held by the asking volunteers
    todo: tuple[Todo, ...]


_LIVE_RUN = select(*(runs.c[name] for name in LiveRun.__struct_fields__))
_RUNS = (
    _LIVE_RUN.where(runs.c.state == "running")
    .order_by(runs.c.id)
    .with_for_update(key_share=True, of=runs)
)
# The state is written into the statement, not bound, so that SQLite uses its partial indexes.
_DOING = literal_column("tasks.state") == literal_column("'doing'")
_LOADS = (
    select(
        tasks.c.run_id,
        # audits belong to no pass
        func.sum(case((tasks.c.kind == AUDIT, 0), else_=1)).label("open"),
        func.sum(case((_DOING, tasks.c.price_micro), else_=0)).label("price_micro"),
        func.count(case((_DOING, None), else_=1)).label("waiting"),
    )
    .where(literal_column("tasks.state").in_([literal_column("'todo'"), literal_column("'doing'")]))
    .group_by(tasks.c.run_id)
)
_MINE = select(
    *(tasks.c[name] for name in ("id", "claim_id", "volunteer_id", "worker_id", "device", "run_id"))
).where(_DOING, among(tasks.c.volunteer_id, "volunteers"))
_LIVE = select(tasks).where(among(tasks.c.id, "ids"))


def view(conn: Connection, waiters: Sequence[Waiter], todo_max: int) -> ClaimView:
    """Return the input of a claim decision, locked, with at most `todo_max` tasks a run."""
    live_runs = tuple(LiveRun(**row) for row in conn.execute(_RUNS).mappings())
    asking = sorted({waiter.volunteer_id for waiter in waiters})
    tasks_held = conn.execute(_MINE, {"volunteers": asking}).all()
    claim_ids = {waiter.claim_id for waiter in waiters}
    repeated = [row.id for row in tasks_held if row.claim_id in claim_ids]
    counts = Counter(
        (row.volunteer_id, row.worker_id, row.device, row.run_id) for row in tasks_held
    )
    loads = conn.execute(_LOADS).all()
    waiting = {load.run_id for load in loads if load.waiting}
    homes = ["", *sorted({waiter.worker_id for waiter in waiters})]
    todo = _todo(conn, [run.id for run in live_runs if run.id in waiting], homes, todo_max)
    runs_with_failures = {task.run_id for task in todo if task.failed_by}
    return ClaimView(
        live=_live(conn, repeated) if repeated else {},
        runs=live_runs,
        loads=tuple(
            Load(
                run_id=load.run_id,
                open=int(load.open),
                price_micro=int(load.price_micro),
                holders=_holders(conn, load.run_id)
                if load.run_id in runs_with_failures
                else frozenset(),
            )
            for load in loads
        ),
        holdings=tuple(
            Holding(
                volunteer_id=volunteer, worker_id=worker, device=device, run_id=run_id, count=count
            )
            for (volunteer, worker, device, run_id), count in counts.items()
        ),
        todo=todo,
    )


def _live(conn: Connection, ids: Sequence[int]) -> dict[str, TaskRow]:
    rows = conn.execute(_LIVE, {"ids": ids}).mappings()
    return {row["claim_id"]: row_of(row) for row in rows}


_ABLE = select(workers.c.id, workers.c.workloads, workers.c.hardware, workers.c.benchmark).where(
    among(workers.c.id, "workers")
)
_V = volunteers.c
_RIGHTS = (
    select(workers.c.id, workers.c.revoked_at, workers.c.rests)
    .add_columns(_V.state, _V.standing, _V.invited, _V.suspended_reason)
    .add_columns(_V.unproven, _V.rest_until)
    .join_from(workers, volunteers, _V.id == workers.c.volunteer_id)
    .where(among(workers.c.id, "workers"))
)
_PAST = (
    select(tasks.c.run_id, tasks.c.device, tasks.c.steps, tasks.c.ended_at - tasks.c.begun_at)
    .where(equals(tasks.c.worker_id), tasks.c.state == "done", tasks.c.begun_at.is_not(None))
    .where(tasks.c.kind.not_in(BESIDE))
    .order_by(tasks.c.id.desc())
    .limit(PAST)
)


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """Rights of an account and its machine."""

    banned: bool
    revoked: bool  # the machine's secret was withdrawn
    standing: State
    invited: bool
    suspended_reason: str
    rests: Mapping[int, float]  # time until which the machine gets no task of a run, by run
    unproven: int  # recomputes of the account in a row that proved nothing
    rest_until: float  # no task is leased to the account before this time; 0 = none


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """Workloads and devices of a machine, as it registered them."""

    workloads: frozenset[str] = frozenset()
    devices: frozenset[str] = frozenset()  # empty if the machine reported no device


def abilities(conn: Connection, worker_ids: Iterable[str]) -> dict[str, Abilities]:
    """Return workloads and devices of machines, as they registered and measured them."""
    able = conn.execute(_ABLE, {"workers": sorted(set(worker_ids))})
    return {worker: _abilities(*columns) for worker, *columns in able}


def rights(conn: Connection, worker_ids: Iterable[str]) -> dict[str, Rights]:
    """Return the current rights of machines and their accounts, keyed by worker id."""
    rows = conn.execute(_RIGHTS, {"workers": sorted(set(worker_ids))})
    return {
        row.id: Rights(
            banned=row.state != "active",
            revoked=row.revoked_at is not None,
            standing=row.standing,
            invited=bool(row.invited),
            suspended_reason=row.suspended_reason,
            rests=_rests(row.rests),
            unproven=row.unproven,
            rest_until=row.rest_until or 0.0,
        )
        for row in rows
    }


@lru_cache(maxsize=1024)
def _rests(text: str) -> Mapping[int, float]:
    return decode(text, dict[int, float])


def rest(conn: Connection, worker_id: str, run_id: int, until: float, now: float) -> None:
    """Set the time until which a worker is leased no task of a run."""
    where = workers.c.id == worker_id
    text = conn.execute(select(workers.c.rests).where(where)).scalar() or "{}"
    rests = {run: time for run, time in _rests(text).items() if time > now} | {run_id: until}
    conn.execute(update(workers).where(where).values(rests=msgspec.json.encode(rests).decode()))


def past_speeds(conn: Connection, worker_id: str) -> dict[tuple[str, int], float]:
    """Return the median seconds for a step in a worker's newest tasks, by device and run."""
    paces: dict[tuple[str, int], list[float]] = {}
    for run_id, device, steps, seconds in conn.execute(_PAST, {"where_worker_id": worker_id}):
        paces.setdefault((device, run_id), []).append(max(1e-6, float(seconds) / steps))
    return {place: median(step_s) for place, step_s in paces.items()}


@lru_cache(maxsize=1024)
def _abilities(workloads: str, hardware: str, benchmark: str) -> Abilities:
    device_ids = [device.id for device in decode(hardware, Hardware).devices]
    ids = [*device_ids, *(measured.device for measured in decode(benchmark, list[Benchmark]))]
    names = frozenset(decode(workloads, list[str]))
    return Abilities(workloads=names, devices=frozenset(ids))


def _holders(conn: Connection, run_id: int) -> frozenset[str]:
    """Return the workers that hold tasks of a run."""
    query = select(tasks.c.worker_id).where(tasks.c.run_id == run_id, tasks.c.state == "doing")
    return frozenset(conn.execute(query.distinct()).scalars())


_T = tasks.c
_WAITING = (
    select(_T.id, _T.run_id, _T.pass_no, _T.start, _T.stop, _T.failures, _T.steps, _T.price_micro)
    .add_columns(_T.home, case((one_of(_T.kind, BESIDE), _T.kind), else_="").label("beside"))
    .where(equals(_T.run_id), _T.state == "todo", ~and_(_T.returned, awaits_verdict()))
    .where(among(_T.home, "homes"), of_present_data())
    .order_by(_T.failures, _T.id)
    .limit(bindparam("most"))
)
_TODO = _WAITING.with_for_update(skip_locked=True)


def _todo(
    conn: Connection, run_ids: Sequence[int], homes: Sequence[str], limit: int
) -> tuple[Todo, ...]:
    """Return each run's waiting tasks in claim order: fewest failures first, then oldest first.
    Tasks over members' data are returned only for the machines `homes`.
    """
    todo_rows: list[dict[str, Any]] = []
    for run_id in run_ids:
        values = {"where_run_id": run_id, "homes": homes, "most": limit}
        rows = conn.execute(_TODO, values).mappings()
        todo_rows += [dict(row) for row in rows]
    failed = [row["id"] for row in todo_rows if row.pop("failures")]
    failed_by: dict[int, set[str]] = {}
    if failed:
        query = select(failures.c.task_id, failures.c.worker_id).distinct()
        query = query.where(failures.c.task_id.in_(failed), failures.c.kind == "failure")
        for task_id, worker_id in conn.execute(query):
            failed_by.setdefault(task_id, set()).add(worker_id)
    return tuple(
        Todo(**row, failed_by=frozenset(failed_by.get(row["id"], ()))) for row in todo_rows
    )


def passes_over(conn: Connection, view: ClaimView, homes: Sequence[str], todo_max: int) -> bool:
    """Return True if a view lacks waiting tasks that another transaction has locked. That
    transaction may leave them waiting, and announces nothing then.
    """
    if conn.dialect.name != "postgresql":
        return False
    ids: set[int] = set()
    for run in view.runs:
        values = {"where_run_id": run.id, "homes": ["", *homes], "most": todo_max}
        ids |= set(conn.execute(_WAITING, values).scalars())
    return not ids <= {task.id for task in view.todo}


def live_run(conn: Connection, run_id: int) -> LiveRun:
    """Return the figures of one run, in any state."""
    return LiveRun(**conn.execute(_LIVE_RUN.where(runs.c.id == run_id)).mappings().one())


class StateLine(msgspec.Struct, frozen=True, kw_only=True):
    """State of a run with its actor and its reason."""

    name: str
    state: RunState
    state_actor: str
    state_reason: str


_STATE = select(*(runs.c[name] for name in StateLine.__struct_fields__)).order_by(runs.c.id)


def states(conn: Connection, names: Sequence[str]) -> dict[str, StateLine]:
    """Return the states of the runs with these names, and of all paused runs."""
    query = _STATE.where(runs.c.name.in_(names) | (runs.c.state == "paused"))
    return {row["name"]: StateLine(**row) for row in conn.execute(query).mappings()}


def set_cursors(conn: Connection, moved: Mapping[tuple[int, str], tuple[int, int]]) -> None:
    """Store the pass and cursor of each locked run, or of a worker's own data."""
    for (run_id, home), (pass_no, cursor) in sorted(moved.items()):
        if home:
            member_rows.set_cursor(conn, run_id, home, pass_no, cursor)
        else:
            passes.set_cursor(conn, run_id, pass_no, cursor)
