"""Uploads: what a lease may send, and what has arrived.

How many bytes are there is told by the file, not by a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import ColumnElement, Connection, delete, exists, func, insert, select, update

from coordinator.database.engine.statements import its
from coordinator.database.tables.contributions import contributions, uploads


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


def _handed_in() -> ColumnElement[bool]:
    """Return the condition that a contribution of the worker refers to an upload."""
    c = contributions.c
    return exists().where(c.sha256 == uploads.c.sha256, c.worker_id == uploads.c.worker_id)


_U = uploads.c
_ADD = insert(uploads)
_GET = select(uploads).where(its(_U.id), its(_U.worker_id))
_SAME = select(uploads).where(
    its(_U.task_id), its(_U.attempt), its(_U.part), its(_U.tries), its(_U.sha256)
)
_FINISH = update(uploads).where(its(_U.id)).values(complete=True)
_COMPLETE = (
    select(_U.id)
    .where(its(_U.task_id), its(_U.attempt), its(_U.worker_id), its(_U.sha256), its(_U.size))
    .where(_U.complete)
    .limit(1)
)
_WAITING = select(func.count(), func.coalesce(func.sum(_U.size), 0)).where(
    its(_U.worker_id), ~_handed_in()
)


def add(conn: Connection, row: UploadRow) -> None:
    conn.execute(_ADD, msgspec.structs.asdict(row))


def get(conn: Connection, upload_id: str, worker_id: str) -> UploadRow | None:
    """The upload, if it belongs to this worker."""
    row = conn.execute(_GET, {"its_id": upload_id, "its_worker_id": worker_id}).mappings().first()
    return None if row is None else UploadRow(**row)


def same(conn: Connection, row: UploadRow) -> UploadRow | None:
    """The upload of the same bytes for the same place that was begun before."""
    place = ("task_id", "attempt", "part", "tries", "sha256")
    given = {f"its_{name}": getattr(row, name) for name in place}
    known = conn.execute(_SAME, given).mappings().first()
    return None if known is None else UploadRow(**known)


def finish(conn: Connection, upload_id: str) -> None:
    conn.execute(_FINISH, {"its_id": upload_id})


def is_complete(
    conn: Connection, task_id: int, attempt: int, worker_id: str, sha256: str, size: int
) -> bool:
    """Return True if these bytes arrived for this lease from its holder."""
    given = {"its_task_id": task_id, "its_attempt": attempt, "its_worker_id": worker_id}
    given |= {"its_sha256": sha256, "its_size": size}
    return conn.execute(_COMPLETE, given).first() is not None


def waiting(conn: Connection, worker_id: str) -> tuple[int, int]:
    """Return how many uploads, and how many bytes, of a worker no contribution refers to yet."""
    row = conn.execute(_WAITING, {"its_worker_id": worker_id}).one()
    return int(row[0]), int(row[1])


def arrived(conn: Connection) -> set[str]:
    """Blobs that have arrived and may still be handed in: no orphans, though nothing else refers to
    them.
    """
    query = select(uploads.c.sha256).where(uploads.c.complete, ~_handed_in())
    return set(conn.execute(query).scalars())


def expired(conn: Connection, now: float, limit: int) -> list[str]:
    query = select(uploads.c.id).where(uploads.c.expires_at < now).limit(limit)
    return list(conn.execute(query).scalars())


def remove(conn: Connection, upload_ids: Sequence[str]) -> None:
    if upload_ids:
        conn.execute(delete(uploads).where(uploads.c.id.in_(upload_ids)))
