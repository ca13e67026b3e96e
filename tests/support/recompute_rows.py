"""Recomputes as a server takes them."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection

from coordinator.database import recomputes
from coordinator.database.recomputes import Holder, RecomputeRow


def first(
    conn: Connection,
    now: float,
    served: Collection[str] = (),
    under_way: RecomputeRow | None = None,
) -> RecomputeRow | None:
    """The next recompute of a server that gives it back at once."""
    row = recomputes.take(conn, Holder(owner="a", now=now, until=now + 15.0), served, under_way)
    if row is not None:
        assert recomputes.JOBS.release(conn, row)
    return row
