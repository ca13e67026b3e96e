"""A value that may be a moment old: loaded by whoever asks first, shared by all who ask meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from shared.clock import Clock

T = TypeVar("T")


class Fresh(Generic[T]):
    """What `load` gave at most `age_s` ago. A failed load is told to all who waited for it, and not kept."""

    def __init__(self, load: Callable[[], Awaitable[T]], age_s: float, clock: Clock) -> None:
        self._load = load
        self._age_s = age_s
        self._clock = clock
        self._loading: asyncio.Future[T] | None = None
        self._loaded_at = float("-inf")

    async def get(self) -> T:
        loading = self._loading
        if loading is None or (loading.done() and self._stale(loading)):
            loading = self._loading = asyncio.ensure_future(self._load())
            loading.add_done_callback(self._note)
        return await asyncio.shield(loading)

    def _stale(self, loaded: asyncio.Future[T]) -> bool:
        failed = loaded.cancelled() or loaded.exception() is not None
        return failed or self._clock.monotonic() - self._loaded_at >= self._age_s

    def _note(self, _: asyncio.Future[T]) -> None:
        self._loaded_at = self._clock.monotonic()

    def drop(self) -> None:
        """Forget: the next one who asks loads anew."""
        self._loading = None
