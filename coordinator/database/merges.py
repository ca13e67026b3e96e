"""Merges: leased jobs that each make a version; a slow owner cannot commit."""

from __future__ import annotations

import msgspec
from sqlalchemy import (
    Connection,
    insert,
    select,
    update,
)

from coordinator.database.engine.leased_jobs import LeasedJobs
from coordinator.database.engine.statements import its
from coordinator.database.tables.merges import merges


class MergeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `merges`."""

    id: int
    run_id: int
    base: int
    shard: int
    state: str
    contributions: str
    owner: str
    attempt: int
    lease_until: float
    failures: int
    message: str
    terms: str
    created_at: float
    ended_at: float | None

    def is_led(self, beside: str, now: float) -> bool:
        """Return True if another process than `beside` makes this merge now."""
        return self.state == "leased" and self.lease_until > now and self.owner != beside


class Bid(msgspec.Struct, frozen=True, kw_only=True):
    """Request for the lease of a merge."""

    run_id: int
    base: int
    shard: int = 0
    contributions: str  # JSON list of ids
    terms: str = "{}"  # JSON of the other terms that were fixed when the merge began
    owner: str
    lease_until: float


_M = merges.c
_MERGE = select(merges).where(its(_M.run_id), its(_M.base), its(_M.shard))
_MERGE_LOCKED = _MERGE.with_for_update()
_ADD_MERGE = insert(merges).returning(*_M)
_TAKE_OVER = update(merges).where(its(_M.run_id), its(_M.base), its(_M.shard)).returning(*_M)
JOBS = LeasedJobs(merges, MergeRow, free="abandoned", leased="leased")


def take(conn: Connection, bid: Bid, now: float, *, fresh: bool = False) -> MergeRow | None:
    """Lease the merge of `base`, also one that failed or whose lease ran out; None if it is
    committed or another process has it.

    `fresh`: the caller has locked the run and seen that the merge has not begun.
    """
    key = {"its_run_id": bid.run_id, "its_base": bid.base, "its_shard": bid.shard}
    row = None if fresh else conn.execute(_MERGE_LOCKED, key).mappings().first()
    values = msgspec.structs.asdict(bid) | {"state": "leased", "ended_at": None}
    if row is None:
        initial = {"attempt": 1, "failures": 0, "message": "", "created_at": now}
        return MergeRow(**conn.execute(_ADD_MERGE, initial | values).mappings().one())
    if row["state"] == "committed" or MergeRow(**row).is_led(bid.owner, now):
        return None
    takeover = {"attempt": row["attempt"] + 1} | values
    return MergeRow(**conn.execute(_TAKE_OVER, key | takeover).mappings().one())


def of_base(conn: Connection, run_id: int, base: int) -> MergeRow | None:
    """Return the merge from a version to the next, in any state; None before it begins."""
    key = {"its_run_id": run_id, "its_base": base, "its_shard": 0}
    row = conn.execute(_MERGE, key).mappings().first()
    return None if row is None else MergeRow(**row)


def by_id(conn: Connection, merge_id: int) -> MergeRow:
    """Return an existing merge."""
    return MergeRow(**conn.execute(select(merges).where(merges.c.id == merge_id)).mappings().one())


def end(conn: Connection, merge: MergeRow, state: str, now: float, **values: object) -> bool:
    """End a merge that this process still leases; return False if another process took it over."""
    return JOBS.change(conn, merge, state=state, ended_at=now, **values)


def abandon(conn: Connection, now: float) -> None:
    """Abandon every leased merge. Only for a server that is alone on the database."""
    JOBS.end_all(conn, state="abandoned", ended_at=now)
