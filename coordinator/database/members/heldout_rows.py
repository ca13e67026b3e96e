"""Losses of versions on the held-out data of members, as sums of each machine."""

from __future__ import annotations

from collections import defaultdict

import sqlalchemy as sa

from coordinator.database.engine.statements import equals, replacement, upsert
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.versions import evaluations, heldout_sums
from coordinator.database.volunteers import takes_part
from shared.protocol.members import HeldoutSums

LATELY = 256  # newest versions whose losses are read

_H, _E = heldout_sums.c, evaluations.c


def store(conn: sa.Connection, run_id: int, owner: tuple[str, str], sums: HeldoutSums) -> None:
    """Store the sums of a machine, which replace older ones of the same version; `owner` is the
    volunteer and the machine.
    """
    volunteer_id, worker_id = owner
    row = {
        "run_id": run_id,
        "version": sums.version,
        "worker_id": worker_id,
        "volunteer_id": volunteer_id,
        "loss_sum": sums.loss_sum,
        "items": sums.items,
    }
    conn.execute(upsert(conn, heldout_sums, replacement), [row])


_KEPT = (
    sa.select(_E.version)
    .where(equals(_E.run_id), ~_E.pruned)
    .order_by(_E.version.desc())
    .limit(LATELY)
)
_SUMS = (
    sa.select(_H.version, _H.volunteer_id, sa.func.sum(_H.loss_sum), sa.func.sum(_H["items"]))
    .join_from(heldout_sums, volunteers, volunteers.c.id == _H.volunteer_id)
    .where(equals(_H.run_id), _H.version.in_(_KEPT), takes_part())
    .group_by(_H.version, _H.volunteer_id)
    .order_by(_H.version, _H.volunteer_id)
)


def losses(conn: sa.Connection, run_id: int) -> dict[int, tuple[float, ...]]:
    """Return the mean losses of members by version, oldest version first: one loss for each member
    that takes part, over its machines. Only the newest versions that still have their files count.
    """
    by_version: defaultdict[int, list[float]] = defaultdict(list)
    for version, _, loss_sum, items in conn.execute(_SUMS, {"where_run_id": run_id}):
        by_version[version].append(float(loss_sum) / float(items))
    return {version: tuple(means) for version, means in by_version.items()}
