"""Record: actions of organisers, the coordinator and volunteers, append-only.

Rows name people by id, never by nickname, host or address, and stand for an organiser's reason
about an account by the reason's name, because the rows are hashed and outlive `volunteer forget`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence

import msgspec
from sqlalchemy import Connection, insert, select

from coordinator.database.tables.record import reasons, record_lines

DETAIL_CHARS_MAX = 4000
_NAMED = re.compile(r"reason-[0-9a-f]{16}")
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
    detail: str | Mapping[str, object],
    now: float,
) -> None:
    """Append a line, in the transaction of the action that it records. Long texts are cut."""
    text = detail if isinstance(detail, str) else msgspec.json.encode(detail).decode()
    conn.execute(
        insert(record_lines).values(
            at=now,
            actor=actor[:64],
            action=action[:64],
            subject=subject[:255],
            detail=text[:DETAIL_CHARS_MAX],
        )
    )


def reason(conn: Connection, volunteer_id: str, text: str) -> str:
    """Store an organiser's reason about an account; return its name in the record and ledger."""
    name = f"reason-{secrets.token_hex(8)}"
    conn.execute(insert(reasons).values(name=name, volunteer_id=volunteer_id, text=text))
    return name


def with_reasons(conn: Connection, texts: Sequence[str]) -> list[str]:
    """Replace the names of reasons in texts by the reasons; a forgotten reason keeps its name."""
    names = {name for text in texts for name in _NAMED.findall(text)}
    query = select(reasons.c.name, reasons.c.text).where(reasons.c.name.in_(names))
    text_by_name = {row.name: row.text for row in conn.execute(query)} if names else {}

    def reason_text(match: re.Match[str]) -> str:
        text = text_by_name.get(match[0], match[0])
        return msgspec.json.encode(text).decode()[1:-1] if match.string.startswith("{") else text

    return [_NAMED.sub(reason_text, text) for text in texts]


def entries(conn: Connection, before: int | None = None, limit: int = 100) -> list[RecordLine]:
    """Return lines newest first, older than `before` (the id of the last line seen)."""
    columns = [record_lines.c[name] for name in RecordLine.__struct_fields__]
    query = (
        select(*columns).order_by(record_lines.c.id.desc()).limit(max(1, min(limit, LISTING_MAX)))
    )
    if before is not None:
        query = query.where(record_lines.c.id < before)
    rows = conn.execute(query).mappings().all()
    details = with_reasons(conn, [row["detail"] for row in rows])
    return [RecordLine(**{**row, "detail": text}) for row, text in zip(rows, details, strict=True)]


def about(conn: Connection, subject: str, actions: Collection[str], limit: int) -> list[RecordLine]:
    """Return a subject's lines with these actions, newest first."""
    columns = [record_lines.c[name] for name in RecordLine.__struct_fields__]
    fits = (record_lines.c.subject == subject, record_lines.c.action.in_(actions))
    query = select(*columns).where(*fits).order_by(record_lines.c.id.desc()).limit(limit)
    return [RecordLine(**row) for row in conn.execute(query).mappings()]
