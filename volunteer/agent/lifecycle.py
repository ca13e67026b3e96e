"""Lifecycle of a running agent: whether it is finishing, closing or failed, and the signal of each
change, for which its loops wait. Only the event loop may call it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

from shared.clock import Clock
from shared.errors import Banned, Configuration, Unauthorized, UpgradeRequired, VolunteerError
from volunteer.control.commands import How

FATAL = (Unauthorized, Banned, UpgradeRequired, Configuration)

T = TypeVar("T")


class Lifecycle:
    """State of the agent: whether it takes work, must end, or cannot continue; signals changes."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.finishing = False  # no new work after the present tasks
        self.closing: How | None = None
        self.fatal: VolunteerError | None = None
        self.retries = 0  # retries that the owner requested
        self.metered = False  # the rule for a metered connection pauses all devices
        self._changed = asyncio.Event()

    @property
    def ending(self) -> bool:
        return self.closing is not None or self.fatal is not None

    @property
    def winding_up(self) -> bool:
        return self.ending or self.finishing

    def finish(self) -> None:
        """Take no new work."""
        self.finishing = True
        self.notify()

    def take_work_again(self) -> bool:
        """End `finish`. Return True if it was active."""
        was, self.finishing = self.finishing, False
        return was

    def close(self, how: How) -> None:
        """End the agent; a more urgent order replaces "finish"."""
        if self.closing in (None, "finish"):
            self.closing = how
        self.notify()

    def give_up(self, error: VolunteerError) -> None:
        """End the agent with this error; the first error counts."""
        self.fatal = self.fatal or error
        self.notify()

    def retry(self) -> None:
        """End the delays of all loops now."""
        self.retries += 1
        self.notify()

    # The signal.

    def change(self) -> Coroutine[Any, Any, Literal[True]]:
        """Wait for the next change. Call it before checking the condition, await it after."""
        return self._changed.wait()

    def notify(self) -> None:
        """Wake all loops that wait for a change: of leases, pauses, results, runs, lifecycle."""
        before, self._changed = self._changed, asyncio.Event()
        before.set()

    async def unless(self, hindrance: Callable[[], bool], work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`, or cancel it and return None once `hindrance` holds."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                changed = asyncio.ensure_future(self.change())
                if hindrance():
                    changed.cancel()
                    return None
                await asyncio.wait({task, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds()` is true; it is called again after each change."""
        while True:
            change = self.change()
            if holds():
                change.close()
                return
            await change

    async def files_allowed(self) -> None:
        """Wait while the rule for a metered connection pauses work: no further file is moved."""
        await self.until(lambda: not self.metered)

    async def sleep(self, seconds: float, unless: Callable[[], bool]) -> None:
        """Sleep, but stop as soon as `unless` holds."""
        await self.unless(unless, self.clock.sleep(seconds))
