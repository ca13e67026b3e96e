"""Uploads: files that a worker sends for a lease. A submission deletes the row of its upload.

The file, not a row, shows how many bytes have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from coordinator.database.engine.statements import among, deletion
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
    expires_at: float


_U = uploads.c
_ADD = sa.insert(uploads)
_GET = sa.select(uploads).where(among(_U.id, "ids"))
_OF_TASKS = sa.select(uploads).where(among(_U.task_id, "tasks"))
_FINISH = sa.update(uploads).where(among(_U.id, "ids")).values(complete=True)
_SETTLED = deletion(uploads, "settled").where(among(_U.id, "ids")).returning(_U.id)
_INCOMPLETE = _SETTLED.where(~_U.complete)
_UNVETTED = (
    sa.select(sa.func.coalesce(sa.func.sum(_U.size), 0))
    .join_from(uploads, workers, workers.c.id == _U.worker_id)
    .join(volunteers, volunteers.c.id == workers.c.volunteer_id)
    .where(volunteers.c.standing != "vetted")
)
_WAITING = _U.worker_id == workers.c.id
_USE = (
    sa.select(
        volunteers.c.id,
        volunteers.c.standing,
        sa.func.count(_U.id).label("uploads"),
        sa.func.coalesce(sa.func.sum(_U.size), 0).label("bytes"),
    )
    .join_from(volunteers, workers, workers.c.volunteer_id == volunteers.c.id)
    .outerjoin(uploads, _WAITING)
    .where(among(volunteers.c.id, "volunteers"))
    .group_by(volunteers.c.id, volunteers.c.standing)
)
_HELD = (tasks.c.state == "doing") | sa.and_(tasks.c.state == "todo", tasks.c.returned)
_ABANDONED = (
    sa.select(_U.id)
    .join_from(uploads, tasks, tasks.c.id == _U.task_id)
    .where((tasks.c.attempt != _U.attempt) | ~_HELD)
    .limit(sa.bindparam("most"))
)


def add(conn: sa.Connection, rows: Sequence[UploadRow]) -> None:
    if rows:
        conn.execute(_ADD, [msgspec.structs.asdict(row) for row in rows])


def by_ids(conn: sa.Connection, upload_ids: Sequence[str]) -> dict[str, UploadRow]:
    """Return the existing uploads with these ids."""
    rows = conn.execute(_GET, {"ids": upload_ids}).mappings()
    return {row["id"]: UploadRow(**row) for row in rows}


def of_tasks(conn: sa.Connection, task_ids: Sequence[int]) -> list[UploadRow]:
    """Return the uploads for all attempts at some tasks."""
    return [UploadRow(**row) for row in conn.execute(_OF_TASKS, {"tasks": task_ids}).mappings()]


def finish(conn: sa.Connection, upload_ids: Sequence[str]) -> None:
    conn.execute(_FINISH, {"ids": sorted(upload_ids)})


class QuotaUse(msgspec.Struct, frozen=True, kw_only=True):
    """A volunteer's use of its quota."""

    count: int  # uploads without a contribution yet; `bytes` is their size
    bytes: int
    vetted: bool


def quota_use(conn: sa.Connection, volunteer_ids: Sequence[str]) -> dict[str, QuotaUse]:
    """Return each volunteer's use of its quota, by account."""
    return {
        row.id: QuotaUse(
            count=int(row.uploads), bytes=int(row.bytes), vetted=row.standing == "vetted"
        )
        for row in conn.execute(_USE, {"volunteers": volunteer_ids})
    }


def waiting_unvetted(conn: sa.Connection) -> int:
    """Return the total size of unvetted volunteers' unsubmitted uploads."""
    return int(conn.execute(_UNVETTED).scalar_one())


def abandoned(conn: sa.Connection, limit: int) -> list[str]:
    """Return uploads whose lease ended, so that they can never be submitted."""
    return list(conn.execute(_ABANDONED, {"most": limit}).scalars())


def blobs_in_use(conn: sa.Connection) -> set[str]:
    """Return the blobs of all uploads: no contribution refers to them yet, but they must stay."""
    return set(conn.execute(sa.select(_U.sha256)).scalars())


def expired(conn: sa.Connection, now: float, limit: int) -> list[str]:
    query = sa.select(uploads.c.id).where(uploads.c.expires_at < now).limit(limit)
    return list(conn.execute(query).scalars())


def remove(
    conn: sa.Connection, upload_ids: Sequence[str], *, incomplete: bool = False
) -> list[str]:
    """Delete uploads, or only the `incomplete` ones among them; return the ids of the deleted
    uploads.
    """
    statement = _INCOMPLETE if incomplete else _SETTLED
    return list(conn.execute(statement, {"ids": upload_ids}).scalars()) if upload_ids else []
