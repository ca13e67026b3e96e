"""Counts of this process since its start: requests, bytes, and durations.

The counts are plain numbers, so that counting adds almost nothing to a request. The Prometheus
library takes 0.2 s to load; a server loads it at the first scrape.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager

# upper bounds of durations, in seconds
QUICK_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
SLOW_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class TrafficCounter:
    """Requests and bytes of bodies."""

    def __init__(self) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        self.viewers = 0  # open event streams of runs, one for each browser
        self.requests: Counter[tuple[str, str, int]] = Counter()  # method, path template, status
        # seconds of all answers, by method and path template
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)

    def answered(self) -> tuple[int, int]:
        """Return the number of answered requests, and the number answered with 5xx.

        `/ready` does not count: its 503 is no failure, it tells load balancers that this server
        stops.
        """
        requests = [(key, n) for key, n in list(self.requests.items()) if key[1] != "/ready"]
        return sum(n for _, n in requests), sum(n for key, n in requests if key[2] >= 500)

    def count(self, method: str, path: str, status: int, seconds: float) -> None:
        self.requests[method, path, status] += 1
        self.seconds[method, path] += seconds


class Durations:
    """Histogram of durations in seconds over fixed bounds."""

    __slots__ = ("_counts", "bounds", "total_s")

    def __init__(self, bounds: Sequence[float] = QUICK_S) -> None:
        self.bounds = tuple(bounds)
        self.total_s = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.total_s += seconds
        self._counts[bisect_left(self.bounds, seconds)] += 1

    @contextmanager
    def timed(self) -> Generator[None]:
        """Count the time that the block takes, however it ends."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(time.perf_counter() - began)

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return upper bounds in seconds, the last "+Inf", and the durations up to each."""
        bounds, total = [], 0
        for bound, count in zip((*map(repr, self.bounds), "+Inf"), self._counts, strict=True):
            total += count
            bounds.append((bound, float(total)))
        return bounds
