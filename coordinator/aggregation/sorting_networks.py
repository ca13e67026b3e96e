"""Sorting networks, cut down to the comparators that the sum of some ranks needs.

Comparators are pairs of wires: the smaller value goes to the first wire, the larger to the second.
The network depends on the number of rows and the ranks alone, so sums are added in the same order
everywhere. Ranks are never left out by subtracting them from the sum of all: one hostile number of
1e30 would take every digit with it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

Comparators: TypeAlias = list[tuple[int, int]]
Needed: TypeAlias = tuple[int, int, bool, bool]  # wires, is the minimum needed, is the maximum


class Network(NamedTuple):
    """Steps between rows: the K contributions, read only, then scratch, and as row -1 the sum."""

    rows: int  # contributions and scratch, without the sum
    steps: tuple[tuple[np.ufunc, int, int, int], ...]  # minimum, maximum or sum of two, where to


@functools.lru_cache(maxsize=256)
def rank_network(count: int, low: int, high: int) -> Network:
    """The steps that sum the values at [low, high) of `count` sorted rows."""
    wanted = range(low, high)
    place = list(range(count))  # the row in which each wire's value is
    free: list[int] = []
    rows = count
    steps: list[tuple[np.ufunc, int, int, int]] = []

    def fresh() -> int:
        nonlocal rows
        rows += not free
        return free.pop() if free else rows - 1

    for item in _depth_first(_needed(_pairwise(count), wanted), wanted):
        if isinstance(item, int):
            steps.append((np.add, place[item], -1, -1))
            free += [place[item]] if place[item] >= count else []
            continue
        left, right, smaller, larger = item
        one, other = place[left], place[right]
        own = [row for row in (one, other) if row >= count]  # may be written over by the last step
        if smaller and larger:
            place[left] = fresh()
            steps.append((np.minimum, one, other, place[left]))
        into = own.pop() if own else fresh()
        steps.append((np.maximum if larger else np.minimum, one, other, into))
        place[right if larger else left] = into
        free += own
    return Network(rows, tuple(steps))


def _needed(comparators: Comparators, wanted: Sequence[int]) -> list[Needed]:
    """Return the comparators that the sum of the `wanted` wires depends on."""
    used, summed = set[int](), set(wanted)  # wires read later; wires of which only the sum counts
    kept: list[Needed] = []
    for left, right in reversed(comparators):
        if left in summed and right in summed:
            continue  # their sum is the same either way
        needs = used | summed
        if left in needs or right in needs:
            kept.append((left, right, left in needs, right in needs))
            used |= {left, right}
            summed -= {left, right}
    return kept[::-1]


def _depth_first(kept: Sequence[Needed], wanted: Sequence[int]) -> Iterator[Needed | int]:
    """Order the comparators so that a written wire is read soon; yield wires with their value."""
    last: dict[int, int] = {}  # the latest comparator on a wire
    before: list[tuple[int | None, int | None]] = []
    for index, (left, right, _, _) in enumerate(kept):
        before.append((last.get(left), last.get(right)))
        last[left] = last[right] = index
    done = set[int]()

    def visit(index: int | None) -> Iterator[Needed]:
        if index is None or index in done:
            return
        done.add(index)
        for earlier in before[index]:
            yield from visit(earlier)
        yield kept[index]

    for wire in wanted:
        yield from visit(last.get(wire))
        yield wire


def _pairwise(count: int) -> Comparators:
    """Return the pairwise sorting network (Parberry 1992), short when some ranks are wanted."""
    found: Comparators = []
    gap = 1
    while gap < count:
        found += [(right - gap, right) for right in range(count) if right & gap]
        gap *= 2
    gap, reach = gap // 4, 1
    while gap:
        far = reach
        while far:
            first = (far + 1) * gap
            found += [
                (right - far * gap, right) for right in range(first, count) if not right & gap
            ]
            far //= 2
        gap, reach = gap // 2, 2 * reach + 1
    return found
