"""Heartbeats: leases that are renewed and workers that are marked alive, many rows a statement."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import msgspec
from sqlalchemy import (
    CTE,
    BigInteger,
    ClauseElement,
    Connection,
    Double,
    Integer,
    String,
    case,
    select,
    update,
)

from coordinator.database.engine.bulk_statements import BulkStatement
from coordinator.database.tables.accounts import workers
from coordinator.database.tables.tasks import tasks
from coordinator.database.tasks import TaskRow, in_order, rows_of


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """Renewal of a lease until `renew_by`; the `extra_s` seconds of a pause are added to its
    `finish_by`.
    """

    task: int
    attempt: int
    renew_by: float
    extra_s: float


class LifeSign(msgspec.Struct, frozen=True, kw_only=True):
    """Sign of life of a worker: a heartbeat, or another request, which carries no state ("") and no
    readings.
    """

    worker_id: str
    at: float
    state: str = ""
    rate: float | None = None  # steps a second
    celsius: float | None = None


def _renewed(beat: CTE) -> ClauseElement:
    later = tasks.c.finish_by + beat.c.extra_s
    of_beat = tasks.c.id == beat.c.id
    live = in_order(
        of_beat,
        tasks.c.attempt == beat.c.attempt,
        tasks.c.state == "doing",
        tasks.c.renew_by.is_not(None),  # None: the task waits for its verdict
    )
    return (
        update(tasks)
        .where(of_beat, live)
        .values(
            renew_by=case(
                (beat.c.renew_by > tasks.c.renew_by, beat.c.renew_by), else_=tasks.c.renew_by
            ),
            finish_by=case((later < tasks.c.finish_limit, later), else_=tasks.c.finish_limit),
        )
        .returning(*tasks.c)
    )


_RENEW = BulkStatement(
    "beat",
    {"id": BigInteger(), "attempt": Integer(), "renew_by": Double(), "extra_s": Double()},
    _renewed,
    blank=(-1, 0, 0.0, 0.0),
)


def renew(conn: Connection, renewals: Sequence[Renewal]) -> list[TaskRow]:
    """Renew the leases that are still held; return their tasks."""
    if not renewals:
        return []
    lines = [(r.task, r.attempt, r.renew_by, r.extra_s) for r in renewals]
    return rows_of(_RENEW.execute(conn, lines))


def _seen(sign: CTE) -> ClauseElement:
    reported = {
        name: case((sign.c.state == "", workers.c[name]), else_=sign.c[name]) for name in _REPORTED
    }
    living = update(workers).where(workers.c.id == sign.c.id, workers.c.state != "left")
    return living.values(last_seen_at=sign.c.at, **reported)


_REPORTED = {"state": String(), "rate": Double(), "celsius": Double()}
_SEEN = BulkStatement(
    "sign",
    {"id": String(), "at": Double(), **_REPORTED},
    _seen,
    blank=("", 0.0, "", None, None),
)


def seen(conn: Connection, signs: Sequence[LifeSign]) -> None:
    """Store time, state and readings of workers. A worker that has signed off is not changed."""
    if signs:
        lines = [msgspec.structs.astuple(sign) for sign in signs]
        _SEEN.execute(conn, sorted(lines, key=itemgetter(0)))


def held_by(conn: Connection, worker_id: str, ids: Sequence[int]) -> list[TaskRow]:
    """Return the given tasks that this worker holds or was the last to hold."""
    query = select(tasks).where(tasks.c.id.in_(ids), tasks.c.worker_id == worker_id)
    return rows_of(conn.execute(query))


def all_held(conn: Connection) -> set[tuple[int, int]]:
    """Return the id and the attempt of every task in `doing`."""
    query = select(tasks.c.id, tasks.c.attempt).where(tasks.c.state == "doing")
    return {(row.id, row.attempt) for row in conn.execute(query)}
