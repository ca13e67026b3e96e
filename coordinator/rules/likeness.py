"""Likeness of a task done again to what was submitted: two bounds, both measured. Pure rules.

    tight  on comparable arithmetic: what lies within is the work that was leased, as it was
           leased; what does not was tampered with, and is punished
    loose  on any other: what lies within is work that was done, and is paid; what does not proves
           nothing, for the class of a device is what its owner says

A bound is one length, that of the difference by that of our own update: poison of a tenth of the
update in whatever direction is 0.1, noise is 1 or more, however it is scaled. The state that the
optimiser was left with has a bound of its own: the last steps made it, whoever left them out.
"""

from __future__ import annotations

import math

import msgspec

from coordinator.rules.checks import Redone, Result


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one recompute."""

    difference: float  # of the updates, by the length of ours; at most
    state: float  # cosine of the optimiser's states; at least

    @property
    def cosine(self) -> float:
        """Return the least cosine of updates of equal length within this bound."""
        return 1.0 - self.difference**2 / 2.0


# By the precision that computed (`precision_of`); how they were measured: decision 28.
TIGHT = {
    "float32": Bound(difference=0.045, state=0.99),
    "bfloat16": Bound(difference=0.2, state=0.5),
}
LOOSE = Bound(difference=0.2, state=0.5)
WRITTEN_MIN = 0.98  # of what was sent, beside what its codec makes of what it says it was given


def difference(cosine: float, norm_ratio: float) -> float:
    """Return the length of the difference of two updates by the length of the first."""
    if not (math.isfinite(cosine) and math.isfinite(norm_ratio)):
        return math.inf
    return math.sqrt(max(0.0, 1.0 + norm_ratio**2 - 2.0 * norm_ratio * cosine))


def within(found: Redone, bound: Bound) -> bool:
    """Return True if the update, what was sent of it, and the state lie within a bound."""
    states = 1.0 if found.state_cosine is None else found.state_cosine
    return (
        difference(found.cosine, found.norm_ratio) <= bound.difference
        and found.written >= WRITTEN_MIN  # as is False of no number
        and states >= bound.state
    )


def judge(found: Redone, precision: str = "float32", *, comparable: bool) -> Result:
    """Judge a recompute. `comparable` is False where the worker's arithmetic is not ours."""
    if within(found, TIGHT[precision] if comparable else LOOSE):
        return "passed"
    return "failed" if comparable else "unproven"
