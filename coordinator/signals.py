"""Waking those who wait: topics in this process, bridged to the other processes of the same database.

Topics: "run:<id>" (its head, state or merge moved), "contributions:<run id>", "queue" (there may be work), "volunteers".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from shared.clock import Clock, SystemClock

if TYPE_CHECKING:
    from coordinator.store.database import Database


class Signals:
    """Says that something changed, never what: whoever wakes looks for himself."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._count: dict[str, int] = {}
        self._everything = 0
        # In the order in which they came, so that a simulation wakes them in the same order every time.
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        self._send: Callable[[str], None] = lambda topic: None

    async def connect(self, db: Database) -> None:
        """Hear and tell the other processes that use the database; what they do is known within a second."""
        self._send = await db.bridge(self.deliver)

    def notify(self, topic: str) -> None:
        """Wake everyone who watches `topic`, here and elsewhere. Call it on the loop, after the commit."""
        self.deliver(topic)
        self._send(topic)

    def deliver(self, topic: str | None) -> None:
        """Wake those who watch `topic` in this process; None wakes all."""
        if topic is None:
            self._everything += 1
            sleepers = [future for waiting in self._waiting.values() for future in waiting]
        else:
            self._count[topic] = self._count.get(topic, 0) + 1
            sleepers = list(self._waiting.get(topic, ()))
        for future in sleepers:
            if not future.done():
                future.set_result(None)

    def watch(self, *topics: str) -> Watch:
        """Begin to watch: what is notified from now on is not missed, even before `wait` is called."""
        return Watch(self, topics)

    def _seen(self, topics: tuple[str, ...]) -> tuple[int, ...]:
        return (self._everything, *(self._count.get(topic, 0) for topic in topics))

    async def _sleep(self, topics: tuple[str, ...], timeout_s: float) -> None:
        """Until one of `topics` is notified, or time is up."""
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for topic in topics:
            self._waiting.setdefault(topic, {})[wake] = None
        sleeper = asyncio.ensure_future(self._clock.sleep(timeout_s))
        try:
            await asyncio.wait((wake, sleeper), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeper.cancel()
            for topic in topics:
                waiting = self._waiting.get(topic, {})
                waiting.pop(wake, None)
                if not waiting:
                    self._waiting.pop(topic, None)


class Watch:
    """One watcher of some topics."""

    def __init__(self, signals: Signals, topics: tuple[str, ...]) -> None:
        self._signals = signals
        self._topics = topics
        self._last = signals._seen(topics)

    async def wait(self, timeout_s: float) -> bool:
        """True as soon as something was notified since `watch` or the last `wait`; False when time is up."""
        if self._news() or timeout_s <= 0:
            return self._take()
        await self._signals._sleep(self._topics, timeout_s)
        return self._take()

    def _news(self) -> bool:
        return self._signals._seen(self._topics) != self._last

    def _take(self) -> bool:
        news = self._news()
        self._last = self._signals._seen(self._topics)
        return news
