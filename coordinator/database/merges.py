"""Merges: leased jobs that each make a version; a process that lost its merge cannot commit."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, insert, or_, select

from coordinator.database.engine.leased_jobs import LeasedJobs
from coordinator.database.engine.statements import equals
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

    def is_leased_to_other(self, owner: str, now: float) -> bool:
        """Return True if an owner other than `owner` holds the lease of this merge."""
        return self.state == "leased" and self.lease_until > now and self.owner != owner


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
_MERGE = select(merges).where(equals(_M.run_id), equals(_M.base), equals(_M.shard))
_ADD_MERGE = insert(merges).returning(*_M)
JOBS = LeasedJobs(merges, MergeRow, free="abandoned", leased="leased")


def begin(conn: Connection, bid: Bid, now: float) -> MergeRow:
    """Insert and lease a merge. The caller has locked the run, and the merge has not begun."""
    blank = {"state": "leased", "attempt": 1, "failures": 0, "message": "", "created_at": now}
    row = conn.execute(_ADD_MERGE, msgspec.structs.asdict(bid) | blank).mappings().one()
    return MergeRow(**row)


def take_over(conn: Connection, merge: MergeRow, bid: Bid, now: float) -> MergeRow | None:
    """Lease a merge that failed, whose lease ran out, or that the bidder leases already; None if it
    is committed or another process has it.
    """
    free = or_(_M.state != "leased", _M.lease_until <= now, _M.owner == bid.owner)
    candidates = select(merges).where(_M.id == merge.id, _M.state != "committed", free)
    terms = {"contributions": bid.contributions, "terms": bid.terms, "ended_at": None}
    return JOBS.take(conn, candidates, bid.owner, bid.lease_until, **terms)


def of_base(conn: Connection, run_id: int, base: int) -> MergeRow | None:
    """Return the merge from a version to the next, in any state; None before it begins."""
    key = {"where_run_id": run_id, "where_base": base, "where_shard": 0}
    row = conn.execute(_MERGE, key).mappings().first()
    return None if row is None else MergeRow(**row)


def by_id(conn: Connection, merge_id: int) -> MergeRow:
    """Return an existing merge."""
    return MergeRow(**conn.execute(select(merges).where(merges.c.id == merge_id)).mappings().one())


def end(conn: Connection, merge: MergeRow, state: str, now: float, **values: object) -> bool:
    """End a merge that this process still leases; return False if another process took it over."""
    return JOBS.change(conn, merge, state=state, ended_at=now, **values)
