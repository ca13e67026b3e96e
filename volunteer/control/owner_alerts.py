"""Alerts to the owner about failures that need a person.

`AlertRules` decides from the events alone. One kind of trouble is reported at most once an hour.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from shared.sentences import Sentence
from shared.text import duration, printable
from volunteer.control import events
from volunteer.control.event_bus import EventBus, Subscription
from volunteer.control.events import AnyEvent
from volunteer.i18n.coordinator import judged

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

REJECTED_TOLD = 3  # results in a row
AWAY_TOLD_S = 1800.0  # without an answer of the coordinator
QUIET_S = 3600.0  # between two alerts of one kind
CHARS_MAX = 300


class OwnerAlert(msgspec.Struct, frozen=True, kw_only=True):
    """Alert to the owner: trouble that needs a person."""

    kind: str  # "ended", "failing", "rejected", "away"
    message: str


class AlertRules:
    """Chooses the events that are worth an alert. Pure but for its memory."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}  # kind -> when
        self._rejected = 0
        self._away_since: float | None = None

    def hear(self, event: AnyEvent) -> OwnerAlert | None:
        """Return the alert of an event, if it is one and was not sent recently."""
        alert = self._of(event)
        if alert is None:
            return None
        last = self._told.get(alert.kind)
        if last is not None and event.at - last < QUIET_S:
            return None
        self._told[alert.kind] = event.at
        return alert

    def _of(self, event: AnyEvent) -> OwnerAlert | None:
        match event:
            case events.Stopped(code=code, message=message) if code != 0:
                return OwnerAlert(
                    kind="ended",
                    message=Sentence("the volunteer has ended: {message}", message=message),
                )
            case events.Notice(level="error", message=message):
                return OwnerAlert(kind="failing", message=message)
            case events.Judged(verdict=verdict):
                return self._judged(verdict.state, judged(verdict))
            case events.Connection():
                return self._connection(event)
            case _:
                return None

    def _judged(self, state: str, why: str) -> OwnerAlert | None:
        if state in ("accepted", "merged", "superseded"):
            self._rejected = 0
        if state != "rejected":
            return None
        self._rejected += 1
        if self._rejected < REJECTED_TOLD:
            return None
        said = Sentence("{n} results in a row were rejected", n=self._rejected)
        return OwnerAlert(
            kind="rejected", message=Sentence("{said}: {why}", said=said, why=why) if why else said
        )

    def _connection(self, event: events.Connection) -> OwnerAlert | None:
        if event.online:
            self._away_since = None
            return None
        if self._away_since is None:
            self._away_since = event.at
        away_s = event.at - self._away_since
        if away_s < AWAY_TOLD_S:
            return None
        said = Sentence(
            "the coordinator has not answered for {time}: {message}",
            time=duration(away_s),
            message=event.message,
        )
        return OwnerAlert(kind="away", message=said)


@asynccontextmanager
async def alerting(hub: EventBus, rings: Callable[[], bool]) -> AsyncIterator[None]:
    """Emit the alerts of one volunteer's events until the block ends, where its owner chose so."""
    rules = AlertRules()

    async def listen(new: Subscription) -> None:
        async for event in new:
            alert = rules.hear(event)
            if alert is not None and rings():
                hub.emit(events.Alerted(message=printable(alert.message, CHARS_MAX)))

    with hub.subscribe() as new:
        listening = asyncio.create_task(listen(new))
        try:
            yield
        finally:
            new.close()
            await listening
