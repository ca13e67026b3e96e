"""Strength of versions: ratings from all matches that were checked, and which version is the best
one. Pure rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from shared.workloads.elo import MatchScore, Meeting, Rating, ratings

if TYPE_CHECKING:
    from coordinator.database.games import MatchRow

CERTAIN = 0.9  # likelihood that the challenger is the stronger one: then it is the best from now on
ANCHOR = 0  # the version whose rating is zero


class RatingTable(msgspec.Struct, frozen=True, kw_only=True):
    """Ratings from all matches of a run."""

    ratings: dict[int, Rating]
    best: int


def standing(rows: Sequence[MatchRow]) -> RatingTable:
    """Ratings with version 0 as their zero; the best is who has beaten the best before, beyond
    doubt, in order.
    """
    met: dict[tuple[int, int], MatchScore] = {}
    best = ANCHOR
    for row in rows:
        before = met.get((row.version, row.against), MatchScore())
        found = MatchScore(
            wins=before.wins + row.wins,
            draws=before.draws + row.draws,
            losses=before.losses + row.losses,
        )
        met[row.version, row.against] = found
        if row.against == best and found.superiority >= CERTAIN:
            best = row.version
    meetings = [Meeting(one=one, other=other, score=found) for (one, other), found in met.items()]
    return RatingTable(ratings=ratings(meetings, ANCHOR), best=best)
