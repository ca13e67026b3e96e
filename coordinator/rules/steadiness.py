"""Steadiness of outer momentum: when a run steps too far, and by how much less it goes on.

Updates that are steps too far apart begin to undo what the momentum before them did: their cosine
to it falls from the 0.2 to 0.4 of a run that learns to zero and below, before the loss says so. It
is the test by which accelerated gradient methods restart (O'Donoghue and Candes 2015). Agreement of
the updates among each other does not tell: it rises, since all workers pull back alike (measured,
docs/experiments.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

ROUNDS = 4  # of all live workers that are looked at together
LEAST = 0.05  # mean cosine of a run that is let alone
FACTOR = 0.5
SCALE_MIN = 0.125  # of the plan's rate
WINDOW_MAX = 256  # versions


class Heading(NamedTuple):
    """Step to one version."""

    outer_scale: float
    heading: float | None  # cosine of its update to the momentum before it


def window(share: float) -> int:
    """Return the number of versions that amount to `ROUNDS` of all live workers, where a merge has
    the work of this share of them.
    """
    return min(WINDOW_MAX, math.ceil(ROUNDS / min(1.0, max(share, ROUNDS / WINDOW_MAX))))


def outer_scale(recent: Sequence[Heading], most: int) -> float:
    """Return the scale of the next step, given the last versions of this phase, newest first: half
    of theirs when `most` of them, made at one scale, turned back on the whole.
    """
    if not recent:
        return 1.0
    scale = recent[0].outer_scale
    known = [each.heading for each in recent[:most] if each.outer_scale == scale]
    told = [heading for heading in known if heading is not None]
    if len(told) < most or fmean(told) >= LEAST:
        return scale
    return max(SCALE_MIN, scale * FACTOR)
