"""Facts about open runs from which a standstill follows; see rules/standstill_causes.py.

Only the newest rows of growing tables are read, so that the cost is the same after 50,000 versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache

import msgspec
import sqlalchemy as sa

from coordinator.database import merges, runs, versions
from coordinator.database.engine.statements import equals, one_of
from coordinator.database.monitoring import replicas
from coordinator.database.recomputes import CHECKER
from coordinator.database.runs import RunRow
from coordinator.database.tables.accounts import volunteers, workers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.experience import chunks
from coordinator.database.tables.tasks import failures, tasks
from coordinator.database.tables.trust import recomputes
from coordinator.database.volunteers import takes_part, worker_state
from coordinator.rules.health import SILENT_S
from coordinator.rules.standstill_causes import (
    BARREN_MIN,
    RECENT_S,
    EpisodeFacts,
    MergeFacts,
    OutcomeFacts,
    PresenceFacts,
    ProofFacts,
)
from shared.decoding import decode
from shared.errors import NotFound
from shared.protocol.accounts import Device, Hardware
from shared.protocol.limits import memory_on

LIVE_S = 120.0  # a machine that was silent for longer counts as absent
FAILURES_MAX = 500  # most failures of all runs that are read: the newest
REFUSALS_MAX = 20  # most refusals of a run that are read: the newest
MACHINES_MAX, ACCEPTED_MAX = 1000, 1000
GOOD = ("accepted", "merged", "superseded")
LEARN = "learn"  # kind of a task that learns from the episodes of actors
STUCK_S = 30.0  # a failed task of a learner that is not leased again within this time is stuck

_C, _F, _T, _W, _H, _K = (
    contributions.c, failures.c, tasks.c, workers.c, chunks.c, recomputes.c,
)  # fmt: skip
_NEWEST_FAILURES = sa.select(_F.id).order_by(_F.id.desc()).limit(FAILURES_MAX).subquery()
_FAILURES = (
    sa.select(_T.run_id, _F.worker_id, _F.message, _F.at, _T.kind)
    .join(_NEWEST_FAILURES, _NEWEST_FAILURES.c.id == _F.id)
    .join(tasks, _T.id == _F.task_id)
    .where(_F.kind == "failure", _F.at >= sa.bindparam("since"))
    .order_by(_F.id)
)
_REFUSALS = (
    sa.select(_C.worker_id, _C.message, sa.func.coalesce(_C.decided_at, _C.received_at))
    .where(one_of(_C.state, ("rejected",)), equals(_C.run_id))
    .order_by(_C.id.desc())
    .limit(REFUSALS_MAX)
)
_NEWEST_GOOD = {
    state: sa.select(_C.decided_at)
    .where(one_of(_C.state, (state,)), equals(_C.run_id))
    .order_by(_C.id.desc())
    .limit(1)
    for state in GOOD
}
# Only the newest rows are read: accepted games and evaluations stay in this state.
_ACCEPTED = (
    sa.select(_C.id, _C.decided_at, _C.unproven)
    .where(one_of(_C.state, ("accepted",)), equals(_C.run_id))
    .order_by(_C.id.desc())
    .limit(ACCEPTED_MAX)
    .subquery()
)
_UNPROVEN = (
    sa.select(_ACCEPTED.c.decided_at, _K.message, _K.owner, _K.audit_id)
    .join(recomputes, _K.contribution_id == _ACCEPTED.c.id, isouter=True)
    .where(_ACCEPTED.c.unproven.is_(True))
    .order_by(_ACCEPTED.c.id)
)
_CHUNKS = (
    sa.select(_H.episodes, _H.samples, _H.sealed_at)
    .where(equals(_H.run_id))
    .order_by(_H.number.desc())
    .limit(BARREN_MIN)
)
_IS_LEARNING = sa.and_(equals(_T.run_id), _T.kind == LEARN, one_of(_T.state, ("todo", "doing")))
_LEARNING = sa.select(sa.func.count()).where(_IS_LEARNING)
_LEARNERS = sa.select(_T.state, sa.func.max(_T.failures)).where(_IS_LEARNING).group_by(_T.state)
_MACHINES = (
    sa.select(_W.id, _W.state, _W.last_seen_at, _W.hardware, _W.workloads)
    .join_from(workers, volunteers, volunteers.c.id == _W.volunteer_id)
    .where(_W.revoked_at.is_(None), takes_part())
    .order_by(_W.last_seen_at.desc())
    .limit(MACHINES_MAX)
)


class BadOutcome(msgspec.Struct, frozen=True):
    """Failed task, or refused contribution."""

    worker: str
    message: str
    at: float
    task_kind: str = ""


class MachineAbilities(msgspec.Struct, frozen=True):
    """Machine: its state, its workloads and its devices."""

    worker_id: str
    state: str
    last_seen: float
    workloads: frozenset[str]
    devices: tuple[Device, ...]


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that all runs of a server share."""

    served_since: float | None  # None: no process serves
    closed: str  # why the serving processes accept nothing new; "" if one of them does
    failures: dict[int, tuple[BadOutcome, ...]]  # by run, oldest first
    machines: tuple[MachineAbilities, ...]  # newest heartbeat first


def of_server(conn: sa.Connection, now: float) -> ServerFacts:
    """Return the facts that all runs share."""
    alive = [line for line in replicas.listing(conn) if now - line.beat_at <= SILENT_S]
    bad: dict[int, list[BadOutcome]] = {}
    for run_id, *failure in conn.execute(_FAILURES, {"since": now - RECENT_S}):
        bad.setdefault(int(run_id), []).append(BadOutcome(*failure))
    return ServerFacts(
        served_since=min((line.started_at for line in alive), default=None),
        closed=min((line.figures.closed for line in alive), default=""),
        failures={run_id: tuple(rows) for run_id, rows in bad.items()},
        machines=tuple(
            MachineAbilities(
                row.id,
                worker_state(row.state, row.last_seen_at, now),
                row.last_seen_at,
                *_abilities(row.workloads, row.hardware),
            )
            for row in conn.execute(_MACHINES)
        ),
    )


@lru_cache(maxsize=4096)
def _abilities(workloads: str, hardware: str) -> tuple[frozenset[str], tuple[Device, ...]]:
    devices = tuple(d for d in decode(hardware, Hardware).devices if d.usable)
    return frozenset(decode(workloads, list[str])), devices


def outcomes(
    conn: sa.Connection, run: RunRow, bad: Sequence[BadOutcome], made_at: float | None, now: float
) -> tuple[OutcomeFacts, OutcomeFacts]:
    """Return a run's failures and its refusals since its newest good contribution. Failures of
    learners count since the newest version, made at `made_at`: good episodes of actors do not show
    that a learner can work.
    """
    key = {"where_run_id": run.id}
    good = max(conn.execute(query, key).scalar() or 0.0 for query in _NEWEST_GOOD.values())
    since = max(now - RECENT_S, run.state_since or 0.0)
    refused = [BadOutcome(*row) for row in conn.execute(_REFUSALS, key)][::-1]
    failed = [
        row
        for row in bad
        if row.at > (made_at or 0.0 if row.task_kind == LEARN else good) and row.at >= since
    ]
    of_learners = [row.at for row in failed if row.task_kind == LEARN]
    stuck = bool(of_learners) and now - of_learners[-1] >= STUCK_S and _is_stuck(conn, run)
    return (
        msgspec.structs.replace(_outcome(failed), stuck=stuck),
        _outcome([row for row in refused if row.at > good and row.at >= since]),
    )


def _is_stuck(conn: sa.Connection, run: RunRow) -> bool:
    """Return True if a learner's task has failed and no machine does a learner's task."""
    rows = conn.execute(_LEARNERS, {"where_run_id": run.id}).all()
    failed_tasks = {str(state): int(count) for state, count in rows}
    return failed_tasks.get("todo", 0) > 0 and "doing" not in failed_tasks


def _outcome(bad: Sequence[BadOutcome]) -> OutcomeFacts:
    if not bad:
        return OutcomeFacts()
    commonest, _ = Counter(row.message for row in bad).most_common(1)[0]
    return OutcomeFacts(
        count=len(bad),
        machines=len({row.worker for row in bad}),
        commonest=commonest,
        since=bad[0].at,
    )


def machines(
    conn: sa.Connection,
    run: RunRow,
    server: ServerFacts,
    needs_bytes: int,
    now: float,
    keepers: Collection[str] | None = None,
) -> PresenceFacts:
    """Count the machines that are online, paused, and fit for a run. `keepers` are the workers that
    keep data for the run; None where the run's data is the organiser's.
    """
    online = [m for m in server.machines if m.state in ("online", "training")]
    able = [m for m in online if run.workload in m.workloads]
    devices = [device for machine in able for device in machine.devices]
    largest = max(devices, key=lambda device: device.memory_bytes, default=None)
    return PresenceFacts(
        online=len(online),
        paused=sum(m.state == "paused" for m in server.machines),
        fitting=sum(_holds(machine, needs_bytes) for machine in able),
        at_work=runs.live_workers(conn, run.id, now - LIVE_S),
        workload=bool(able),
        keepers=None if keepers is None else sum(m.worker_id in keepers for m in online),
        largest=0 if largest is None else largest.memory_bytes,
        largest_name="" if largest is None else largest.name,
        last_seen=max((m.last_seen for m in server.machines), default=None),
    )


def _holds(machine: MachineAbilities, needs_bytes: int) -> bool:
    """Return True if a device of the machine has enough memory, as far as it is known."""
    return not machine.devices or any(
        not device.memory_bytes or memory_on(device.kind, needs_bytes) <= device.memory_bytes
        for device in machine.devices
    )


def proofs(conn: sa.Connection, run: RunRow) -> ProofFacts:
    """Return the updates that wait for their proof."""
    rows = conn.execute(_UNPROVEN, {"where_run_id": run.id}).all()
    if not rows:
        return ProofFacts()
    provers = Counter(
        row.message or f"made by {_prover(row.owner, row.audit_id)}"
        for row in rows
        if row.message is not None  # other updates wait behind an earlier draw
    )
    common = max(provers, key=lambda name: provers[name], default="")
    return ProofFacts(count=len(rows), provers=common, since=rows[0].decided_at)


def _prover(owner: str, audit_id: int | None) -> str:
    if audit_id is not None:
        return "a volunteer that audits it"
    return "a checker" if owner.startswith(CHECKER) else "this server"


def episodes(
    conn: sa.Connection, run: RunRow, samples_each: int, unit: str, now: float
) -> EpisodeFacts:
    """Return the newest episodes of a run whose episodes may hold nothing to learn from."""
    if not samples_each:
        return EpisodeFacts()
    key = {"where_run_id": run.id}
    rows = [row for row in conn.execute(_CHUNKS, key) if row.sealed_at >= now - RECENT_S]
    total = sum(int(row.episodes) for row in rows)
    return EpisodeFacts(
        unit=unit,
        made=total,
        taught=sum(int(row.samples) for row in rows) / max(1, total * samples_each),
        learning=int(conn.execute(_LEARNING, key).scalar_one()),
        since=rows[-1].sealed_at if rows else None,
    )


def merge(
    conn: sa.Connection, run: RunRow, *, is_due: bool, members: int, now: float
) -> MergeFacts:
    """Return the state of the next merge; `is_due`: the plan's conditions are fulfilled; `members`:
    further members that it waits for.
    """
    row = merges.of_base(conn, run.id, run.head)
    waiting = runs.turnout(conn, run, now - LIVE_S, vetted=False)
    return MergeFacts(
        failed=row is not None and bool(row.failures or row.message),
        message="" if row is None else row.message,
        failed_at=None if row is None else row.ended_at,
        due=is_due,
        under_way=row is not None and row.state == "leased" and row.lease_until > now,
        waits_since=waiting.newest_at,
        ready=waiting.count,
        members=members,
    )


def pace(conn: sa.Connection, run: RunRow) -> tuple[float | None, float]:
    """Return the newest version's time, and the mean seconds between recent versions; None and 0
    for a run without a version.
    """
    try:
        return versions.pace(conn, run.id, run.head)
    except NotFound:
        return None, 0.0
