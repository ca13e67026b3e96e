"""Forward checks of contributions: what was found, and what it says of the account."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, select, update

from coordinator.database import volunteers as store
from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.statements import its
from coordinator.database.ledger.postings import insert_new
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.trust import checks
from coordinator.rules import standing
from coordinator.rules.checks import Result
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
_SET = update(volunteers).where(its(volunteers.c.id))


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
        state=account.standing, invited=account.invited, passed=account.passed, trust=account.trust
    )
    after = standing.after_check(before, result, "forward")
    streak = account.forward_streak + 1 if result == "passed" else 0
    conn.execute(_SET, {"its_id": account.id, "passed": after.passed, "forward_streak": streak})
    if after.state == "vetted" != before.state:
        store.vet(conn, account.id)
    return result
