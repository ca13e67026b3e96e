"""Near copies among updates, found by their sketches. Pure rules.

Two honest updates of one version have a direction in common, the more the younger the model, and
the rest of each is its own. So how near is too near is told by the others: at most a tenth of the
usual distance (1 - cosine), and never as far as `NEAR_MAX`. Without others only what is as good as
the same counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

NEAR_SHARE = 0.1  # of the usual distance (measured, docs/experiments.md)
NEAR_MAX = 0.05
SAME = 2e-4  # apart: the same but for rounding
PAIRS_MIN = 10  # of five volunteers: fewer do not say what is usual
USUAL_VERSIONS, USUAL_VOLUNTEERS = 3, 24  # newest ones that say it


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """An update that came before, with its sketch as bytes of float32."""

    volunteer: str
    task: int
    base_version: int
    sketch: bytes


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """The update in question."""

    volunteer: str
    task: int
    base_version: int
    sketch: bytes


def copied(suspect: Suspect, known: Sequence[Known], merges: Sequence[bytes]) -> str:
    """Return which work an update is a near copy of, for a sentence; empty if it is of none.

    `known` are earlier updates of the run, newest first; `merges` what the last versions moved the
    model by. Updates for the same task are left out: done again it may come out the same.
    """
    for what, nearness in _near(suspect, known, merges):
        if nearness < 1.0:
            return what
    return ""


def nearness(suspect: Suspect, known: Sequence[Known], merges: Sequence[bytes]) -> float:
    """Return the least distance to other work by that under which it is a copy: 1 and more is an
    update of its own.
    """
    return min((found for _, found in _near(suspect, known, merges)), default=math.inf)


def _near(
    suspect: Suspect, known: Sequence[Known], merges: Sequence[bytes]
) -> Iterator[tuple[str, float]]:
    mine = _unit([suspect.sketch])[0]
    others = [one for one in known if one.task != suspect.task]
    beside = [one for one in others if one.base_version == suspect.base_version]
    before = [
        one
        for one in others
        if one.volunteer == suspect.volunteer and one.base_version != suspect.base_version
    ]
    limit = _limit(known)
    for what, sketches in (
        ("another update of the same version", [one.sketch for one in beside]),
        ("one of your own updates before", [one.sketch for one in before]),
        ("what a merge did to the model", list(merges)),
    ):
        if sketches:
            yield what, float(np.min(1.0 - _unit(sketches) @ mine)) / limit


def _limit(known: Sequence[Known]) -> float:
    """Return the distance under which an update is a copy: a tenth of the usual one between two
    volunteers' updates of one version.

    Usual is the lower quartile over pairs of the newest versions. So neither noise of half of the
    volunteers makes it larger, nor copies by half of them smaller.
    """
    by: dict[int, dict[str, bytes]] = {}
    for one in known:
        if one.base_version in by or len(by) < USUAL_VERSIONS:
            newest = by.setdefault(one.base_version, {})
            if len(newest) < USUAL_VOLUNTEERS:
                newest.setdefault(one.volunteer, one.sketch)
    apart = [np.zeros(0)]
    for newest in by.values():
        rows = _unit(list(newest.values()))
        apart.append((1.0 - rows @ rows.T)[np.triu_indices(len(rows), 1)])
    pairs = np.concatenate(apart)
    if len(pairs) < PAIRS_MIN:
        return SAME
    usual = float(np.quantile(pairs, 0.25, method="lower"))
    return max(SAME, min(NEAR_MAX, NEAR_SHARE * usual))


def _unit(sketches: Sequence[bytes]) -> NDArray[np.float64]:
    """Return sketches of length one, a row each; one of zeros stays so and is near nothing."""
    rows = np.stack([np.frombuffer(one, np.float32) for one in sketches]).astype(np.float64)
    sizes = np.linalg.norm(rows, axis=1, keepdims=True)
    found: NDArray[np.float64] = rows / np.where(sizes > 0, sizes, np.inf)
    return found
