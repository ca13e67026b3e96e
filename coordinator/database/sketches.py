"""Sketches of accepted updates, by which near copies are found; those of old versions go."""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, delete, insert, select

from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.statements import its
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.trust import sketches
from coordinator.rules.similarity import Known

SKETCHES_MAX = 512  # newest updates that another is compared with
SKETCH_VERSIONS = 8  # bases back from the newest whose sketches are kept

_S, _OF_CONTRIBUTION = sketches.c, contributions.c
_KNOWN_SKETCHES = (
    select(_OF_CONTRIBUTION.volunteer_id, _OF_CONTRIBUTION.task_id, _S.base_version, _S.sketch)
    .join(contributions, _OF_CONTRIBUTION.id == _S.contribution_id)
    .where(
        its(_S.run_id),
        _OF_CONTRIBUTION.kind == bindparam("kind"),
        _S.contribution_id != bindparam("id"),
    )
    .order_by(_S.contribution_id.desc())
    .limit(SKETCHES_MAX)
)
_ADD_SKETCH = insert(sketches)
_DROP_SKETCHES = delete(sketches).where(its(_S.run_id), _S.base_version < bindparam("before"))


def known(conn: Connection, row: ContributionRow) -> list[Known]:
    """Return the newest updates of the run that are of the same kind, the newest first."""
    given = {"its_run_id": row.run_id, "kind": row.kind, "id": row.id}
    return [
        Known(volunteer=volunteer, task=task, base_version=base, sketch=sketch)
        for volunteer, task, base, sketch in conn.execute(_KNOWN_SKETCHES, given)
    ]


def keep(conn: Connection, row: ContributionRow, sketch: bytes) -> None:
    """Keep the sketch of an update, and drop those of bases long past."""
    values = {"contribution_id": row.id, "run_id": row.run_id}
    conn.execute(_ADD_SKETCH, values | {"base_version": row.base_version, "sketch": sketch})
    before = row.base_version - SKETCH_VERSIONS
    if before > 0:
        conn.execute(_DROP_SKETCHES, {"its_run_id": row.run_id, "before": before})
