"""Polling: one query at a time, one a second at most; the last picture stays while no answer
comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from coordinator.rules.overview import Overview
from shared.clock import Clock
from shared.errors import BadRequest, Configuration, NotFound, Unauthorized, VolunteerError

EVERY_S = 1.0
LATE_S = 6.0  # without an answer for so long the picture is said to be old


class CommandSender(Protocol):
    """Runs an organiser's command, here or on a server."""

    async def __call__(self, command: str, /, **request: Any) -> Any: ...


Asked = tuple[str, dict[str, Any]]  # a command and its request
Connect = Callable[[], AbstractAsyncContextManager[CommandSender]]


@dataclass(frozen=True, slots=True)
class FeedReply:
    """Answer, or the reason why there is none."""

    reply: Any = None
    of: Asked | None = None  # the query beside the overview that it answers
    error: str = ""
    missing: str = ""  # of what is looked at beside: there is no such thing
    fatal: VolunteerError | None = None


class MonitorFeed:
    """Polls the overview and, in turns, the open detail page."""

    def __init__(self, connect: Connect, clock: Clock, beside: Callable[[], Asked | None]) -> None:
        self._connect = connect
        self._clock = clock
        self._ask: CommandSender | None = None
        self._soon = asyncio.Event()
        self._beside = beside
        self._newest = 0.0  # the instant that the newest picture is of, by the other clock
        self.at: float | None = None  # monotonic, when the newest picture came
        self.error = ""

    @property
    def age_s(self) -> float:
        """Seconds since the newest picture came."""
        return 0.0 if self.at is None else self._clock.monotonic() - self.at

    @property
    def stale(self) -> bool:
        """Return True if the picture is old."""
        return bool(self.error) or self.age_s > LATE_S

    async def news(self) -> AsyncIterator[FeedReply]:
        """Yield replies until closed. Errors that no waiting can cure are fatal."""
        while True:
            try:
                async with self._connect() as self._ask:
                    async for news in self._poll(self._ask):
                        yield news
            except (Configuration, Unauthorized) as error:
                fatal = error if self.at is None else None
                self.error = error.message
                yield FeedReply(error=error.message, fatal=fatal)
            except VolunteerError as error:
                self.error = error.message
                yield FeedReply(error=error.message)
            finally:
                self._ask = None
            await self._pause()

    async def _poll(self, ask: CommandSender) -> AsyncIterator[FeedReply]:
        """Poll in turns: the overview, then the open detail page."""
        turn = 0
        while True:
            beside = self._beside() if turn % 2 else None
            turn += 1
            if beside is None:
                seen: Overview = await ask("top")
                self.error = ""
                if seen.at != self._newest:  # else the server was too busy to look again
                    self._newest, self.at = seen.at, self._clock.monotonic()
                yield FeedReply(seen)
            else:
                try:
                    yield FeedReply(await ask(beside[0], **beside[1]), beside)
                except (NotFound, BadRequest) as error:
                    yield FeedReply(missing=error.message)
            await self._pause()

    async def run(self, command: str, **request: Any) -> Any:
        """Run a command now. Raises its errors."""
        if self._ask is not None:
            return await self._ask(command, **request)
        async with self._connect() as ask:
            return await ask(command, **request)

    def hurry(self) -> None:
        """Ask again at once: something was changed, or opened."""
        self._soon.set()

    async def _pause(self) -> None:
        self._soon.clear()
        waiting = asyncio.ensure_future(self._soon.wait())
        tick = asyncio.ensure_future(self._clock.sleep(EVERY_S))
        try:
            await asyncio.wait((waiting, tick), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            tick.cancel()
