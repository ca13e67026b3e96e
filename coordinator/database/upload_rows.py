"""Uploads: files that a worker sends for a lease or as evidence. A submission removes its own.

The file, not a row, shows how many bytes have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import (
    Connection,
    and_,
    bindparam,
    delete,
    func,
    insert,
    select,
    update,
)

from coordinator.database.engine.statements import among
from coordinator.database.tables.accounts import volunteers, workers
from coordinator.database.tables.contributions import uploads
from coordinator.database.tables.tasks import tasks


class UploadRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `uploads`."""

    id: str
    task_id: int
    attempt: int
    part: int
    tries: int
    worker_id: str
    sha256: str
    size: int
    complete: bool
    created_at: float
    expires_at: float
    evidence_of: int | None = None


_U = uploads.c
_ADD = insert(uploads)
_GET = select(uploads).where(among(_U.id, "ids"))
_OF_TASKS = select(uploads).where(among(_U.task_id, "tasks"))
_FINISH = update(uploads).where(among(_U.id, "ids")).values(complete=True)
_REMOVE = delete(uploads).where(among(_U.id, "ids"))
_UNVETTED = (
    select(func.coalesce(func.sum(_U.size), 0))
    .join_from(uploads, workers, workers.c.id == _U.worker_id)
    .join(volunteers, volunteers.c.id == workers.c.volunteer_id)
    .where(volunteers.c.standing != "vetted")
)
_WAITING = and_(_U.worker_id == workers.c.id, _U.evidence_of.is_(None))
_USE = (
    select(
        volunteers.c.id,
        volunteers.c.standing,
        func.count(_U.id).label("uploads"),
        func.coalesce(func.sum(_U.size), 0).label("bytes"),
    )
    .join_from(volunteers, workers, workers.c.volunteer_id == volunteers.c.id)
    .outerjoin(uploads, _WAITING)
    .where(among(volunteers.c.id, "volunteers"))
    .group_by(volunteers.c.id, volunteers.c.standing)
)
_HELD = (tasks.c.state == "doing") | and_(tasks.c.state == "todo", tasks.c.returned)
_ABANDONED = (
    select(_U.id)
    .join_from(uploads, tasks, tasks.c.id == _U.task_id)
    .where(_U.created_at < bindparam("before"), _U.evidence_of.is_(None))
    .where((tasks.c.attempt != _U.attempt) | ~_HELD)
    .limit(bindparam("most"))
)


def add(conn: Connection, rows: Sequence[UploadRow]) -> None:
    if rows:
        conn.execute(_ADD, [msgspec.structs.asdict(row) for row in rows])


def by_ids(conn: Connection, upload_ids: Sequence[str]) -> dict[str, UploadRow]:
    """Return the existing uploads with these ids."""
    found = conn.execute(_GET, {"ids": upload_ids}).mappings()
    return {row["id"]: UploadRow(**row) for row in found}


def of_tasks(conn: Connection, task_ids: Sequence[int]) -> list[UploadRow]:
    """Return the uploads for all attempts at some tasks."""
    return [UploadRow(**row) for row in conn.execute(_OF_TASKS, {"tasks": task_ids}).mappings()]


def finish(conn: Connection, upload_ids: Sequence[str]) -> None:
    conn.execute(_FINISH, {"ids": sorted(upload_ids)})


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """A volunteer's use of its quota."""

    count: int  # uploads without a contribution yet; `bytes` is their size
    bytes: int
    vetted: bool


def use(conn: Connection, volunteer_ids: Sequence[str]) -> dict[str, Use]:
    """Return each volunteer's use of its quota, by account."""
    return {
        row.id: Use(count=int(row.uploads), bytes=int(row.bytes), vetted=row.standing == "vetted")
        for row in conn.execute(_USE, {"volunteers": volunteer_ids})
    }


def waiting_unvetted(conn: Connection) -> int:
    """Return the total size of unvetted volunteers' evidence and unsubmitted uploads."""
    return int(conn.execute(_UNVETTED).scalar_one())


def abandoned(conn: Connection, before: float, limit: int) -> list[str]:
    """Return uploads begun before a time whose lease ended without a submission."""
    return list(conn.execute(_ABANDONED, {"before": before, "most": limit}).scalars())


def arrived(conn: Connection) -> set[str]:
    """Return the complete uploads that may still be submitted, or are evidence: no contribution
    refers to them, but they must stay.
    """
    return set(conn.execute(select(_U.sha256).where(_U.complete)).scalars())


def expired(conn: Connection, now: float, limit: int) -> list[str]:
    query = select(uploads.c.id).where(uploads.c.expires_at < now).limit(limit)
    return list(conn.execute(query).scalars())


def remove(conn: Connection, upload_ids: Sequence[str]) -> None:
    if upload_ids:
        conn.execute(_REMOVE, {"ids": upload_ids})
