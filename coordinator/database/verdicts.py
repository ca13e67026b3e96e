"""Verdicts as news: whether there is anything new at all."""

from __future__ import annotations

from sqlalchemy import Connection, select

from coordinator.database.tables.contributions import verdicts


def newest(conn: Connection) -> tuple[int, float]:
    """Number and instant of the newest verdict of anybody; (0, 0.0) when there is none."""
    query = select(verdicts.c.id, verdicts.c.at).order_by(verdicts.c.id.desc()).limit(1)
    row = conn.execute(query).first()
    return (0, 0.0) if row is None else (int(row[0]), float(row[1]))
