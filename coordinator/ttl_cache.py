"""Cached values of a limited age; the first of many concurrent callers loads one for all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from shared.clock import Clock

K = TypeVar("K")
T = TypeVar("T")

REST = 20.0  # a usual `rest`: loads of a slow value take at most one twentieth of the time
AHEAD = 0.75  # share of the age from which on the next value is loaded while the old one is served


class CachedValue(Generic[T]):
    """Cached value of `load`, at most `age_s` old, or `rest` times the duration of the load if that
    is longer: a slow load is repeated less often.

    A failed load raises its error in all its waiters, and is not cached.
    """

    def __init__(
        self, load: Callable[[], Awaitable[T]], age_s: float, clock: Clock, *, rest: float = 0.0
    ) -> None:
        self.load = load
        self._age_s = self._age_min_s = age_s
        self._rest = rest
        self._clock = clock
        self._loading: asyncio.Future[T] | None = None
        self._loaded: tuple[T] | None = None
        self._began_at = self._loaded_at = 0.0  # monotonic

    @property
    def has_loaded(self) -> bool:
        """Return True once a load has succeeded."""
        return self._loaded is not None

    def peek(self) -> T | None:
        """Return the value if it is young enough, without waiting; None otherwise."""
        if self._loaded is None:
            return None
        age = self._clock.monotonic() - self._loaded_at
        if age >= self._age_s * AHEAD:
            if age >= self._age_s:
                return None
            self._begin()
        return self._loaded[0]

    async def get(self) -> T:
        value = self.peek()
        return await asyncio.shield(self._begin()) if value is None else value

    def _begin(self) -> asyncio.Future[T]:
        """Return the running load, or start one."""
        if self._loading is None:
            self._began_at = self._clock.monotonic()
            self._loading = asyncio.ensure_future(self.load())
            self._loading.add_done_callback(self._store)
        return self._loading

    def _store(self, loading: asyncio.Future[T]) -> None:
        failed = loading.cancelled() or loading.exception() is not None
        if loading is self._loading:  # the result of a dropped load is not kept
            self._loading = None
            if not failed:
                self._loaded = (loading.result(),)
                self._loaded_at = self._clock.monotonic()
                took_s = self._loaded_at - self._began_at
                self._age_s = max(self._age_min_s, self._rest * took_s)

    def drop(self) -> None:
        """Drop the value; the next caller loads a new value."""
        self._loading = self._loaded = None


class KeyedCache(Generic[K, T]):
    """Cached values of the most recently requested keys."""

    def __init__(self, age_s: float, clock: Clock, *, rest: float = 0.0, most: int = 64) -> None:
        self._age_s = age_s
        self._clock = clock
        self._rest = rest
        self._most = most
        self._values: dict[K, CachedValue[T]] = {}

    async def get(self, key: K, load: Callable[[], Awaitable[T]]) -> T:
        """Return the value of a key, loaded when due by the `load` of the newest caller, whose
        facts (the time, for example) are of now. Raises its errors.
        """
        value = self._values.pop(key, None)
        if value is None:
            value = CachedValue(load, self._age_s, self._clock, rest=self._rest)
        value.load = load
        self._values[key] = value
        try:
            result = await value.get()
        except Exception:
            # strangers choose some keys: one without a value puts no value of another key out
            if not value.has_loaded and self._values.get(key) is value:
                del self._values[key]
            raise
        while len(self._values) > self._most:
            del self._values[next(iter(self._values))]
        return result

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()
