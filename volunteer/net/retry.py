"""Delays of retries: jittered exponential backoff that obeys the server's `Retry-After`."""

from __future__ import annotations

import random
from dataclasses import dataclass

from shared.errors import Internal, TooManyRequests, Unavailable, VolunteerError

FIRST_S = 0.5
LONGEST_S = 60.0
RETRY_AFTER_S_MAX = 3600.0  # longest `Retry-After` that is obeyed
FOREVER = float("inf")


def is_temporary(error: VolunteerError) -> bool:
    """Return True if the same request may succeed later."""
    return isinstance(error, Unavailable | TooManyRequests | Internal)


@dataclass(slots=True)
class Backoff:
    """Delays of one series of failures; call `reset` after a success."""

    rng: random.Random
    first_s: float = FIRST_S
    longest_s: float = LONGEST_S
    failures: int = 0

    def next(self, error: VolunteerError | None = None) -> float:
        """Return the seconds to wait before the next try: doubled with each failure, jittered, and
        at least the server's `Retry-After`.
        """
        self.failures += 1
        ceiling = min(self.longest_s, self.first_s * 2.0 ** min(self.failures - 1, 30))
        wait = ceiling * self.rng.uniform(0.5, 1.0)
        server_wait_s = error.retry_after_s if error is not None else None
        if server_wait_s is not None and server_wait_s > 0:
            wait = max(wait, min(server_wait_s, RETRY_AFTER_S_MAX) * self.rng.uniform(1.0, 1.1))
        return wait

    def reset(self) -> None:
        self.failures = 0
