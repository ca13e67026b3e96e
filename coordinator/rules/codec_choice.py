"""Negotiation of the codec, for a worker that lacks its run's own."""

from __future__ import annotations

from collections.abc import Collection

from coordinator.plan.plan_tables import Plan

# fewest bytes first; every volunteer's program has the last
FALLBACKS = ("int8", "bf16", "float32")
PACKED = {"float32": "float32-zstd", "bf16": "bf16-zstd"}  # the same numbers in fewer bytes


def agreed(wanted: str, spoken: Collection[str]) -> str:
    """Return the codec for an update: the run's own, or the best other one that the worker has; ""
    without one.

    Floats travel packed where the worker can. One that names no codec is believed to speak all that
    were there at first.
    """
    if not spoken:
        return wanted
    found = next((name for name in (wanted, *FALLBACKS) if name in spoken), "")
    packed = PACKED.get(found, "")
    return packed if packed in spoken else found


def grantable(plan: Plan) -> frozenset[str]:
    """Return every codec that a lease of this run may name: a lease of one phase may be submitted
    in the next.

    Which of them a lease did name is not kept: all of them say what was trained well enough for the
    plan.
    """
    wanted = {phase.overrides.get("codec", plan.codec) for phase in plan.phases} | {plan.codec}
    plain = wanted | set(FALLBACKS)
    return frozenset(plain | {PACKED[name] for name in plain if name in PACKED})
