"""Uploads: what a lease may send, and what has arrived. How many bytes are there is told by the file, not by a row."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import ColumnElement, Connection, delete, exists, func, insert, select, update

from coordinator.store.tables import contributions, uploads


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


def add(conn: Connection, row: UploadRow) -> None:
    conn.execute(insert(uploads).values(**msgspec.structs.asdict(row)))


def get(conn: Connection, upload_id: str, worker_id: str) -> UploadRow | None:
    """The upload, if it belongs to this worker."""
    query = select(uploads).where(uploads.c.id == upload_id, uploads.c.worker_id == worker_id)
    row = conn.execute(query).mappings().first()
    return None if row is None else UploadRow(**row)


def same(conn: Connection, row: UploadRow) -> UploadRow | None:
    """The upload of the same bytes for the same place that was begun before."""
    u = uploads.c
    found = conn.execute(
        select(uploads).where(
            u.task_id == row.task_id,
            u.attempt == row.attempt,
            u.part == row.part,
            u.tries == row.tries,
            u.sha256 == row.sha256,
        )
    )
    known = found.mappings().first()
    return None if known is None else UploadRow(**known)


def finish(conn: Connection, upload_id: str) -> None:
    conn.execute(update(uploads).where(uploads.c.id == upload_id).values(complete=True))


def is_complete(
    conn: Connection, task_id: int, attempt: int, worker_id: str, sha256: str, size: int
) -> bool:
    """Whether these bytes arrived for this lease from its holder."""
    u = uploads.c
    query = select(u.id).where(
        u.task_id == task_id,
        u.attempt == attempt,
        u.worker_id == worker_id,
        u.sha256 == sha256,
        u.size == size,
        u.complete,
    )
    return conn.execute(query.limit(1)).first() is not None


def waiting(conn: Connection, worker_id: str) -> tuple[int, int]:
    """How many uploads, and how many bytes, of a worker no contribution refers to yet."""
    query = select(func.count(), func.coalesce(func.sum(uploads.c.size), 0))
    row = conn.execute(query.where(uploads.c.worker_id == worker_id, ~_handed_in())).one()
    return int(row[0]), int(row[1])


def _handed_in() -> ColumnElement[bool]:
    """Whether a contribution of the worker refers to an upload."""
    c = contributions.c
    return exists().where(c.sha256 == uploads.c.sha256, c.worker_id == uploads.c.worker_id)


def arrived(conn: Connection) -> set[str]:
    """Blobs that have arrived and may still be handed in: no orphans, though nothing else refers to them."""
    query = select(uploads.c.sha256).where(uploads.c.complete, ~_handed_in())
    return set(conn.execute(query).scalars())


def expired(conn: Connection, now: float, limit: int) -> list[str]:
    query = select(uploads.c.id).where(uploads.c.expires_at < now).limit(limit)
    return list(conn.execute(query).scalars())


def remove(conn: Connection, upload_ids: Sequence[str]) -> None:
    if upload_ids:
        conn.execute(delete(uploads).where(uploads.c.id.in_(upload_ids)))
