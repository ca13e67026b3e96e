"""Seconds that the machines of a run were present, trained, and trained merged work, by the
hour.
"""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa

from coordinator.database.engine.statements import sums, upsert
from coordinator.database.tables.runs import machine_hours
from coordinator.rules.machine_time import WINDOW_S, MachineSeconds
from shared.units import HOUR_S

_H = machine_hours.c
_SUMS = (
    sa.select(_H.run_id, sa.func.sum(_H.present_s), sa.func.sum(_H.trained_s))
    .add_columns(sa.func.sum(_H.merged_s))
    .where(_H.hour > sa.bindparam("before"))
    .group_by(_H.run_id)
)


def add(conn: sa.Connection, seconds: Mapping[int, MachineSeconds], now: float) -> None:
    """Add seconds, by run, to the present hour."""
    rows = [
        {
            "run_id": run_id,
            "hour": int(now // HOUR_S),
            "present_s": more.present,
            "trained_s": more.trained,
            "merged_s": more.merged,
        }
        for run_id, more in sorted(seconds.items())
    ]
    if rows:
        conn.execute(upsert(conn, machine_hours, sums), rows)


def lately(conn: sa.Connection, now: float) -> dict[int, MachineSeconds]:
    """Return the seconds of the last day, by run."""
    rows = conn.execute(_SUMS, {"before": int((now - WINDOW_S) // HOUR_S)})
    return {
        run_id: MachineSeconds(present=present, trained=trained, merged=merged)
        for run_id, present, trained, merged in rows
    }
