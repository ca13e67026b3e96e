"""Plan of a run: the rules by which contributions become versions, as data.

plan({"preset": "diloco", "quorum": 4})      the complete plan, checked
ready(plan, pending)                         readiness for a merge
weigh(plan, terms, live_workers)             the weight of each contribution
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from coordinator.plan.plan_checks import check, check_preset
from coordinator.plan.plan_tables import Plan
from coordinator.plan.presets import PRESETS
from shared.errors import InvalidPlan
from shared.settings import read_table

ROUND = 1.25  # length of a round with transfers and waits, as a multiple of its longest training
EXPONENT = 0.5  # weight of late work in the polynomial table of staleness: (1 + gap)^-EXPONENT


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


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """Accepted contributions that wait to be merged."""

    count: int
    work: int = 0  # steps (deltas) or samples (gradients)
    waited_s: float = 0.0  # time since the oldest was accepted
    quiet_s: float = 0.0  # time since the newest was accepted
    round_s: float = 0.0  # training time of the longest of them
    live_workers: int = 1


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Readiness for a merge."""

    now: bool  # True: the merge is due
    needs: int  # contributions that the quorum lacks
    deadline_in_s: float | None  # seconds until the merge is due anyway; None without a deadline


def quorum_of(plan: Plan, live_workers: int) -> int:
    """Return the number of contributions that make a merge, with this number of live workers."""
    quorum = max(plan.quorum, math.ceil(plan.quorum_share * live_workers))
    return min(quorum, max(1, live_workers))


def ready(plan: Plan, pending: Pending) -> Ready:
    """Return the readiness for a merge of the pending contributions under a plan."""
    quorum = quorum_of(plan, pending.live_workers)
    least = min(plan.min_contributions, quorum)
    needs = max(0, quorum - pending.count)
    if pending.count < least:
        return Ready(now=False, needs=needs, deadline_in_s=None)
    # A deadline shorter than a round would leave out machines that are merely out of step.
    patience_s = max(plan.deadline_seconds, ROUND * pending.round_s)
    left_s = max(0.0, patience_s - pending.waited_s) if plan.deadline_seconds else None
    enough_work = 0 < plan.work_target <= pending.work
    grace_s = _grace_left(plan, pending)
    if needs == 0 and grace_s > 0:
        left_s = grace_s if left_s is None else min(left_s, grace_s)
    is_due = (needs == 0 and grace_s <= 0) or enough_work or left_s == 0
    return Ready(now=is_due, needs=needs, deadline_in_s=left_s)


def _grace_left(plan: Plan, pending: Pending) -> float:
    """Return the seconds that a merge with a quorum still waits for the other live workers."""
    if pending.count >= pending.live_workers:
        return 0.0
    return max(0.0, plan.grace * pending.round_s - pending.quiet_s)


def staleness_weight(plan: Plan, gap: int) -> float:
    """Return the weight factor, 0 to 1, of work whose base is `gap` versions old; 0 = too old.
    Raises ValueError for a negative gap.
    """
    if gap < 0:
        raise ValueError(f"the base version lies {-gap} versions in the future")
    if gap > plan.max_staleness:
        return 0.0
    match plan.table:
        case "linear":
            return 1 - gap / (plan.max_staleness + 1)
        case "s4":
            return 1.0 if gap <= 50 else max(0.0, 1 - (gap - 50) / 150)
        case "polynomial":
            return float((1 + gap) ** -EXPONENT)
        case "inverse":
            return 1 / max(1, gap)
        case "constant":
            return 1.0


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a contribution to a merge, which are the server's, never the client's."""

    work: float  # steps (deltas) or samples (gradients) of the task
    gap: int = 0  # staleness: versions between its base and the newest one


class Weighing(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of the contributions to a merge, in the order of the terms."""

    weights: tuple[float, ...]  # for `aggregation.cohort`; 0 = left out
    scale: float  # factor of the server optimiser's step, for `aggregation.server_optimizer.Push`
    work: float  # sum of the work of the contributions with a weight


def weigh(plan: Plan, terms: Sequence[Term], live_workers: int = 1) -> Weighing:
    """Return the weight of each contribution: its work times its `staleness_weight`.

    A single late contribution is the whole mean whatever its weight, so with `damping` staleness
    shortens the step too. Raises ValueError for work that is no finite number >= 0.
    """
    plain = [term.work for term in terms]
    if not all(math.isfinite(value) and value >= 0 for value in plain):
        raise ValueError("the work of a contribution is negative or not finite")
    weights = [
        value * staleness_weight(plan, term.gap) for value, term in zip(plain, terms, strict=True)
    ]
    counted = [index for index, weight in enumerate(weights) if weight > 0]
    scale = 1.0
    if plan.damping and counted:
        scale = math.fsum(weights) / math.fsum(plain[index] for index in counted)
    if plan.arrival_scale != "one":
        share = min(1.0, len(counted) / max(1, live_workers))
        scale *= share if plan.arrival_scale == "share" else math.sqrt(share)
    return Weighing(
        weights=tuple(weights),
        scale=scale,
        work=math.fsum(terms[index].work for index in counted),
    )
