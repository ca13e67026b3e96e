"""Sorting networks, reduced to the comparators that the sum of some ranks needs.

Comparators are pairs of wires: the smaller value goes to the first wire, the larger to the second.
The network depends only on the number of rows and the ranks, so sums are added in the same order on
every machine. The sum of the other ranks is never subtracted from the sum of all values: one
hostile number of 1e30 would destroy every digit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

Comparators: TypeAlias = list[tuple[int, int]]
# two wires; True if their minimum is needed, True if their maximum is
Needed: TypeAlias = tuple[int, int, bool, bool]


class Network(NamedTuple):
    """Steps over numbered rows: first the K contributions, which are only read, then scratch rows;
    row -1 is the sum.
    """

    rows: int  # contributions and scratch, without the sum
    # an operation (minimum, maximum or sum), its two rows, and the row of its result
    steps: tuple[tuple[np.ufunc, int, int, int], ...]


@functools.lru_cache(maxsize=256)
def rank_network(count: int, low: int, high: int) -> Network:
    """Return the steps that sum the values at [low, high) of `count` sorted rows."""
    outputs = range(low, high)
    place = list(range(count))  # row that holds each wire's value
    free: list[int] = []
    rows = count
    steps: list[tuple[np.ufunc, int, int, int]] = []

    def fresh() -> int:
        nonlocal rows
        rows += not free
        return free.pop() if free else rows - 1

    for item in _depth_first(_needed(_pairwise(count), outputs), outputs):
        if isinstance(item, int):
            steps.append((np.add, place[item], -1, -1))
            free += [place[item]] if place[item] >= count else []
            continue
        left, right, smaller, larger = item
        pair = place[left], place[right]
        # scratch rows that the last step of the pair may write over
        spare = [row for row in pair if row >= count]
        if smaller and larger:
            place[left] = fresh()
            steps.append((np.minimum, *pair, place[left]))
        into = spare.pop() if spare else fresh()
        steps.append((np.maximum if larger else np.minimum, *pair, into))
        place[right if larger else left] = into
        free += spare
    return Network(rows, tuple(steps))


def _needed(comparators: Comparators, outputs: Sequence[int]) -> list[Needed]:
    """Return the comparators that the sum of the `outputs` wires depends on."""
    # wires that later comparators read; wires that only enter the sum
    used, summed = set[int](), set(outputs)
    needed: list[Needed] = []
    for left, right in reversed(comparators):
        if left in summed and right in summed:
            continue  # the sum of two wires does not depend on their order
        needs = used | summed
        if left in needs or right in needs:
            needed.append((left, right, left in needs, right in needs))
            used |= {left, right}
            summed -= {left, right}
    return needed[::-1]


def _depth_first(needed: Sequence[Needed], outputs: Sequence[int]) -> Iterator[Needed | int]:
    """Yield the comparators, ordered so that a written wire is read soon, and each wire of the sum
    once its value is final.
    """
    last: dict[int, int] = {}  # latest comparator on a wire
    before: list[tuple[int | None, int | None]] = []
    for index, (left, right, _, _) in enumerate(needed):
        before.append((last.get(left), last.get(right)))
        last[left] = last[right] = index
    done = set[int]()

    def visit(index: int | None) -> Iterator[Needed]:
        if index is None or index in done:
            return
        done.add(index)
        for earlier in before[index]:
            yield from visit(earlier)
        yield needed[index]

    for wire in outputs:
        yield from visit(last.get(wire))
        yield wire


def _pairwise(count: int) -> Comparators:
    """Return the pairwise sorting network (Parberry 1992), of which few comparators remain if only
    some ranks are needed.
    """
    comparators: Comparators = []
    gap = 1
    while gap < count:
        comparators += [(right - gap, right) for right in range(count) if right & gap]
        gap *= 2
    gap, reach = gap // 4, 1
    while gap:
        far = reach
        while far:
            first = (far + 1) * gap
            comparators += [
                (right - far * gap, right) for right in range(first, count) if not right & gap
            ]
            far //= 2
        gap, reach = gap // 2, 2 * reach + 1
    return comparators
