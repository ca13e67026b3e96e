"""Audits: waiting recomputes that vetted volunteers make, as paid tasks.

A recompute with a seed may become an audit. The row of an audit names the task, the accounts that
gave it back, and the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, bindparam, exists, func, or_, select, update

from coordinator.database import contributions
from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.statements import among, equals, one_of
from coordinator.database.recomputes import IS_OPEN, RecomputeRow, StoredCase
from coordinator.database.runs import OPEN
from coordinator.database.tables.accounts import volunteers, workers
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import tasks
from coordinator.database.tables.trust import recomputes
from coordinator.database.tasks import FREE, add_beside, awaits_verdict
from coordinator.database.volunteers import VolunteerRow, takes_part
from coordinator.rules.audits import (
    AUDIT,
    OFFERED_AFTER_S,
    OPEN_MAX,
    PAY_PER_AUDIT,
    AccountMarks,
    WaitingAudit,
)
from coordinator.rules.draws import RECOMPUTE_FLOPS_MAX
from shared.decoding import decode
from shared.protocol.leases import AuditWork
from shared.workloads.base import DatasetManifest, Job

NONE, OTHER = (
    -1,
    -2,
)  # NONE stands for an auditor without an invite, OTHER for an audited account without an invite
SEEN_S = 86_400.0  # an auditor's machine must have sent a heartbeat within this time


class AuditLease(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a lease that only audits have."""

    job: Job
    chunks: tuple[int, ...]
    audit: AuditWork
    data: DatasetManifest | None = None


_R, _T, _V = recomputes.c, tasks.c, volunteers.c
_BY_TASK = select(recomputes).where(equals(_R.audit_id))
_OPEN_NOW = (
    select(func.count())
    .select_from(tasks)
    .join(recomputes, _R.audit_id == _T.id)
    .join(runs, runs.c.id == _T.run_id)
    .where(one_of(_T.state, ("todo", "doing")), one_of(_T.kind, (AUDIT,)))
    .where(IS_OPEN, runs.c.state.in_(OPEN))
)
_ELSEWHERE = (
    select(_V.id)
    .join(workers, workers.c.volunteer_id == _V.id)
    .where(takes_part(), _V.standing == "vetted")
    .where(_V.accepted_micro >= bindparam("enough_micro"))
    .where(_V.id != bindparam("volunteer"), workers.c.last_seen_at >= bindparam("since"))
    .where(func.coalesce(_V.invite_id, NONE) != bindparam("invite"))
    .where(or_(_V.network == "", _V.network != bindparam("network")))
    .limit(1)
)
_TO_OPEN = (
    select(_R.contribution_id)
    .join(runs, runs.c.id == _R.run_id)
    .where(one_of(_R.state, ("waiting",)), _R.audit_id.is_(None), _R.seed != 0)
    .where(or_(_R.drawn_at < bindparam("before"), _R.flops > RECOMPUTE_FLOPS_MAX))
    .where(runs.c.state.in_(OPEN))
    .order_by(_R.contribution_id)
    .limit(bindparam("most"))
)
_MARKS = select(_V.id, _V.invite_id, _V.network)
_WAITING = (
    _MARKS.add_columns(_R.audit_id, _R.work, _R.declined, _T.price_micro)
    .join(recomputes, _R.volunteer_id == _V.id)
    .join(tasks, _T.id == _R.audit_id)
    .where(among(_R.audit_id, "ids"), IS_OPEN)
)
_AUDITORS = _MARKS.add_columns(_V.accepted_micro).where(
    among(_V.id, "ids"), _V.standing == "vetted"
)
_AUDIT_PAY = (
    select(_T.volunteer_id, func.sum(_T.price_micro))
    .where(among(_T.volunteer_id, "ids"))
    .where(one_of(_T.kind, (AUDIT,)))  # audits given back count until another account takes them
    .group_by(_T.volunteer_id)
)
_CHANGE = update(recomputes).where(equals(_R.contribution_id))
# Queued tasks of audits whose recompute has a result already, without the audit's answer.
_ASTRAY = (
    update(tasks)
    .where(one_of(_T.kind, (AUDIT,)), one_of(_T.state, ("todo",)), ~awaits_verdict())
    .where(exists().where(_R.audit_id == _T.id, _R.state == "done"))
)


def by_task(conn: Connection, task_id: int, *, lock: bool = False) -> RecomputeRow | None:
    """Return the recompute that an audit's task repeats; None for a task that is no audit."""
    query = _BY_TASK.with_for_update() if lock else _BY_TASK
    row = conn.execute(query, {"where_audit_id": task_id}).mappings().first()
    return None if row is None else RecomputeRow(**row)


def to_open(conn: Connection, now: float) -> list[int]:
    """Return contributions whose recomputes waited long or are large, so that volunteers may do
    them.
    """
    room = OPEN_MAX - int(conn.execute(_OPEN_NOW).scalar_one())
    values = {"before": now - OFFERED_AFTER_S, "most": max(0, room)}
    return list(conn.execute(_TO_OPEN, values).scalars())


def is_anybody(conn: Connection, row: VolunteerRow, price_micro: int, now: float) -> bool:
    """Return True if any vetted account that was active within a day may audit work of the account
    `row` at this price.
    """
    invite = OTHER if row.invite_id is None else row.invite_id
    values = {"volunteer": row.id, "invite": invite, "network": row.network}
    values |= {"enough_micro": PAY_PER_AUDIT * price_micro}
    return conn.execute(_ELSEWHERE, values | {"since": now - SEEN_S}).first() is not None


def open_task(conn: Connection, row: RecomputeRow, contribution: ContributionRow) -> None:
    """Queue the recompute of a contribution as an audit task."""
    job = decode(row.work, StoredCase).job
    values = {
        "run_id": row.run_id,
        "kind": AUDIT,
        "start": job.start,
        "stop": job.stop,
        "seed": job.seed,
        "steps": job.steps,
        "batch_size": job.batch_size,
        "price_micro": contribution.price_micro,
        "options": msgspec.json.encode({"base_version": contribution.base_version}).decode(),
    }
    change(conn, row, audit_id=add_beside(conn, values))


def waiting(conn: Connection, ids: Sequence[int]) -> dict[int, WaitingAudit]:
    """Return the terms of the waiting audits among these tasks, by task."""
    return {
        int(row.audit_id): WaitingAudit(
            kind=decode(row.work, StoredCase).job.kind,
            worker=_marks(row),
            declined=frozenset(decode(row.declined, list[str])),
            price_micro=int(row.price_micro),
        )
        for row in conn.execute(_WAITING, {"ids": list(ids)})
    }


def decline(conn: Connection, task_id: int, volunteer_id: str) -> None:
    """Bar an account and its machines from an audit that it gave back or could not do."""
    row = by_task(conn, task_id, lock=True)
    if row is not None:
        declined = sorted({*decode(row.declined, list[str]), volunteer_id})
        change(conn, row, declined=msgspec.json.encode(declined).decode())


def auditors(conn: Connection, ids: Iterable[str]) -> dict[str, tuple[AccountMarks, int, int]]:
    """Return the vetted accounts of `ids`, each with the pay of its contributions and audits."""
    values = {"ids": sorted(set(ids))}
    audited_micro = {who: int(micro) for who, micro in conn.execute(_AUDIT_PAY, values)}
    return {
        row.id: (_marks(row), int(row.accepted_micro), audited_micro.get(row.id, 0))
        for row in conn.execute(_AUDITORS, values)
    }


def _marks(row: Any) -> AccountMarks:
    return AccountMarks(volunteer=row.id, invite=row.invite_id, network=row.network)


def works(conn: Connection, ids: Iterable[int]) -> Mapping[int, AuditLease]:
    """Return the leases of the audits among these tasks, by task."""
    rows = {task_id: by_task(conn, task_id) for task_id in ids}
    return {task_id: _work(conn, row) for task_id, row in rows.items() if row is not None}


def _work(conn: Connection, row: RecomputeRow) -> AuditLease:
    work = decode(row.work, StoredCase)
    codec = contributions.by_id(conn, row.contribution_id).codec
    audit = AuditWork(seed=row.seed, codec=codec)
    return AuditLease(job=work.job, chunks=work.chunks, data=work.window, audit=audit)


def tidy(conn: Connection, now: float) -> None:
    """Cancel the queued tasks of audits whose recomputes have ended without their answer."""
    conn.execute(_ASTRAY, {"state": "cancelled", "ended_at": now, **FREE})


def change(conn: Connection, row: RecomputeRow, **values: object) -> None:
    """Change the row of the recompute behind an audit."""
    conn.execute(_CHANGE, {"where_contribution_id": row.contribution_id, **values})
