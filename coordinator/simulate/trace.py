"""Trace of every machine of a simulation: segments of virtual time, and the bytes it moved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

State = Literal["away", "claim", "wait", "down", "prepare", "train", "up"]


@dataclass(slots=True)
class Trace:
    """One machine. Time is in seconds since the simulation began."""

    name: str
    segments: list[tuple[float, float, State]] = field(default_factory=list)  # start, stop, state
    state: State = "away"
    since: float = 0.0
    up_bytes: int = 0
    down_bytes: int = 0
    steps: int = 0
    tasks: int = 0
    # by state or reason at the answer; merged counts as accepted
    verdicts: Counter[str] = field(default_factory=Counter)

    def enter(self, state: State, now: float) -> None:
        """From now on the machine is in this state."""
        if now > self.since:
            self.segments.append((self.since, now, self.state))
        self.state, self.since = state, now

    def seconds(self) -> Counter[State]:
        """Return the seconds spent in each state."""
        found: Counter[State] = Counter()
        for start, stop, state in self.segments:
            found[state] += stop - start  # type: ignore[assignment]  # a Counter of seconds
        return found
