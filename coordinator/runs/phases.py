"""Phase of a run's plan: decided when a version is made, and stored with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.database import evaluations
from coordinator.database.runs import RunRow
from coordinator.plan.plan import in_phase, phase_index
from coordinator.plan.plan_tables import Plan
from coordinator.runs.definition import definition
from coordinator.runs.version_files import TrainingProgress

if TYPE_CHECKING:
    from sqlalchemy import Connection


def at_head(run: RunRow) -> Plan:
    """Return the plan at the head of a run."""
    return in_phase(definition(run).plan, run.phase)


def following(conn: Connection, run: RunRow, progress: TrainingProgress) -> int:
    """Return the phase of a run's next version, which depends on the losses measured so far."""
    whole = definition(run).plan
    losses: list[float] = []
    if run.phase < len(whole.phases) and whole.phases[run.phase].until_slope is not None:
        window = whole.phases[run.phase].slope_window
        losses = evaluations.losses_in_phase(conn, run.id, run.phase, window)
    return phase_index(whole, progress.version, progress.tokens, losses, run.phase)
