"""Checks of contributions: what was found, and what it says of the account."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, insert, select, update

from coordinator.database.contributions import ContributionRow
from coordinator.database.engine.statements import its
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.trust import checks
from coordinator.database.volunteers import VolunteerRow
from coordinator.rules import standing
from coordinator.rules.checks import Kind, Result
from shared.decoding import decode
from shared.workloads.base import ForwardFigures

_C = checks.c
_OF = select(_C.result).where(its(_C.contribution_id), its(_C.kind), _C.state == "done")
_NEWEST = (
    select(_C.volunteer_id, _C.measured)
    .where(its(_C.run_id), its(_C.kind), _C.result == "passed")
    .order_by(_C.id.desc())
)
_ADD = insert(checks)
_VETTED = (
    update(contributions)
    .where(its(contributions.c.volunteer_id))
    .where(contributions.c.state.in_(("received", "checking", "accepted")))
    .values(vetted=True)
)
_SET = update(volunteers).where(its(volunteers.c.id))


def result_of(conn: Connection, contribution_id: int, kind: Kind) -> Result | None:
    """Return what a check found; None where there was none."""
    given = {"its_contribution_id": contribution_id, "its_kind": kind}
    found: Result | None = conn.execute(_OF, given).scalar()
    return found


def peers(conn: Connection, run_id: int, limit: int) -> list[ForwardFigures]:
    """Return the figures of the newest forward checks passed, one of each volunteer."""
    rows = conn.execute(_NEWEST.limit(limit), {"its_run_id": run_id, "its_kind": "forward"})
    by: dict[str, str] = {}
    for volunteer, measured in rows:
        by.setdefault(volunteer, measured)
    return [decode(measured, ForwardFigures) for measured in by.values()]


def add_forward(
    conn: Connection,
    row: ContributionRow,
    account: VolunteerRow,
    found: ForwardFigures | None,
    result: Result,
    now: float,
) -> None:
    """Record a forward check and what it moves of the account."""
    conn.execute(
        _ADD,
        {
            "contribution_id": row.id,
            "run_id": row.run_id,
            "volunteer_id": row.volunteer_id,
            "kind": "forward",
            "state": "done",
            "result": result,
            "measured": "{}" if found is None else msgspec.json.encode(found).decode(),
            "chosen_at": now,
            "ended_at": now,
        },
    )
    before = standing.Account(
        state=account.standing, invited=account.invited, passed=account.passed, trust=account.trust
    )
    after = standing.after_check(before, result, "forward")
    streak = account.forward_streak + 1 if result == "passed" else 0
    values = {"standing": after.state, "passed": after.passed, "forward_streak": streak}
    conn.execute(_SET, {"its_id": account.id} | values)
    if after.state == "vetted" != before.state:  # what waits counts as a vetted account's
        conn.execute(_VETTED, {"its_volunteer_id": account.id})
