"""Shares in a merge: no volunteer and no network decides alone, and newcomers count little.

    one volunteer     at most a third, if more than three volunteers take part
    one network       at most a third, if more than three known networks take part
    on probation      together at most a fifth, if any vetted volunteer takes part

The thirds are taken within the vetted part and within the part on probation, so that a single
vetted volunteer among strangers keeps its four fifths.

Weights are scaled down, never up, by one factor within a group.

In a run whose members keep its data a member weighs by its samples, at most a factor times its
equal share; in a run that promises to mix members, at most as much as the others together
(`member_shares`). These two limits bound a member's share of a version, however many updates,
machines or samples it has; each account that a version mixes counts, since an accepted update has a
weight above 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import accumulate

import msgspec

SHARE_MAX = 1 / 3
MIXED_MAX = 1 / 2  # share of a member in a version that mixes members
GROUPS_MIN = 4  # if there are fewer groups, the largest has a third or more
PROBATION_MAX = 0.2
ROUNDS = 1_000  # most rounds of `_capped`; two conflicting limits take over a hundred
ROUNDING = 1e-12
VANISHED = 1e-9  # if limits leave less weight than this, they contradict each other


class Voice(msgspec.Struct, frozen=True, kw_only=True):
    """One contribution to a merge: its weight, its volunteer and network."""

    weight: float
    volunteer: str
    network: str = ""  # "" = unknown, not counted
    vetted: bool = True


def shares(voices: Sequence[Voice]) -> list[float]:
    """Return a weight for each voice, at most its own, so that the limits above hold.

    Vetted voices and voices on probation are limited separately, then all voices on probation
    together. The limits on volunteers and on networks may contradict each other, for example if
    three volunteers share one network and a fourth volunteer uses all others; then only the limit
    on volunteers applies.
    """
    weights = [0.0] * len(voices)
    for vetted in (True, False):
        part = [i for i, voice in enumerate(voices) if voice.vetted is vetted and voice.weight > 0]
        for i, weight in zip(part, _limited([voices[i] for i in part]), strict=True):
            weights[i] = weight
    _limit_probation(weights, [voice.vetted for voice in voices])
    return weights


class MemberVoice(msgspec.Struct, frozen=True, kw_only=True):
    """One contribution over data that a machine of a member keeps."""

    member: str  # the volunteer, whatever its number of machines
    machine: str
    samples: float  # samples of the machine's data
    work: float
    staleness: float  # weight by staleness


def member_shares(voices: Sequence[MemberVoice], cap: float, share_max: float = 1.0) -> list[float]:
    """Return a weight for each voice: the samples of its machine, divided among the machine's
    voices by their work, times its staleness. No member's sum exceeds `cap` times its equal share,
    nor the share `share_max` of two or more members.
    """
    work: dict[str, float] = defaultdict(float)
    for voice in voices:
        work[voice.machine] += voice.work
    weights = [
        voice.samples * voice.work / work[voice.machine] * voice.staleness if voice.work else 0.0
        for voice in voices
    ]
    totals: dict[str, float] = defaultdict(float)
    for voice, weight in zip(voices, weights, strict=True):
        totals[voice.member] += weight
    positive = [total for total in totals.values() if total > 0]
    level = cap_level(positive, min(cap, share_max * len(positive)))
    return [
        weight * min(1.0, level / totals[voice.member]) if weight > 0 else 0.0
        for voice, weight in zip(voices, weights, strict=True)
    ]


def cap_level(totals: Sequence[float], cap: float) -> float:
    """Return the level to which larger totals are cut, so that none exceeds `cap` times the equal
    share of the sum that remains; infinite if no total is that large.
    """
    most = cap / max(1, len(totals))
    ordered = sorted(totals)
    sums = list(accumulate(ordered))  # sum of each total and all smaller totals
    for cut, total in enumerate(reversed(ordered)):
        left = 1.0 - cut * most  # share of those that are not cut
        level = most * sums[-1 - cut] / left if left > 0 else math.inf
        if total <= level * (1 + ROUNDING):
            return level if cut else math.inf
    return min(totals, default=math.inf)


def _limited(voices: Sequence[Voice]) -> list[float]:
    """Return weights within the limits on every volunteer's and every network's share."""
    weights = [voice.weight for voice in voices]
    people = [voice.volunteer for voice in voices]
    networks = [voice.network or None for voice in voices]
    groupings = [
        grouping for grouping in (people, networks) if len({*grouping} - {None}) >= GROUPS_MIN
    ]
    while groupings:
        capped = _capped(weights, groupings)
        if sum(capped) > VANISHED * sum(weights):
            return capped
        groupings.pop()
    return weights


def _capped(
    weights: Sequence[float], groupings: Sequence[Sequence[Hashable | None]]
) -> list[float]:
    """Cut every group to `SHARE_MAX` of the largest total that remains after the cut.

    A group cut to a fixed size stays within it whatever else is cut, so one pass for each grouping
    suffices; each round cuts to shares of the previous round's total.
    """
    capped = list(weights)
    for _ in range(ROUNDS):
        whole, capped = sum(capped), list(weights)
        for groups in groupings:
            _cut_groups(capped, groups, SHARE_MAX * whole)
        if sum(capped) >= whole * (1 - ROUNDING):
            break
    return capped


def _cut_groups(weights: list[float], groups: Sequence[Hashable | None], most: float) -> None:
    totals: dict[Hashable, float] = defaultdict(float)
    for weight, group in zip(weights, groups, strict=True):
        if group is not None:
            totals[group] += weight
    for i, group in enumerate(groups):
        if group is not None and totals[group] > most:
            weights[i] *= most / totals[group]


def _limit_probation(weights: list[float], vetted: Sequence[bool]) -> None:
    trusted = sum(w for w, is_vetted in zip(weights, vetted, strict=True) if is_vetted)
    new = sum(w for w, is_vetted in zip(weights, vetted, strict=True) if not is_vetted)
    most = trusted * PROBATION_MAX / (1 - PROBATION_MAX)
    if trusted > 0 and new > most:
        for i, is_vetted in enumerate(vetted):
            weights[i] *= 1.0 if is_vetted else most / new
