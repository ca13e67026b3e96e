"""Rows of audits: recomputes offered to volunteers, from the offer to the verdict on the answer.

open      its task waits for an auditor, or is done by one; the server may be faster
answered  the organiser does the task again
done      settled, or left to the organiser without an answer
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from sqlalchemy import Connection, and_, bindparam, func, insert, or_, select, update

from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.statements import among, its, one_of
from coordinator.database.runs import OPEN
from coordinator.database.tables.accounts import volunteers, workers
from coordinator.database.tables.contributions import uploads
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import tasks
from coordinator.database.tables.trust import audits, recomputes
from coordinator.database.tasks import FREE, add_beside, awaits_verdict
from coordinator.rules.audits import (
    AUDIT,
    LEASES_PER_AUDIT,
    OFFERED_AFTER_S,
    OPEN_MAX,
    AccountMarks,
    WaitingAudit,
)
from coordinator.rules.checks import HERE, RECOMPUTE_FLOPS_MAX, Result
from shared.decoding import decode
from shared.protocol.leases import AuditWork
from shared.workloads.base import DatasetManifest, Job

State = Literal["open", "answered", "done"]
NONE, OTHER = -1, -2  # no invite of an account, and of one that must differ from it
SEEN_S = 86_400.0  # a machine of an auditor to be


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `audits`."""

    contribution_id: int
    run_id: int
    volunteer_id: str
    state: State
    seed: int
    task_id: int | None
    work: str
    answer_id: int | None
    auditor_id: str
    sums: bytes | None
    result: str


class AuditLease(msgspec.Struct, frozen=True, kw_only=True):
    """Audit-specific part of a lease: the audit, and the work that it checks."""

    job: Job
    chunks: tuple[int, ...]
    audit: AuditWork
    worker: AccountMarks
    data: DatasetManifest | None = None
    declined: frozenset[str] = frozenset()  # accounts that gave it back


_A, _R, _T, _V = audits.c, recomputes.c, tasks.c, volunteers.c
_GET = select(audits).where(its(_A.contribution_id))
_BY_TASK = select(audits).where(its(_A.task_id))
_ADD = insert(audits)
_OPEN_NOW = select(func.count()).where(one_of(_A.state, ("open",)))
_ELSEWHERE = (
    select(_V.id)
    .join(workers, workers.c.volunteer_id == _V.id)
    .where(_V.state == "active", _V.standing == "vetted", _V.accepted >= LEASES_PER_AUDIT)
    .where(_V.id != bindparam("volunteer"), workers.c.last_seen_at >= bindparam("since"))
    .where(func.coalesce(_V.invite_id, NONE) != bindparam("invite"))
    .where(or_(_V.network == "", _V.network != bindparam("network")))
    .limit(1)
)
_TO_OPEN = (
    select(_R.contribution_id)
    .outerjoin(audits, _A.contribution_id == _R.contribution_id)
    .where(_A.contribution_id.is_(None), _R.state == "revealed", _R.hold == "", _R.kind == HERE)
    .where(or_(_R.asked_at < bindparam("before"), _R.flops > RECOMPUTE_FLOPS_MAX))
    .order_by(_R.contribution_id)
    .limit(bindparam("most"))
)
_WAITING = select(_A.task_id, _A.work).where(_A.state == "open", among(_A.task_id, "ids"))
_ABOUT = select(_V.id, _V.invite_id, _V.network, _V.accepted, _V.standing).where(
    among(_V.id, "ids")
)
_HAD = (
    select(_T.volunteer_id, func.count())
    .where(among(_T.volunteer_id, "ids"))
    .where(one_of(_T.kind, (AUDIT,)))  # what it gave back, too: it had it
    .group_by(_T.volunteer_id)
)
_CHANGE = update(audits).where(its(_A.contribution_id))
_CANCEL = update(tasks).where(its(_T.id), _T.state.in_(("todo", "discarded")))
# Nobody is given its task any more, or its recompute has ended without it.
_ASTRAY = (
    select(audits)
    .join(tasks, _T.id == _A.task_id)
    .join(runs, runs.c.id == _A.run_id)
    .join(recomputes, _R.contribution_id == _A.contribution_id)
    .where(_A.state == "open", ~awaits_verdict())
    .where(
        or_(
            _T.state.in_(("discarded", "cancelled")),
            and_(_T.state == "todo", runs.c.state.not_in(OPEN)),
            and_(_T.state == "todo", _R.state == "done"),
        )
    )
)
_LENT = (
    select(_A.work)
    .join(tasks, _T.id == _A.task_id)
    .where(its(_T.worker_id), _A.state == "open")
    .where(or_(_T.state == "doing", _T.returned))
)
_SIZES = select(uploads.c.sha256, uploads.c.size).where(
    uploads.c.evidence_of == bindparam("number"), uploads.c.complete
)


def get(conn: Connection, contribution_id: int, *, lock: bool = False) -> AuditRow | None:
    """Return the audit of a contribution; None without one. Lock order: audit, recompute."""
    query = _GET.with_for_update() if lock else _GET
    row = conn.execute(query, {"its_contribution_id": contribution_id}).mappings().first()
    return None if row is None else AuditRow(**row)


def by_task(conn: Connection, task_id: int, *, lock: bool = False) -> AuditRow | None:
    """Return the audit whose task this is."""
    query = _BY_TASK.with_for_update() if lock else _BY_TASK
    row = conn.execute(query, {"its_task_id": task_id}).mappings().first()
    return None if row is None else AuditRow(**row)


def to_open(conn: Connection, now: float) -> list[int]:
    """Return contributions whose recomputes waited long, or are large: volunteers may help."""
    room = OPEN_MAX - int(conn.execute(_OPEN_NOW).scalar_one())
    given = {"before": now - OFFERED_AFTER_S, "most": max(0, room)}
    return list(conn.execute(_TO_OPEN, given).scalars())


def is_anybody(conn: Connection, worker: AccountMarks, now: float) -> bool:
    """Return True if another account may audit a worker's contribution."""
    invite = OTHER if worker.invite is None else worker.invite
    given = {"volunteer": worker.volunteer, "invite": invite, "network": worker.network}
    return conn.execute(_ELSEWHERE, given | {"since": now - SEEN_S}).first() is not None


def evidence_sizes(conn: Connection, contribution_id: int) -> dict[str, int]:
    """Return the sizes of the files that were revealed."""
    return {sha: int(size) for sha, size in conn.execute(_SIZES, {"number": contribution_id})}


def open_task(
    conn: Connection, row: ContributionRow, work: AuditLease, seed: int, now: float
) -> None:
    """Put the task of an audit into the queue."""
    job = work.job
    values = {
        "run_id": row.run_id,
        "kind": AUDIT,
        "start": job.start,
        "stop": job.stop,
        "seed": job.seed,
        "steps": job.steps,
        "batch_size": job.batch_size,
        "price_micro": row.price_micro,
        "options": msgspec.json.encode({"base_version": row.base_version}).decode(),
    }
    number = add_beside(conn, values, now)
    told = {"contribution_id": row.id, "run_id": row.run_id, "volunteer_id": row.volunteer_id}
    told |= {"state": "open", "task_id": number, "seed": seed, "result": ""}
    conn.execute(_ADD, told | {"work": msgspec.json.encode(work).decode()})


def waiting(conn: Connection, ids: Sequence[int]) -> dict[int, WaitingAudit]:
    """Return the terms of the audits that are these tasks."""
    found = {}
    for task_id, stored in conn.execute(_WAITING, {"ids": list(ids)}):
        work = decode(stored, AuditLease)
        found[int(task_id)] = WaitingAudit(
            kind=work.job.kind,
            worker=work.worker,
            declined=work.declined,
        )
    return found


def decline(conn: Connection, task_id: int, volunteer_id: str) -> None:
    """Keep an audit from an account that gave it back, or could not do it, on all its machines."""
    row = by_task(conn, task_id, lock=True)
    if row is not None:
        work = decode(row.work, AuditLease)
        work = msgspec.structs.replace(work, declined=work.declined | {volunteer_id})
        _change(conn, row.contribution_id, work=msgspec.json.encode(work).decode())


def auditors(conn: Connection, ids: Iterable[str]) -> dict[str, tuple[AccountMarks, int, int]]:
    """Return the vetted volunteers among `ids`, with their accepted contributions and audits."""
    given = {"ids": sorted(set(ids))}
    had = {who: int(count) for who, count in conn.execute(_HAD, given)}
    return {
        row.id: (person(row.id, row.invite_id, row.network), int(row.accepted), had.get(row.id, 0))
        for row in conn.execute(_ABOUT, given)
        if row.standing == "vetted"
    }


def person(volunteer: str, invite: int | None, network: str) -> AccountMarks:
    """Return the marks of an account."""
    return AccountMarks(volunteer=volunteer, invite=invite, network=network)


def works(conn: Connection, ids: Iterable[int]) -> Mapping[int, AuditLease]:
    """Return the audit leases of these tasks."""
    found = {}
    for task_id in ids:
        row = by_task(conn, task_id)
        if row is not None:
            found[task_id] = decode(row.work, AuditLease)
    return found


def is_lent(conn: Connection, worker_id: str, sha256: str) -> bool:
    """Return True if a worker holds an audit that takes this file."""
    for stored in conn.execute(_LENT, {"its_worker_id": worker_id}).scalars():
        audit = decode(stored, AuditLease).audit
        if audit.inner is not None and audit.inner.sha256 == sha256:
            return True
    return False


def answer(conn: Connection, row: AuditRow, by: ContributionRow, sums: bytes, state: State) -> None:
    """Store an answer; unless it is `done` the organiser does the task again."""
    told = {"answer_id": by.id, "auditor_id": by.volunteer_id, "sums": sums, "state": state}
    _change(conn, row.contribution_id, **told)


def settle(conn: Connection, row: AuditRow, result: Result | Literal[""], now: float) -> None:
    """End an audit; an unassigned task is withdrawn."""
    _change(conn, row.contribution_id, state="done", result=result)
    if row.task_id is not None:
        conn.execute(
            _CANCEL, {"its_id": row.task_id, "state": "cancelled", "ended_at": now, **FREE}
        )


def tidy(conn: Connection, now: float) -> None:
    """Settle audits that can no longer be assigned; the organiser recomputes them."""
    for row in conn.execute(_ASTRAY).mappings().all():
        settle(conn, AuditRow(**row), "", now)


def _change(conn: Connection, contribution_id: int, **values: object) -> None:
    conn.execute(_CHANGE, {"its_contribution_id": contribution_id, **values})
