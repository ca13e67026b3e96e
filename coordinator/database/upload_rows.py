"""Uploads: files that the holder of a lease may send.

The file, not a row, shows how many bytes have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    select,
    update,
)

from coordinator.database.engine.statements import its
from coordinator.database.tables.accounts import volunteers, workers
from coordinator.database.tables.contributions import contributions, uploads
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


def _handed_in() -> ColumnElement[bool]:
    """Return the condition that a contribution of the worker uses an upload, or that the upload was
    requested as evidence. A contribution uses only an upload whose bytes are complete.
    """
    return _named() | uploads.c.evidence_of.is_not(None)


def _named() -> ColumnElement[bool]:
    c = contributions.c
    named = exists().where(c.sha256 == uploads.c.sha256, c.worker_id == uploads.c.worker_id)
    return uploads.c.complete & named


_U = uploads.c
_ADD = insert(uploads)
_GET = select(uploads).where(its(_U.id), its(_U.worker_id))
_SAME = select(uploads).where(
    its(_U.task_id), its(_U.attempt), its(_U.part), its(_U.tries), its(_U.sha256)
)
_FINISH = update(uploads).where(its(_U.id)).values(complete=True)
_UNVETTED = (
    select(func.coalesce(func.sum(_U.size), 0))
    .join_from(uploads, workers, workers.c.id == _U.worker_id)
    .join(volunteers, volunteers.c.id == workers.c.volunteer_id)
    .where(volunteers.c.standing != "vetted", ~_named())
)
_PLACE = (
    select(func.count())
    .where(its(_U.task_id), its(_U.attempt), its(_U.part), its(_U.tries))
    .where(_U.evidence_of.is_(None))
)
_STANDING = select(volunteers.c.standing).where(its(volunteers.c.id))
_USE = (
    select(
        func.count().label("uploads"),
        func.coalesce(func.sum(_U.size), 0).label("bytes"),
        _PLACE.scalar_subquery().label("in_place"),
        _STANDING.scalar_subquery().label("standing"),
    )
    .join_from(uploads, workers, workers.c.id == _U.worker_id)
    .where(its(workers.c.volunteer_id), ~_handed_in())
)
_HELD = (tasks.c.state == "doing") | and_(tasks.c.state == "todo", tasks.c.returned)
_ABANDONED = (
    select(_U.id)
    .join_from(uploads, tasks, tasks.c.id == _U.task_id)
    .where(_U.created_at < bindparam("before"), ~_handed_in())
    .where((tasks.c.attempt != _U.attempt) | ~_HELD)
    .limit(bindparam("most"))
)


def add(conn: Connection, row: UploadRow) -> None:
    conn.execute(_ADD, msgspec.structs.asdict(row))


def get(conn: Connection, upload_id: str, worker_id: str) -> UploadRow | None:
    """Return the upload, if it belongs to this worker."""
    row = conn.execute(_GET, {"its_id": upload_id, "its_worker_id": worker_id}).mappings().first()
    return None if row is None else UploadRow(**row)


def same(conn: Connection, row: UploadRow) -> UploadRow | None:
    """Return an earlier upload of the same bytes for the same try of the same part."""
    place = ("task_id", "attempt", "part", "tries", "sha256")
    given = {f"its_{name}": getattr(row, name) for name in place}
    known = conn.execute(_SAME, given).mappings().first()
    return None if known is None else UploadRow(**known)


def finish(conn: Connection, upload_id: str) -> None:
    conn.execute(_FINISH, {"its_id": upload_id})


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """A volunteer's use of its quota."""

    count: int  # uploads without a contribution yet; `bytes` is their size
    bytes: int
    in_place: int  # uploads for the same part of a lease
    vetted: bool


def use(conn: Connection, volunteer_id: str, row: UploadRow) -> Use:
    """Return a volunteer's use of its quota, before another upload is added."""
    given = {f"its_{name}": getattr(row, name) for name in ("task_id", "attempt", "part", "tries")}
    given |= {"its_volunteer_id": volunteer_id, "its_id": volunteer_id}
    found = conn.execute(_USE, given).one()
    return Use(
        count=int(found.uploads),
        bytes=int(found.bytes),
        in_place=int(found.in_place),
        vetted=found.standing == "vetted",
    )


def waiting_unvetted(conn: Connection) -> int:
    """Return the bytes of unvetted volunteers' evidence and unsubmitted uploads."""
    return int(conn.execute(_UNVETTED).scalar_one())


def abandoned(conn: Connection, before: float, limit: int) -> list[str]:
    """Return uploads begun before a time whose lease ended without a submission."""
    return list(conn.execute(_ABANDONED, {"before": before, "most": limit}).scalars())


def arrived(conn: Connection) -> set[str]:
    """Return the complete uploads that may still be submitted, or are evidence: no contribution
    refers to them, but they must stay.
    """
    open_ = uploads.c.evidence_of.is_not(None) | ~_handed_in()
    query = select(uploads.c.sha256).where(uploads.c.complete, open_)
    return set(conn.execute(query).scalars())


def expired(conn: Connection, now: float, limit: int) -> list[str]:
    query = select(uploads.c.id).where(uploads.c.expires_at < now).limit(limit)
    return list(conn.execute(query).scalars())


def remove(conn: Connection, upload_ids: Sequence[str]) -> None:
    if upload_ids:
        conn.execute(delete(uploads).where(uploads.c.id.in_(upload_ids)))
