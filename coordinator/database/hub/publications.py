"""Publications on a model hub: what the server is to publish by itself, and how that went."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from sqlalchemy import Connection, delete, func, insert, select, update

from coordinator.database.runs import RunRow
from coordinator.database.tables.runs import publications, runs
from coordinator.database.tables.versions import evaluations

Mode = Literal["every", "best", "off"]


class PublicationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `publications`; see the table."""

    run_id: int
    mode: Mode
    every: int
    repository: str
    format: str
    version: int | None
    published_at: float | None
    url: str
    failures: int
    error: str
    next_at: float


_P, _E = publications.c, evaluations.c


def of(conn: Connection, run_id: int) -> PublicationRow | None:
    """Return what is published of a run, if that was ever asked for."""
    row = conn.execute(select(publications).where(_P.run_id == run_id)).mappings().first()
    return None if row is None else PublicationRow(**row)


def to_change(conn: Connection, run_id: int) -> PublicationRow | None:
    """As `of`, and whoever else would change it waits for the end of the transaction."""
    conn.execute(select(runs.c.id).where(runs.c.id == run_id).with_for_update())
    return of(conn, run_id)


def store(conn: Connection, row: PublicationRow) -> None:
    """Write a row in place of the one that is there."""
    conn.execute(delete(publications).where(_P.run_id == row.run_id))
    conn.execute(insert(publications).values(**msgspec.structs.asdict(row)))


def waiting(conn: Connection, now: float) -> list[PublicationRow]:
    """Rows that may be tried, the one that waits longest first."""
    query = select(publications).where(_P.mode != "off", _P.next_at <= now).order_by(_P.next_at)
    return [PublicationRow(**row) for row in conn.execute(query).mappings()]


def due(conn: Connection, row: PublicationRow, run: RunRow) -> int | None:
    """The version that is to be published now; None: nothing new."""
    if row.mode == "best":
        return run.best if run.best and run.best != row.version else None
    newest = conn.execute(
        select(func.max(_E.version)).where(
            _E.run_id == run.id, _E.state.in_(("done", "failed")), ~_E.pruned
        )
    ).scalar_one()
    step = 1 if run.state in ("completed", "failed") else row.every  # the last one of all, too
    return newest if newest is not None and newest >= (row.version or 0) + step else None


def take(conn: Connection, row: PublicationRow, until: float) -> bool:
    """Lease a row to whoever publishes; False when it changed since it was read."""
    mine = (_P.run_id == row.run_id) & (_P.next_at == row.next_at) & (_P.mode == row.mode)
    return conn.execute(update(publications).where(mine).values(next_at=until)).rowcount == 1


def report(conn: Connection, row: PublicationRow, **values: Any) -> None:
    """Say how it went, unless it is to go elsewhere or otherwise since."""
    same = (_P.repository == row.repository) & (_P.format == row.format) & (_P.mode != "off")
    conn.execute(update(publications).where(_P.run_id == row.run_id, same).values(**values))
