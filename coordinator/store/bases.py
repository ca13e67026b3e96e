"""The base of work that began before its worker could ask: told late, in a transaction of the caller."""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, select, update

from coordinator.store import tasks
from coordinator.store.prepared import its
from coordinator.store.tables import tasks as table
from coordinator.store.tables import versions
from coordinator.store.tasks import Begun

_TOLD = update(table).where(its(table.c.id))
_TOLD = _TOLD.values(base_version=bindparam("told"), begun_at=table.c.claimed_at)
_TAKEN_BACK = (
    select(versions.c.version)
    .where(its(versions.c.run_id), versions.c.version > bindparam("base"))
    .where(versions.c.kind == "rollback")
    .limit(1)
)


def tell(
    conn: Connection, task_id: int, worker_id: str, attempt: int, base: int, now: float
) -> Begun:
    """Bind this version, perhaps after the lease ran out. When work began nobody knows better than: after the claim.

    Raises NotFound, Gone, Cancelled.
    """
    row = tasks.holder(conn, task_id)
    tasks.may_submit(row, worker_id, attempt)
    if row.base_version != base:
        if row.begun_at is None and not row.returned:
            tasks.begin(
                conn, task_id, worker_id, attempt, now
            )  # from here on it has its whole time
        conn.execute(_TOLD, {"its_id": task_id, "told": base})
    return tasks.begin(conn, task_id, worker_id, attempt, now)


def taken_back(conn: Connection, run_id: int, base: int) -> bool:
    """Whether the run was rolled back since a version, which may be one of those that this took back."""
    return conn.execute(_TAKEN_BACK, {"its_run_id": run_id, "base": base}).first() is not None
