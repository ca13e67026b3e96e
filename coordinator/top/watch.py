"""Live monitor: the tables of a coordinator, drawn anew each second until `q` or ctrl+c."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import TYPE_CHECKING

from rich.live import Live
from rich.text import Text

from coordinator.admin.command import CommandSender
from coordinator.top.tables import lines
from shared.clock import Clock, SystemClock
from shared.errors import Configuration, Unauthorized, VolunteerError

if TYPE_CHECKING:
    from coordinator.rules.overview import Overview

EVERY_S = 1.0  # interval at which the tables are drawn
LATE_S = 6.0  # age from which the shown overview is marked as old
FORGET, QUIT = "f", "q"
ASKING = "asking the coordinator"
KEYS = f"{FORGET} forget servers that are gone   {QUIT} quit"


Connect = Callable[[], AbstractAsyncContextManager[CommandSender]]


async def pictures(
    connect: Connect, clock: Clock, typed: set[str]
) -> AsyncIterator[tuple[Overview | None, str]]:
    """Yield the newest overview once a second, with the reason why it is stale, "" for a fresh
    overview.

    FORGET among the typed keys has the coordinator forget the silent servers first. Raises
    Configuration, Unauthorized where there has been no overview yet.
    """
    overview: Overview | None = None
    at = clock.monotonic()

    def late(why: str) -> str:
        return f"{clock.monotonic() - at:.0f} s ago: {why}; asking again"

    while True:
        try:
            async with connect() as ask:
                from coordinator.admin import upkeep_commands  # `connect` has loaded it

                while True:
                    forget = FORGET in typed
                    typed.discard(FORGET)  # before the request: a key typed meanwhile counts
                    try:
                        newest = await ask(
                            upkeep_commands.top, upkeep_commands.Top(forget_silent=forget)
                        )
                    except VolunteerError:
                        if forget:  # ask again after a failed request
                            typed.add(FORGET)
                        raise
                    # the same overview again: the server was too busy to make another
                    if overview is None or newest.at != overview.at:
                        overview, at = newest, clock.monotonic()
                    old = clock.monotonic() - at > LATE_S
                    yield overview, late("nothing newer came") if old else ""
                    await clock.sleep(EVERY_S)
        except VolunteerError as error:
            if overview is None and isinstance(error, Configuration | Unauthorized):
                raise
            yield overview, late(error.message)
        await clock.sleep(EVERY_S)


def monitor_text(overview: Overview | None, stale_reason: str, width: int, height: int = 0) -> Text:
    """Return a picture as text, cut off at the terminal's end; with a height, the keys below."""
    rows = [
        *([stale_reason] if stale_reason else []),
        *(lines(overview, width) if overview is not None else ()),
    ]
    if height:
        rows = [*rows[: height - 1], *[""] * (height - 1 - len(rows)), KEYS]
    return Text("\n".join(rows), no_wrap=True, overflow="crop")


@contextmanager
def typing(typed: set[str]) -> Iterator[bool]:
    """Collect typed keys; the key that quits cancels this task.

    The end of the terminal cancels it, too. Yields False where single keys cannot be read.
    """
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    loop, task, terminal = asyncio.get_running_loop(), asyncio.current_task(), sys.stdin.fileno()

    def read() -> None:
        try:
            keys = os.read(terminal, 256)
        except OSError:
            keys = b""
        typed.update(keys.decode(errors="replace").lower())
        if not keys:
            loop.remove_reader(terminal)
        if (QUIT in typed or not keys) and task is not None:
            task.cancel()

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    loop.add_reader(terminal, read)
    try:
        yield True
    finally:
        loop.remove_reader(terminal)
        with suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def watch(connect: Connect, hint: Callable[[str], str]) -> int:
    """Draw until `q` or ctrl+c; `hint` completes the commands in the text. Raises the errors of the
    first connection.
    """

    async def draw() -> None:
        typed: set[str] = set()
        with typing(typed) as keys:
            screen.update(monitor_text(None, ASKING, screen.console.size.width), refresh=True)
            async for overview, old in pictures(connect, SystemClock(), typed):
                size = screen.console.size
                screen_text = monitor_text(overview, old, size.width, size.height if keys else 0)
                screen_text.plain = hint(screen_text.plain)
                screen.update(screen_text, refresh=True)

    with (
        Live(screen=True, auto_refresh=False) as screen,
        suppress(KeyboardInterrupt, asyncio.CancelledError),  # ctrl+c, or the key
    ):
        asyncio.run(draw())
    return 0
