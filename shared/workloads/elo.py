"""Elo ratings of versions that played matches against each other, and the scores of matches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np


class MatchScore(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a match for the measured version."""

    wins: int = 0
    draws: int = 0
    losses: int = 0

    @property
    def games(self) -> int:
        return self.wins + self.draws + self.losses

    @property
    def points(self) -> float:
        """Return the share of points; a draw is half a point."""
        return (self.wins + self.draws / 2) / max(1, self.games)

    @property
    def superiority(self) -> float:
        """Return the probability that the measured version is stronger, given the games that it won
        and lost.
        """
        decided = self.wins + self.losses
        if not decided:
            return 0.5
        return 0.5 * (1 + math.erf((self.wins - self.losses) / math.sqrt(2 * decided)))


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """All games of the version `one` against the version `other`; the score is that of `one`."""

    one: int
    other: int
    score: MatchScore


class Rating(msgspec.Struct, frozen=True, kw_only=True):
    """Elo points above the anchor, and their error (95 %)."""

    elo: float
    error: float


_PER_POINT = math.log(10) / 400
# Prior standard deviation of the difference between two versions that met, in Elo points, with
# which 16 wins of 16 games give a finite difference.
_PRIOR_ELO = 600.0


def ratings(meetings: Sequence[Meeting], anchor: int) -> dict[int, Rating]:
    """Return maximum a posteriori Bradley-Terry ratings of all versions in the meetings, with the
    anchor at 0.

    A draw counts as half a win. The error is 1.96 deviations of the difference to the anchor, from
    the curvature at the maximum. Versions without a chain of games to the anchor are left out.
    """
    numbers = sorted(_joined(meetings, anchor))
    index = {number: at for at, number in enumerate(numbers)}
    games = [
        (index[m.one], index[m.other], m.score)
        for m in meetings
        if m.one in index and m.one != m.other
    ]
    elo = np.zeros(len(numbers))
    curvature = np.eye(len(numbers))
    for _ in range(100):
        slope = np.zeros(len(numbers))
        curvature = np.zeros((len(numbers), len(numbers)))
        for one, other, score in games:
            gap = elo[one] - elo[other]
            expected = 1 / (1 + math.exp(-_PER_POINT * gap))
            pull = _PER_POINT * score.games * (score.points - expected) - gap / _PRIOR_ELO**2
            bend = _PER_POINT**2 * score.games * expected * (1 - expected) + 1 / _PRIOR_ELO**2
            slope[one] += pull
            slope[other] -= pull
            for a, b, sign in (
                (one, one, 1),
                (other, other, 1),
                (one, other, -1),
                (other, one, -1),
            ):
                curvature[a, b] += sign * bend
        at = index[anchor]
        curvature[at] = 0
        curvature[:, at] = 0
        curvature[at, at] = 1
        slope[at] = 0
        step = np.linalg.solve(curvature, slope)
        elo += np.clip(step, -400, 400)
        if np.abs(step).max() < 1e-6:
            break
    spread = 1.96 * np.sqrt(np.maximum(np.diag(np.linalg.inv(curvature)), 0))
    return {
        number: Rating(elo=float(elo[at]), error=0.0 if number == anchor else float(spread[at]))
        for number, at in index.items()
    }


def _joined(meetings: Sequence[Meeting], anchor: int) -> set[int]:
    """Return the versions with a chain of games to the anchor, and the anchor."""
    connected = {anchor}
    while True:
        more = {
            number
            for meeting in meetings
            if connected & {meeting.one, meeting.other}
            for number in (meeting.one, meeting.other)
        }
        if more <= connected:
            return connected
        connected |= more
