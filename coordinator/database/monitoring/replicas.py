"""Serving processes: each writes a beat with its figures, and deletes its row when it stops."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, bindparam, func, select, update

from coordinator.database.engine.statements import deletion, equals, insert_new
from coordinator.database.tables.replicas import replicas
from coordinator.rules.overview import ReplicaFigures, ReplicaLine
from shared.decoding import decode
from shared.units import DAY_S

FORGOTTEN_S = DAY_S  # a replica silent for this long is deleted
LISTING_MAX = 50

_R = replicas.c
_BEAT = update(replicas).where(equals(_R.id))
_EXPIRED = deletion(replicas, "expired").where(_R.beat_at < bindparam("before"))
_ALL = select(_R.id, _R.started_at, _R.beat_at, _R.figures).order_by(_R.beat_at.desc())


def begin(conn: Connection, replica_id: str, place: str, now: float) -> None:
    """Register a serving process; it replaces the former process of the same machine and folder."""
    conn.execute(deletion(replicas, "replaced").where(_R.place == place))
    row = {"id": replica_id, "place": place, "started_at": now, "beat_at": now, "figures": "{}"}
    conn.execute(insert_new(conn, replicas, "id").values(**row))


def beat(conn: Connection, replica_id: str, figures: ReplicaFigures, now: float) -> bool:
    """Store a beat, and delete the processes that were silent for a day.

    Return False if the row is gone: another process replaced it, or deleted it for silence.
    """
    forget(conn, now - FORGOTTEN_S)
    text = msgspec.json.encode(figures).decode()
    values = {"where_id": replica_id, "beat_at": now, "figures": text}
    return conn.execute(_BEAT, values).rowcount == 1


def forget(conn: Connection, before: float) -> None:
    """Delete the processes whose last beat was before an instant."""
    conn.execute(_EXPIRED, {"before": before})


def alive(conn: Connection, since: float) -> int:
    """Return how many serving processes sent a beat since an instant, at least one."""
    counted = select(func.count()).select_from(replicas).where(_R.beat_at >= since)
    return max(1, int(conn.execute(counted).scalar_one()))


def end(conn: Connection, replica_id: str) -> None:
    """Delete the row of a process that stops on purpose."""
    conn.execute(deletion(replicas, "ended").where(_R.id == replica_id))


def listing(conn: Connection) -> tuple[ReplicaLine, ...]:
    """Return the serving processes, newest beat first."""
    return tuple(
        ReplicaLine(
            id=row.id,
            started_at=row.started_at,
            beat_at=row.beat_at,
            figures=decode(row.figures, ReplicaFigures),
        )
        for row in conn.execute(_ALL.limit(LISTING_MAX))
    )
