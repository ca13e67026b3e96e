"""Event bus of a volunteer: one source, many subscribers, none of which blocks the agent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from shared.clock import Clock
from volunteer.control import events
from volunteer.control.events import AnyEvent
from volunteer.control.status import Status, fold

if TYPE_CHECKING:
    from collections.abc import Iterator

PENDING_MAX = 1000  # unread events of one subscriber
_PROGRESS = (
    events.Training,
    events.Fetching,
    events.Uploading,
    events.BenchmarkProgress,
    events.Registering,
)


class Subscription:
    """Queue of a subscriber's events. A full queue drops progress events first, then the oldest
    events.
    """

    def __init__(self) -> None:
        self._pending: deque[AnyEvent] = deque()
        self._arrived = asyncio.Event()
        self._closed = False

    def push(self, event: AnyEvent) -> None:
        if self._pending and isinstance(event, _PROGRESS) and _same(self._pending[-1], event):
            self._pending.pop()  # the newer event replaces the unread one
        self._pending.append(event)
        if len(self._pending) > PENDING_MAX:
            stale = next((e for e in self._pending if isinstance(e, _PROGRESS)), self._pending[0])
            self._pending.remove(stale)
        self._arrived.set()

    def close(self) -> None:
        """End the iteration after the pending events."""
        self._closed = True
        self._arrived.set()

    async def __aiter__(self) -> AsyncIterator[AnyEvent]:
        while True:
            while self._pending:
                yield self._pending.popleft()
            if self._closed:
                return
            self._arrived.clear()
            await self._arrived.wait()


class EventBus:
    """Stamps events, folds them into the status, and passes them to subscribers, all on one event
    loop.
    """

    def __init__(self, clock: Clock, status: Status | None = None) -> None:
        self.status = status or Status()
        self._clock = clock
        self._subscriptions: set[Subscription] = set()

    def emit(self, event: AnyEvent) -> None:
        stamped = msgspec.structs.replace(event, at=event.at or self._clock.now())
        self.status = fold(self.status, stamped)
        for subscription in self._subscriptions:
            subscription.push(stamped)

    def notice(self, message: str, level: str = "info") -> None:
        self.emit(events.Notice(level=level, message=message))

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        subscription = Subscription()
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def close(self) -> None:
        """End every subscription after the events in its queue."""
        for subscription in self._subscriptions:
            subscription.close()


def _same(older: AnyEvent, newer: AnyEvent) -> bool:
    """Return True if both are events of one type about one task."""
    return type(older) is type(newer) and getattr(older, "task", 0) == getattr(newer, "task", 0)
