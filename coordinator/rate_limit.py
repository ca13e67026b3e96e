"""Limits of requests: of a worker, of an address, and of an account that asks a model."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shared.errors import Configuration, TooManyRequests

if TYPE_CHECKING:
    from coordinator.config import Settings

KEYS_MAX = 50_000  # addresses or workers whose rates are remembered
# seconds of each window, and its words
WINDOWS = {
    "second": (1, "a second"),
    "minute": (60, "a minute"),
    "hour": (3600, "an hour"),
    "day": (86_400, "a day"),
}

_RATE = re.compile(r"([1-9][0-9]{0,8}) ?/ ?(second|minute|hour|day)")


class _Buckets:
    """Token buckets of at most `KEYS_MAX` keys: each allows `capacity` requests at once, and is
    refilled evenly within a window.
    """

    def __init__(self, capacity: int, window: str) -> None:
        self._capacity = capacity
        self._window_s, self._window_words = WINDOWS[window]
        self._per_s = capacity / self._window_s
        # key -> tokens left, and the time of that count
        self._left: dict[str, tuple[float, float]] = {}

    def hit(self, key: str, now: float, replicas: int) -> None:
        """Take one token of a key. Raises TooManyRequests with the time to wait.

        Each replica has an equal share, because a balancer spreads the requests of one key.
        """
        full, per_s = max(1.0, self._capacity / replicas), self._per_s / replicas
        left, at = self._left.get(key, (full, now))
        left = min(full, left + (now - at) * per_s)
        if left < 1:
            wait_s = (1 - left) / per_s
            raise TooManyRequests(
                f"more than {self._capacity} requests {self._window_words}; come back in "
                f"{math.ceil(wait_s)} s",
                retry_after_s=wait_s,
            )
        if len(self._left) >= KEYS_MAX and key not in self._left:
            self._forget(now)
        self._left[key] = (left - 1, now)

    def _forget(self, now: float) -> None:
        """Drop the keys whose buckets are full again; if too many keys remain, drop all."""
        recent = {
            key: entry for key, entry in self._left.items() if now - entry[1] < self._window_s
        }
        self._left = recent if len(recent) < KEYS_MAX else {}


class PerMinute:
    """Limits of requests a minute; callers name the capacity, and each replica counts a share."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self.replicas = 1
        self._buckets: dict[int, _Buckets] = {}

    def hit(self, key: str, capacity: int) -> None:
        """Count one request. Raises TooManyRequests with the time to wait."""
        bucket = self._buckets.setdefault(capacity, _Buckets(capacity, "minute"))
        bucket.hit(key, self._monotonic(), self.replicas)


class Rates:
    """Limits of requests per worker and per address; each replica counts its share.

    The package `limits` is not used: its in-memory storage starts a thread every 10 ms, which
    doubled the time of a heartbeat (measured: 25 to 50 us).
    """

    def __init__(self, settings: Settings, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self.replicas = 1  # serving replicas, this one included
        self._buckets: dict[str, _Buckets | None] = {}
        for kind in ("worker", "ip", "register"):
            text = getattr(settings, f"rate_{kind}")
            if text in ("", "off"):
                self._buckets[kind] = None
                continue
            match = _RATE.fullmatch(text.strip())
            if match is None:
                raise Configuration(
                    f'setting "rate_{kind}" must look like 600/minute, not "{text}"'
                )
            self._buckets[kind] = _Buckets(int(match[1]), match[2])

    def hit(self, kind: str, key: str) -> None:
        """Count one request. Raises TooManyRequests with the time to wait."""
        if (bucket := self._buckets[kind]) is not None:
            bucket.hit(key, self._monotonic(), self.replicas)
