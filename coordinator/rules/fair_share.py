"""Fair share: the work each run was given lately, so that a run is made up for what others got
before it.

What is in flight alone is no fair share: of a few machines the fastest would stay with one run,
because those of the others are held, for long, by the slow ones. Kept in memory: after a restart
everybody begins anew, and each of several replicas is fair.
"""

from __future__ import annotations

from collections.abc import Mapping

HALF_LIFE_S = 900.0  # what was given that long ago counts half


class Shares:
    """Operations by run, fading."""

    def __init__(self) -> None:
        self._given: dict[int, float] = {}
        self._at = 0.0

    def lately(self, weights: Mapping[int, float], now: float) -> dict[int, float]:
        """Of the runs that are running.

        One that has just come owes nothing, and is owed nothing: it begins with the least share.
        """
        self._fade(now)
        known = {run: self._given[run] for run in weights if run in self._given}
        least = min((given / weights[run] for run, given in known.items()), default=0.0)
        self._given = {run: known.get(run, least * weight) for run, weight in weights.items()}
        return dict(self._given)

    def note(self, given: Mapping[int, float]) -> None:
        """Work that was handed out."""
        for run, operations in given.items():
            self._given[run] = self._given.get(run, 0.0) + operations

    def _fade(self, now: float) -> None:
        if now > self._at:
            factor = 0.5 ** ((now - self._at) / HALF_LIFE_S)
            self._given = {run: given * factor for run, given in self._given.items()}
        self._at = max(self._at, now)
