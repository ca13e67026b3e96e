"""Record: actions of organisers, the coordinator and volunteers, append-only.

Rows name people by id, never by nickname, host or address, because they outlive `volunteer forget`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from sqlalchemy import Connection, insert, select

from coordinator.database.tables.record import record_lines

DETAIL_CHARS_MAX = 4000
LISTING_MAX = 500


class RecordLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the record."""

    id: int
    at: float
    actor: str  # "organiser", "coordinator", "system", "volunteer" or a volunteer's id
    action: str  # e.g. "volunteer.ban"
    subject: str  # an id, or the name of a run, a dataset, a setting or a checker
    detail: str  # a sentence or JSON


def append(
    conn: Connection,
    actor: str,
    action: str,
    subject: str,
    detail: str | Mapping[str, Any],
    now: float,
) -> None:
    """Append a line, in the transaction of the action that it records. Long texts are cut."""
    said = detail if isinstance(detail, str) else msgspec.json.encode(detail).decode()
    conn.execute(
        insert(record_lines).values(
            at=now,
            actor=actor[:64],
            action=action[:64],
            subject=subject[:255],
            detail=said[:DETAIL_CHARS_MAX],
        )
    )


def entries(conn: Connection, before: int | None = None, limit: int = 100) -> list[RecordLine]:
    """Return lines newest first, older than `before` (the id of the last line seen)."""
    columns = [record_lines.c[name] for name in RecordLine.__struct_fields__]
    query = (
        select(*columns).order_by(record_lines.c.id.desc()).limit(max(1, min(limit, LISTING_MAX)))
    )
    if before is not None:
        query = query.where(record_lines.c.id < before)
    return [RecordLine(**row) for row in conn.execute(query).mappings()]


def about(conn: Connection, subject: str, actions: Collection[str], limit: int) -> list[RecordLine]:
    """Return a subject's lines with these actions, newest first."""
    columns = [record_lines.c[name] for name in RecordLine.__struct_fields__]
    fits = (record_lines.c.subject == subject, record_lines.c.action.in_(actions))
    query = select(*columns).where(*fits).order_by(record_lines.c.id.desc()).limit(limit)
    return [RecordLine(**row) for row in conn.execute(query).mappings()]
