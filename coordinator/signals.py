"""Signals that wake waiters on a topic, in this process and in the others of the same database.

Topics: "run:<id>" (the run's newest version or state changed), "runs" (the state of some run
changed), "versions", "contributions", "queue" (there may be work), "recomputes", "volunteers",
"alerts".
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING

from shared.clock import Clock, SystemClock

if TYPE_CHECKING:
    from coordinator.database.engine.open_database import Database

STEP = 32  # most watchers of a line that are woken together, so that replicas take turns


class Signals:
    """Announces that a topic changed, without content: a woken waiter queries for itself."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.moment = 0  # number of notifications so far
        self._everything = 0  # moment of the last notification to every topic at once
        self._last: dict[str, int] = {}  # topic -> the moment of its last notification
        # Ordered by arrival, so that a simulation wakes waiters in the same order every time.
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        self._lines: dict[str, WaitingLine] = {}
        self.arrivals = itertools.count()
        self._send: Callable[[str], None] = lambda topic: None

    async def connect(self, db: Database) -> None:
        """Exchange notifications with the other processes of the database; they arrive within a
        second.
        """
        self._send = await db.bridge(self.deliver)

    def notify(self, topic: str) -> None:
        """Wake the waiters for `topic`, here and in other processes. Call it on the event loop
        after the commit.
        """
        self.deliver(topic)
        self._send(topic)

    def deliver(self, topic: str | None) -> None:
        """Wake the waiters on `topic` in this process; None wakes all."""
        self.moment += 1
        if topic is None:
            self._everything = self.moment
            sleepers = [future for waiting in self._waiting.values() for future in waiting]
        else:
            self._last[topic] = self.moment
            sleepers = list(self._waiting.get(topic, ()))
        for future in sleepers:
            if not future.done():
                future.set_result(None)
        for name, line in self._lines.items():
            if topic in (name, None):
                line.news(self.moment)

    def line(self, topic: str) -> WaitingLine:
        """Return the line of the watchers of `topic`."""
        return self._lines.setdefault(topic, WaitingLine())

    def watch(self, *topics: str) -> TopicWatch:
        """Return a watch, which misses no notification from now on, even before `wait` is called.

        A caller that learns its topics from a read may set them later (`TopicWatch.topics`), and
        misses none either.
        """
        return TopicWatch(self, topics)

    def _latest(self, topics: tuple[str, ...]) -> int:
        """Return the moment of the last notification about one of `topics`."""
        return max([self._everything, *(self._last.get(topic, 0) for topic in topics)])

    async def _sleep(
        self, topics: tuple[str, ...], timeout_s: float, wake: asyncio.Future[None]
    ) -> None:
        """Sleep until one of `topics` is notified, `wake` is set, or time is up."""
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
        self.arrival = next(signals.arrivals)
        self.since = signals.moment
        self._signals = signals

    async def wait(self, timeout_s: float, line: WaitingLine | None = None) -> bool:
        """Return True once a topic was notified since `watch` or the last `wait`, or once the line
        wakes this watcher; False after `timeout_s` seconds.
        """
        self.wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._news() and timeout_s > 0:
            with line.standing(self) if line else nullcontext():
                await self._signals._sleep(self.topics, timeout_s, self.wake)
        news = self._news() or self.wake.done()
        self.since = self._signals.moment
        return news

    def _news(self) -> bool:
        return self._signals._latest(self.topics) > self.since


class WaitingLine:
    """Watchers for work, in order of arrival. News wakes the oldest, which looks for work; as long
    as watchers leave tasks, the next few are woken. If all were woken at once, most would find no
    task.
    """

    def __init__(self) -> None:
        self._news = 0  # moment of the newest news
        self._empty = 0  # moment of the newest look that left nothing to take
        self._refused: frozenset[int] = frozenset()  # tasks that every watcher refused
        self._probing = False  # True until the watcher that the news woke has looked
        self._standing: list[TopicWatch] = []

    @contextmanager
    def standing(self, watch: TopicWatch) -> Iterator[None]:
        """Let a watcher stand in the line inside the block."""
        bisect.insort(self._standing, watch, key=_arrival)
        self._probe()
        try:
            yield
        finally:
            del self._standing[bisect.bisect_left(self._standing, watch.arrival, key=_arrival)]

    def news(self, moment: int) -> None:
        """Wake the oldest watcher: there may be work."""
        self._news = moment
        self._probe()

    def begin_look(self) -> None:
        """Note that the awake watchers look for work now."""
        self._probing = False

    def leave(self) -> None:
        """Wake the next watcher in place of one that left, which may have been woken to look."""
        self._probing = False
        self._probe()

    def end_look(
        self, since: int, count: int, untaken: frozenset[int] | None, *, took: bool
    ) -> None:
        """Wake the next watchers after a look that began at moment `since`: as many as the `count`
        of tasks that it left, at most STEP; STEP if it took no task.

        `untaken` are the tasks that it left, None if it did not read the tasks. Once every watcher
        has refused all of them, they wake nobody.
        """
        if untaken is None:
            self._wake(STEP)
        else:
            self._refused &= untaken
            if not untaken or (untaken <= self._refused and not took):
                self._empty = max(self._empty, since)
            elif not self._wake(min(count, STEP) if took else STEP) and not took:
                self._refused = untaken
        self._probe()

    def _probe(self) -> None:
        if self._news > self._empty and not self._probing:
            self._probing = self._wake(1)

    def _wake(self, count: int) -> bool:
        """Wake the oldest watchers that have not looked since the news; return False if every
        watcher has looked.
        """
        late = (watch.wake for watch in self._standing if watch.since < self._news)
        woken = [*itertools.islice((wake for wake in late if not wake.done()), count)]
        for wake in woken:
            wake.set_result(None)
        return bool(woken)


_arrival = attrgetter("arrival")
