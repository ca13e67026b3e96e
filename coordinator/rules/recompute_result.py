"""Result of a recompute: of an update by two measured bounds, of an answer by wrong tokens. Pure
rules.

    tight  on comparable arithmetic: work within it was done exactly as leased
    loose  on other arithmetic: work within it was done and is paid, but its account owes a share
           of its stake, from none at no difference to all at the bound; work beyond it proves
           nothing, since the owner alone states the class of a device

A bound limits the length of the difference of two raw updates, divided by the length of the
server's update: poison of a tenth of the update is 0.1 in any direction, noise is 1 or more at any
scale. Buffers have the same bound, relative to how far the task moved them.

The updates are compared in their encoded form, and the raw difference is computed from the encoded
one. Both sides round by the same random numbers, so equal numbers give equal codes, and a small
difference d of two numbers changes the code with probability d / scale. The encoded updates differ
by about sqrt(d^2 + ROUNDING q d), with the codec's error q and the raw difference d, both relative
to the update.

Some tasks drift: rounding decides whether a unit near its threshold is on or off. An update that
misses its bound is compared with the task's own drift, by a second recompute from a slightly
changed base: it may differ from the server's by `DRIFT_TIMES` times that drift. A task that drifts
by more than `DRIFT_MAX` proves nothing.
"""

from __future__ import annotations

import math

from coordinator.rules.draws import Redone, Result

# Bounds by the precision of the computation (`precision_of`); decision 28.
TIGHT = {"float32": 0.01, "bfloat16": 0.05}
LOOSE = 0.2
NUDGES = {"float32": 1e-4, "bfloat16": 1e-2}  # relative change of each number of a base
DRIFT_TIMES = 2.0
DRIFT_MAX = 0.2  # largest drift of a task at which a recompute proves anything
ROUNDING = math.sqrt(6)  # upper bound of this factor, by the inequality of Cauchy and Schwarz
DRAWN_SHARE = 0.1  # least probability of a draw of an answer, for an account that often agreed
# Wrong tokens prove another model if they are at least WRONG_MIN, and more than WRONG_SHARE of an
# answer.
WRONG_MIN, WRONG_SHARE = 3, 0.05
# an answer with one wrong token agrees if at most this share of the account's compared tokens is
# wrong
ODD_SHARE = 0.01


def difference(cosine: float, norm_ratio: float) -> float:
    """Return the length of two updates' difference, relative to the divisor of `norm_ratio`."""
    if not (math.isfinite(cosine) and math.isfinite(norm_ratio)):
        return math.inf
    return math.hypot(norm_ratio - cosine, math.sqrt(max(0.0, 1.0 - cosine * cosine)))


def raw_difference(redone: Redone) -> float:
    """Return the length of the difference of the raw updates, computed from the encoded ones, or of
    the difference of the buffers if that is longer.
    """
    half = ROUNDING * redone.rounding / 2
    encoded = difference(redone.cosine, redone.norm_ratio)
    return max(math.hypot(half, encoded) - half, redone.buffers)


def bound(redone: Redone, precision: str, *, comparable: bool) -> float:
    """Return the bound of a recompute, widened by the drift of its task."""
    least = TIGHT[precision] if comparable else LOOSE
    return max(least, DRIFT_TIMES * (redone.drift or 0.0))


def within(redone: Redone, bound: float) -> bool:
    """Return True if the update lies within a bound."""
    return raw_difference(redone) <= bound  # False for NaN


def drifts_too_far(redone: Redone) -> bool:
    """Return True if a task drifts so far that its recompute proves nothing."""
    return redone.drift is not None and redone.drift > DRIFT_MAX


def judge(redone: Redone, precision: str = "float32", *, comparable: bool) -> Result:
    """Judge a recompute. `comparable` is False if the worker's arithmetic differs from that of the
    machine that recomputed.
    """
    if drifts_too_far(redone):
        return "unproven"
    if within(redone, bound(redone, precision, comparable=comparable)):
        return "passed"
    return "failed" if comparable else "unproven"


def share(redone: Redone, precision: str = "float32", *, comparable: bool) -> float:
    """Return the share of a worker's task that a passed recompute shows to be done.

    The share is 1 within the tight bound on comparable arithmetic; otherwise it falls to 0 at the
    loose bound. Leaving out a part of the steps or batches makes a larger difference than that
    part.
    """
    distance = raw_difference(redone)
    if comparable and distance <= TIGHT[precision]:
        return 1.0
    return max(0.0, 1.0 - distance / bound(redone, precision, comparable=False))


def is_of_model(looked: int, wrong: int, tally: tuple[int, int]) -> bool:
    """Return True if an answer agrees with the model; `tally` counts the compared and the wrong
    tokens of all the account's answers, this answer included.

    One wrong token is allowed to an account with few wrong ones; otherwise it would cost an account
    with short answers its whole stake.
    """
    odd = wrong == 1 and tally[1] <= ODD_SHARE * tally[0]
    return odd or wrong <= WRONG_SHARE * looked


def is_other_model(looked: int, wrong: int) -> bool:
    """Return True if this many wrong tokens prove another model; few prove nothing.

    Honest hardware differs in about one of a thousand tokens (docs/decisions/0019).
    """
    return wrong >= WRONG_MIN and wrong > WRONG_SHARE * looked
