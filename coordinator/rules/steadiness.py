"""Steadiness of outer momentum: detects too large steps of a run, and lowers their rate.

Too large steps make updates undo the momentum before them: the cosine of the two, 0.2 to 0.4 in a
run that learns, falls to zero and below before the loss shows it. The sign of this cosine is the
test by which accelerated gradient methods restart (O'Donoghue and Candes 2015). The agreement among
updates is no test: it rises, since all workers pull back alike (measured, docs/experiments.md).

No minority decides: the heading of a merge is the median of its volunteers' cosines, and the median
of several headings counts. After a rest a lowered rate is raised on trial; the rest doubles each
time that the rate falls back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from statistics import median
from typing import NamedTuple

ROUNDS = 4  # updates of each live worker that are judged together
LEAST = 0.05  # median cosine from which on the rate is not lowered
FACTOR = 0.5
SCALE_MIN = 0.125  # least share of the plan's rate
WINDOW_MAX = 256  # most versions that are judged together
REST = 16  # steady windows at a lower rate before the higher one is tried again
REST_MAX = 4096  # most versions at a lower rate before the higher one is tried again
COOLS_FROM = 0.75  # share of a run after which the outer rate falls
COOLS_TO = 0.1  # share of the outer rate at the end of the run
LONG = 160  # least versions of a run that cools: a run of 87 ended worse with cooling


class Heading(NamedTuple):
    """Outer step of one version: its scale, and the direction of its update."""

    outer_scale: float
    heading: float | None  # cosine of the update with the momentum before it


def window(share: float) -> int:
    """Return how many versions hold `ROUNDS` updates of each live worker, if one version holds
    updates of this share of the workers.
    """
    return min(WINDOW_MAX, math.ceil(ROUNDS / min(1.0, max(share, ROUNDS / WINDOW_MAX))))


def rest(most: int, falls: int) -> int:
    """Return the number of versions made at a lowered scale before the higher one is tried again.
    The scale fell to it `falls` times; `most` is the result of `window`.
    """
    return min(REST_MAX, REST * most << min(16, max(0, falls - 1)))


def outer_scale(recent: Sequence[Heading], most: int, falls: int = 0) -> float:
    """Return the scale of the next outer step, from the run's versions, newest first.

    The scale is halved when the median heading of the newest `most` versions at it is below
    `LEAST`, and doubled on trial after `rest` versions at a lowered scale.
    """
    if not recent:
        return 1.0
    scale = recent[0].outer_scale
    same = takewhile(lambda heading: heading.outer_scale == scale, recent)
    headings = [heading.heading for heading in same if heading.heading is not None]
    if len(headings) >= most and median(headings[:most]) < LEAST:
        return max(SCALE_MIN, scale * FACTOR)
    if len(headings) >= rest(most, falls):
        return min(1.0, scale / FACTOR)
    return scale


def cooling(done: float, version: int) -> float:
    """Return the factor on the outer rate of a run with this share done: 1, or less near its end.

    Momentum applies each round several times, so the last versions oscillate around their target
    even at a low rate of the workers (docs/decisions/0027-cooling.md).
    """
    if version < LONG * done or not done:
        return 1.0
    left = (1.0 - min(1.0, done)) / (1.0 - COOLS_FROM)
    return min(1.0, COOLS_TO + (1.0 - COOLS_TO) * left)
