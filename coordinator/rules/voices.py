"""Shares of a merge: no volunteer and no network decides alone, and newcomers only a little.

    one volunteer     at most a third, where more than three volunteers take part
    one network       at most a third, where more than three known networks take part
    on probation      together at most a fifth, where anybody vetted takes part

Weights are scaled down, never up, and always by the same factor within a group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import msgspec

SHARE_MAX = 1 / 3
GROUPS_MIN = 4  # fewer cannot keep below a third each
PROBATION_MAX = 0.2
ROUNDS_MAX = 100
SETTLED = 1e-12


class Voice(msgspec.Struct, frozen=True, kw_only=True):
    """One contribution to a merge: its weight, and who stands behind it."""

    weight: float
    volunteer: str
    network: str = ""  # empty = unknown, not counted
    vetted: bool = True


def shares(voices: Sequence[Voice]) -> list[float]:
    """Return a weight for each voice, at most its own, so that the limits above hold.

    Alternates between the limits, since keeping one may break another; each round only lowers
    weights, and what is left after `ROUNDS_MAX` is within rounding.
    """
    weights = [voice.weight for voice in voices]
    for _ in range(ROUNDS_MAX):
        before = list(weights)
        _limit_groups(weights, [voice.volunteer for voice in voices])
        _limit_groups(weights, [voice.network or None for voice in voices])
        _limit_probation(weights, [voice.vetted for voice in voices])
        if max((b - a for a, b in zip(weights, before, strict=True)), default=0.0) <= SETTLED:
            break
    return weights


def level(totals: Sequence[float], share: float, beside: float = 0.0) -> float:
    """Return the highest level at which cutting every total leaves none above `share` of the sum.

    `beside` is the part of the sum that belongs to no total and is never cut. With the k largest
    cut to a level L, and R the sum of the rest, L = share * (k L + R).
    """
    ordered = sorted(totals, reverse=True)
    rest = sum(ordered) + beside
    for k, largest in enumerate(ordered):
        if k * share >= 1:  # so many equal ones are below the share in any case
            return ordered[k - 1]
        cut = share * rest / (1 - k * share)
        if largest <= cut:
            return cut
        rest -= largest
    return ordered[-1] if ordered else 0.0


def _limit_groups(weights: list[float], groups: Sequence[Hashable | None]) -> None:
    totals: dict[Hashable, float] = defaultdict(float)
    unknown = 0.0
    for weight, group in zip(weights, groups, strict=True):
        if group is None:
            unknown += weight
        else:
            totals[group] += weight
    totals = {group: total for group, total in totals.items() if total > 0}
    if len(totals) < GROUPS_MIN:
        return
    most = level([*totals.values()], SHARE_MAX, unknown)
    _scale(weights, lambda i: min(1.0, most / totals[groups[i]]) if groups[i] in totals else 1.0)


def _limit_probation(weights: list[float], vetted: Sequence[bool]) -> None:
    trusted = sum(w for w, known in zip(weights, vetted, strict=True) if known)
    new = sum(w for w, known in zip(weights, vetted, strict=True) if not known)
    most = trusted * PROBATION_MAX / (1 - PROBATION_MAX)
    if trusted > 0 and new > most:
        _scale(weights, lambda i: 1.0 if vetted[i] else most / new)


def _scale(weights: list[float], factor: Callable[[int], float]) -> None:
    for i, weight in enumerate(weights):
        weights[i] = weight * factor(i)
