"""Signals that wake waiters: topics in this process, bridged to the other processes of the same
database.

Topics: "run:<id>" (its newest version or its state changed), "runs" (the state of any changed),
"versions", "contributions", "queue" (there may be work), "recomputes", "volunteers".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from shared.clock import Clock, SystemClock

if TYPE_CHECKING:
    from coordinator.database.engine.open_database import Database


class Signals:
    """Announces that a topic changed, without content: a woken waiter queries for itself."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._moment = 0  # number of notifications so far
        self._everything = 0  # moment of the last notification to every topic at once
        self._last: dict[str, int] = {}  # topic -> the moment of its last notification
        # Ordered by arrival, so that a simulation wakes waiters in the same order every time.
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        self._send: Callable[[str], None] = lambda topic: None

    async def connect(self, db: Database) -> None:
        """Bridge the signals to the other processes that use the database, within a second."""
        self._send = await db.bridge(self.deliver)

    def notify(self, topic: str) -> None:
        """Wake every waiter for `topic`, here and in other processes. Call it on the event loop
        after the commit.
        """
        self.deliver(topic)
        self._send(topic)

    def deliver(self, topic: str | None) -> None:
        """Wake the waiters on `topic` in this process; None wakes all."""
        self._moment += 1
        if topic is None:
            self._everything = self._moment
            sleepers = [future for waiting in self._waiting.values() for future in waiting]
        else:
            self._last[topic] = self._moment
            sleepers = list(self._waiting.get(topic, ()))
        for future in sleepers:
            if not future.done():
                future.set_result(None)

    def watch(self, *topics: str) -> TopicWatch:
        """Return a watch, which misses no notification from now on, even before `wait` is called.

        A caller that must read first to know its topics names them later (`TopicWatch.topics`), and
        misses none either.
        """
        return TopicWatch(self, topics)

    def _latest(self, topics: tuple[str, ...]) -> int:
        """Return the moment of the last notification about one of `topics`."""
        return max([self._everything, *(self._last.get(topic, 0) for topic in topics)])

    async def _sleep(self, topics: tuple[str, ...], timeout_s: float) -> None:
        """Sleep until one of `topics` is notified, or time is up."""
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


class TopicWatch:
    """One watcher of some topics."""

    def __init__(self, signals: Signals, topics: tuple[str, ...]) -> None:
        self.topics = topics
        self._signals = signals
        self._since = signals._moment

    async def wait(self, timeout_s: float) -> bool:
        """Return True once a topic was notified since `watch` or the last `wait`, else False."""
        if not self._news() and timeout_s > 0:
            await self._signals._sleep(self.topics, timeout_s)
        news = self._news()
        self._since = self._signals._moment
        return news

    def _news(self) -> bool:
        return self._signals._latest(self.topics) > self._since
