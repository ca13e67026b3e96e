"""Counts of what goes over the wire, for the summary and for Prometheus; of this process, since it
started.
"""

from __future__ import annotations

from collections import Counter


class Traffic:
    """Plain numbers: counting costs next to nothing on the way of a request."""

    def __init__(self) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        self.requests: Counter[tuple[str, str, int]] = Counter()  # method, path template, status
        self.seconds: Counter[tuple[str, str]] = Counter()  # summed, by method and path template

    def count(self, method: str, path: str, status: int, seconds: float) -> None:
        self.requests[method, path, status] += 1
        self.seconds[method, path] += seconds  # type: ignore[assignment] # a Counter holds floats as well
