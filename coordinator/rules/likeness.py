"""Likeness of a recompute to the submitted update, judged by two measured bounds. Pure rules.

    tight  on comparable arithmetic: work within it was done exactly as leased
    loose  on other arithmetic: work within it was done and is paid, but its account owes a share
           of its stake, from none at no difference to all at the bound; work beyond it proves
           nothing, since the owner alone states the class of a device

A bound limits the length of the difference divided by the length of the server's update: poison of
a tenth of the update is 0.1 in any direction, noise is 1 or more at any scale. The optimiser's
final state has a bound of its own, which shows left-out last steps.

Some tasks drift: rounding decides whether a unit near its threshold is on or off. An update that
misses its bound is compared with the task's own drift, by a second recompute from a slightly
changed base: it may differ from the server's by `DRIFT_TIMES` times that drift.
"""

from __future__ import annotations

import math

import msgspec

from coordinator.rules.checks import Redone, Result


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one recompute."""

    # largest length of the difference of the updates, relative to the server's own
    difference: float
    state: float  # least cosine of the optimiser's states

    @property
    def cosine(self) -> float:
        """Return the least cosine of updates of equal length within this bound."""
        return 1.0 - self.difference**2 / 2.0


# Bounds by the precision of the computation (`precision_of`); decision 28 has the measurements.
TIGHT = {
    "float32": Bound(difference=0.01, state=0.999),
    "bfloat16": Bound(difference=0.05, state=0.9),
}
LOOSE = Bound(difference=0.2, state=0.5)
NUDGES = {"float32": 1e-4, "bfloat16": 1e-2}  # relative change of each number of a base
DRIFT_TIMES = 2.0
WIDEST = 0.9  # largest bound that proves anything: noise differs by 1 or more
# least cosine of the sent update to the server's encoding of its declared input
WRITTEN_MIN = 0.999


def difference(cosine: float, norm_ratio: float) -> float:
    """Return the length of two updates' difference, relative to the divisor of `norm_ratio`."""
    if not (math.isfinite(cosine) and math.isfinite(norm_ratio)):
        return math.inf
    return math.hypot(norm_ratio - cosine, math.sqrt(max(0.0, 1.0 - cosine * cosine)))


def within(found: Redone, bound: Bound) -> bool:
    """Return True if the raw update, the encoded update and the state lie within a bound."""
    states = 1.0 if found.state_cosine is None else found.state_cosine
    return (
        difference(found.cosine, found.norm_ratio) <= bound.difference
        and found.written >= WRITTEN_MIN  # False for NaN
        and states >= bound.state
    )


def bound(found: Redone, precision: str, *, comparable: bool) -> Bound:
    """Return the bound of a recompute, widened by the drift of its task."""
    least = TIGHT[precision] if comparable else LOOSE
    if found.drift is None:
        return least
    far = DRIFT_TIMES * found.drift.difference
    # 1 - cosine grows with the square of the distance.
    state = 1.0 - DRIFT_TIMES**2 * (1.0 - found.drift.state)
    return Bound(difference=max(least.difference, far), state=min(least.state, state))


def judge(found: Redone, precision: str = "float32", *, comparable: bool) -> Result:
    """Judge a recompute. `comparable` is False if the worker's arithmetic differs from this
    server's.
    """
    here = bound(found, precision, comparable=comparable)
    if not within(found, here):
        return "failed" if comparable else "unproven"
    return "passed" if difference(found.cosine, found.norm_ratio) <= WIDEST else "unproven"


def share(found: Redone, precision: str = "float32", *, comparable: bool) -> float:
    """Return the share of a worker's task that a passed recompute shows to be done.

    The share is 1 within the tight bound on comparable arithmetic; otherwise it falls to 0 at the
    loose bound. Leaving out a part of the steps or batches makes a larger difference than that
    part.
    """
    apart = difference(found.cosine, found.norm_ratio)
    if comparable and apart <= TIGHT[precision].difference:
        return 1.0
    return max(0.0, 1.0 - apart / bound(found, precision, comparable=False).difference)
