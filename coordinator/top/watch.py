"""Live monitor: the tables of a coordinator, drawn anew each second until ctrl+c."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

from rich.live import Live
from rich.text import Text

from coordinator.top.tables import lines
from shared.clock import Clock, SystemClock
from shared.errors import Configuration, Unauthorized, VolunteerError

if TYPE_CHECKING:
    from coordinator.rules.overview import Overview

EVERY_S = 1.0
LATE_S = 6.0  # a picture older than this is marked as old


class CommandSender(Protocol):
    """Runs an organiser's command, here or on a server."""

    async def __call__(self, command: str, /, **request: Any) -> Any: ...


Connect = Callable[[], AbstractAsyncContextManager[CommandSender]]


async def pictures(connect: Connect, clock: Clock) -> AsyncIterator[tuple[Overview | None, str]]:
    """Yield the newest overview once a second, and why it is old; "" where it is of now.

    Raises Configuration, Unauthorized where there has been no overview yet.
    """
    seen: Overview | None = None
    at = clock.monotonic()

    def late(why: str) -> str:
        return f"{clock.monotonic() - at:.0f} s ago: {why}; asking again"

    while True:
        try:
            async with connect() as ask:
                while True:
                    found: Overview = await ask("top")
                    if seen is None or found.at != seen.at:  # else the server was too busy to look
                        seen, at = found, clock.monotonic()
                    old = clock.monotonic() - at > LATE_S
                    yield seen, late("nothing newer came") if old else ""
                    await clock.sleep(EVERY_S)
        except VolunteerError as error:
            if seen is None and isinstance(error, Configuration | Unauthorized):
                raise
            yield seen, late(error.message)
        await clock.sleep(EVERY_S)


def drawn(seen: Overview | None, old: str, width: int) -> Text:
    """Return a picture as text, cut off at the terminal's end."""
    told = [*([old] if old else []), *(lines(seen, width) if seen is not None else ())]
    return Text("\n".join(told), no_wrap=True, overflow="crop")


def watch(connect: Connect) -> int:
    """Draw until ctrl+c. Raises errors of the first connection."""

    async def draw() -> None:
        async for seen, old in pictures(connect, SystemClock()):
            screen.update(drawn(seen, old, screen.console.width), refresh=True)

    with Live(screen=True, auto_refresh=False) as screen:
        try:
            asyncio.run(draw())
        except KeyboardInterrupt:
            return 0
    return 0
