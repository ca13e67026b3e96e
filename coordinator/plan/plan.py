"""Plan of a run: the rules by which contributions become versions, as data.

plan({"preset": "diloco", "quorum": 4})      the complete plan, checked
"""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.plan.plan_checks import check, check_preset
from coordinator.plan.plan_tables import Plan
from coordinator.plan.presets import PRESETS
from shared.errors import InvalidPlan
from shared.settings import read_table


def plan(raw: Mapping[str, object]) -> Plan:
    """Return the complete plan for a `[plan]` table, with the preset's keys and every default.
    Raises InvalidPlan, with the mistake and the remedy.
    """
    preset = check_preset(raw.get("preset", "fedavg"))
    base = {"preset": preset} | PRESETS[preset]
    if "quorum" in raw:
        base.pop("quorum_share", None)  # the preset's share belongs to its own quorum
    if raw.get("table") == "s4":
        base |= {"max_staleness": 200}
    if raw.get("optimizer", base.get("optimizer")) != base.get("optimizer"):
        base.pop("momentum", None)  # the preset's momentum belongs to its own optimiser
    if raw.get("optimizer") == "adamw":
        base.pop("lr", None)
    elif "lr" not in raw:
        for key in ("optimizer", "update"):
            if key in raw and raw[key] != base.get(key):
                raise InvalidPlan(
                    f'the learning rate is missing: the lr of the preset "{preset}" is not '
                    f'meant for {key} = "{raw[key]}"; set lr in [plan], e.g. 1.0 for sgd on '
                    "deltas, 0.7 for nesterov, 0.003 for adam on deltas, 0.001 for adam on gradients"
                )
    checked = read_table(base | dict(raw), Plan, "[plan]", InvalidPlan)
    check(checked)
    return checked
