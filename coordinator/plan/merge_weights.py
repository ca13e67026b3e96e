"""Weights of the contributions to a merge: the work of each, reduced by its staleness.

weigh(plan, terms, live_workers)             the weight of each contribution
staleness_weight(plan, gap)                  the factor of one that is `gap` versions late
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from coordinator.plan.plan_tables import Plan

EXPONENT = 0.5  # weight of late work in the polynomial table of staleness: (1 + gap)^-EXPONENT


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
    """Figures of a contribution to a merge; they come from the server, never from the client."""

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
