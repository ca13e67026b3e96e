"""Landmarks of a run: milestone versions, and versions that began a phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from coordinator.database import versions
from coordinator.plan.plan import in_phase
from coordinator.runs.definition import definition

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.runs import RunRow
    from coordinator.plan.plan_tables import Plan

MERGED_BY = {
    "sgd": "averaging",
    "nesterov": "Nesterov momentum",
    "delayed-nesterov": "delayed Nesterov momentum",
    "adam": "Adam",
    "yogi": "Yogi",
}


class VersionMilestone(msgspec.Struct, frozen=True, kw_only=True):
    """Version with a round number, and its time."""

    version: int
    at: float


class PhaseStart(msgspec.Struct, frozen=True, kw_only=True):
    """First version of a phase, and its way of merging."""

    phase: int
    version: int
    plan: str


class Landmarks(msgspec.Struct, frozen=True, kw_only=True):
    """Landmarks of one run, oldest first."""

    milestones: tuple[VersionMilestone, ...] = ()
    phases: tuple[PhaseStart, ...] = ()  # empty for a plan without phases


def milestones_until(head: int) -> list[int]:
    """Return the milestones up to a version."""
    tens = [10**power for power in range(len(str(max(1, head))))]
    return [n for ten in tens for n in (ten, 5 * ten) if n <= head]


def landmarks(conn: Connection, run: RunRow) -> Landmarks:
    """Read the landmarks of a run. A phase that began twice, after a rollback, counts once."""
    made = versions.made_at(conn, run.id, milestones_until(run.head))
    whole = definition(run).plan
    began = versions.phase_starts(conn, run.id) if whole.phases else []
    return Landmarks(
        milestones=tuple(VersionMilestone(version=version, at=at) for version, at in made),
        phases=tuple(
            PhaseStart(phase=phase, version=version, plan=described(in_phase(whole, phase)))
            for phase, version in began
        ),
    )


def described(plan: Plan) -> str:
    """Return the way of making and merging updates in a few words."""
    kind = "gradients" if plan.update == "gradient" else "updates"
    steps = f" of {plan.local_steps} local steps" if plan.local_steps else ""
    return f"{kind}{steps}, {MERGED_BY[plan.optimizer]}"
