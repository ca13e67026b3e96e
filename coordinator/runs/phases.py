"""Phases of a run's plan: decided when a version is made, and stored with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from coordinator.database import evaluations, versions
from coordinator.database.runs import RunRow
from coordinator.plan.plan import in_phase, phase_index
from coordinator.plan.plan_tables import Plan
from coordinator.runs.definition import definition
from coordinator.runs.version_files import TrainingProgress

if TYPE_CHECKING:
    from sqlalchemy import Connection

MERGED_BY = {
    "sgd": "averaging",
    "nesterov": "Nesterov momentum",
    "delayed-nesterov": "delayed Nesterov momentum",
    "adam": "Adam",
    "yogi": "Yogi",
}


class PhaseStart(msgspec.Struct, frozen=True, kw_only=True):
    """First version of a phase, and its way of merging."""

    phase: int
    version: int
    plan: str


def at_head(run: RunRow) -> Plan:
    """Return the plan at the head of a run."""
    return in_phase(definition(run).plan, run.phase)


def following(conn: Connection, run: RunRow, progress: TrainingProgress) -> int:
    """Return the phase of a run's next version, by its progress and the losses measured so far."""
    whole = definition(run).plan
    losses: list[float] = []
    if run.phase < len(whole.phases) and whole.phases[run.phase].until_slope is not None:
        window = whole.phases[run.phase].slope_window
        losses = evaluations.losses_in_phase(conn, run.id, run.phase, window)
    return phase_index(whole, progress.version, progress.tokens, losses, run.phase)


def starts(conn: Connection, run: RunRow) -> tuple[PhaseStart, ...]:
    """Return the begun phases of a run, oldest first; empty for a plan without phases. A phase that
    began twice, after a rollback, counts once.
    """
    whole = definition(run).plan
    began = versions.phase_starts(conn, run.id) if whole.phases else []
    return tuple(
        PhaseStart(phase=phase, version=version, plan=described(in_phase(whole, phase)))
        for phase, version in began
    )


def described(plan: Plan) -> str:
    """Return the way of making and merging updates in a few words."""
    kind = "gradients" if plan.update == "gradient" else "updates"
    steps = f" of {plan.local_steps} local steps" if plan.local_steps else ""
    return f"{kind}{steps}, {MERGED_BY[plan.optimizer]}"
