"""Forward checks of contributions: what was found, and what it says of the account; sketches of
updates, those of old versions dropped.
"""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, bindparam, delete, insert, select

from coordinator.database import volunteers as store
from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.statements import its
from coordinator.database.ledger.postings import insert_new
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.trust import checks, sketches
from coordinator.rules import standing
from coordinator.rules.checks import Result
from coordinator.rules.similarity import Known
from shared.decoding import decode
from shared.workloads.base import ForwardFigures

_C = checks.c
_OF = select(_C.result).where(its(_C.contribution_id))
_NEWEST = (
    select(_C.volunteer_id, _C.measured)
    .join(volunteers, volunteers.c.id == _C.volunteer_id)
    .where(its(_C.run_id), _C.result == "passed", volunteers.c.standing == "vetted")
    .order_by(_C.id.desc())
)


def result_of(conn: Connection, contribution_id: int) -> Result | None:
    """Return what the check of a contribution found; None where there was none."""
    found: Result | None = conn.execute(_OF, {"its_contribution_id": contribution_id}).scalar()
    return found


def peers(conn: Connection, run_id: int, limit: int) -> list[ForwardFigures]:
    """Return the figures of the newest checks that vetted volunteers passed, one of each: who sets
    the measure for others has been measured.
    """
    by: dict[str, str] = {}
    for volunteer, measured in conn.execute(_NEWEST.limit(limit), {"its_run_id": run_id}):
        by.setdefault(volunteer, measured)
    return [decode(measured, ForwardFigures) for measured in by.values()]


def add(
    conn: Connection, row: ContributionRow, found: ForwardFigures, result: Result, now: float
) -> Result:
    """Record a check and what it moves of the account; the result that stands, which is another
    replica's where that was faster.
    """
    values = {
        "contribution_id": row.id,
        "run_id": row.run_id,
        "volunteer_id": row.volunteer_id,
        "result": result,
        "measured": msgspec.json.encode(found).decode(),
        "at": now,
    }
    new = insert_new(conn, checks, "contribution_id").values(**values).returning(_C.id)
    if conn.execute(new).first() is None:
        return result_of(conn, row.id) or result
    account = store.locked(conn, row.volunteer_id)
    before = standing.Account(
        state=account.standing,
        invited=account.invited,
        passed=account.passed,
        trust=account.trust,
        unproven=account.unproven,
    )
    after = standing.after_check(before, result, "forward")
    streak = account.forward_streak + 1 if result == "passed" else 0
    counters = {"passed": after.passed, "forward_streak": streak}
    if result == "passed":
        counters["uncompared"] = 0
    store.set_volunteer(conn, account.id, **counters)
    if after.state == "vetted" != before.state:
        store.vet(conn, account.id)
    return result


# --- sketches, by which near copies are found ---

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


def known_sketches(conn: Connection, row: ContributionRow) -> list[Known]:
    """Return the newest updates of the run that are of the same kind, the newest first."""
    given = {"its_run_id": row.run_id, "kind": row.kind, "id": row.id}
    return [
        Known(volunteer=volunteer, task=task, base_version=base, sketch=sketch)
        for volunteer, task, base, sketch in conn.execute(_KNOWN_SKETCHES, given)
    ]


def keep_sketch(conn: Connection, row: ContributionRow, sketch: bytes) -> None:
    """Keep the sketch of an update, and drop those of bases long past."""
    values = {"contribution_id": row.id, "run_id": row.run_id}
    conn.execute(_ADD_SKETCH, values | {"base_version": row.base_version, "sketch": sketch})
    before = row.base_version - SKETCH_VERSIONS
    if before > 0:
        conn.execute(_DROP_SKETCHES, {"its_run_id": row.run_id, "before": before})
