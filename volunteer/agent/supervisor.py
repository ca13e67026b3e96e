"""One working shift: lanes and loops side by side, and their end in good order.

When asked to end, tasks that need only seconds more are finished, the others given back or saved,
and results handed in; each of these waits is bounded. A loop that ends by itself is a fault: it is
told, and the volunteer ends with it, because one that no longer beats or hands in only looks alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import Internal, VolunteerError
from volunteer.agent.context import Parts

FLUSH_S = 8.0  # for results, when asked to end
GIVE_BACK_S = 8.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Something that goes on for the whole shift.

    One that is not vital may fail without ending it.
    """

    name: str
    work: Coroutine[Any, Any, None]
    vital: bool = True


def broken(what: str, error: BaseException | None = None) -> Internal:
    """The sentence for something that must not happen; where it came from goes to the log."""
    log.error("%s failed", what, exc_info=error)
    why = "it ended by itself" if error is None else f"{type(error).__name__}: {error}"
    return Internal(f"{what} failed ({why})")


class Shift:
    """Supervises the loops of the agent and ends them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._desk = parts.desk
        self._clock = parts.clock

    async def run(self, lanes: Sequence[Loop], loops: Sequence[Loop]) -> None:
        """Until every lane has ended or the desk says so; `loops` go on until results are handed
        in.
        """
        background = [asyncio.create_task(self._keep(loop, ends=False)) for loop in loops]
        work = [asyncio.create_task(self._keep(lane, ends=True)) for lane in lanes]
        try:
            await self._until_over(work)
            await _cancel(work)
            await self._flush()
        finally:
            await _cancel([*work, *background])

    async def _keep(self, loop: Loop, *, ends: bool) -> None:
        """Run a loop.

        When it fails, or ends though it should not, the volunteer gives up with a sentence.
        """
        try:
            await loop.work
            if ends:
                return
            error: VolunteerError = broken(loop.name)
        except VolunteerError as known:
            error = known
        except Exception as unknown:
            error = broken(loop.name, unknown)
        if loop.vital:
            self._desk.give_up(error)
        else:
            self._parts.hub.notice(error.message, "warning")

    async def _until_over(self, work: list[asyncio.Task[None]]) -> None:
        while not all(task.done() for task in work):
            change = asyncio.ensure_future(self._desk.change())
            try:
                if self._desk.fatal is not None or self._desk.closing in ("release", "save"):
                    await self._wind_up(work)
                    return
                if self._desk.closing == "finish" and not self._desk.held:
                    return
                going = [task for task in work if not task.done()]
                await asyncio.wait([*going, change], return_when=asyncio.FIRST_COMPLETED)
            finally:
                change.cancel()

    async def _wind_up(self, work: list[asyncio.Task[None]]) -> None:
        saving = self._desk.closing == "save" or self._desk.fatal is not None
        if not saving:
            await self._let_quick_ones_finish()
        for held in list(self._desk.held.values()):
            if saving:
                held.end("saved", "kept for the next start", save=True)
            else:
                held.end("released", "the volunteer ends")
        await asyncio.wait(work, timeout=GIVE_BACK_S)

    async def _let_quick_ones_finish(self) -> None:
        until = self._clock.monotonic() + self._parts.settings.quit_seconds
        while self._ends_before(until) and self._desk.fatal is None:
            await self._desk.unless(lambda: not self._ends_before(until), self._clock.sleep(0.5))

    def _ends_before(self, until: float) -> bool:
        """Return True if a task in work is expected to be done by then."""
        left = until - self._clock.monotonic()
        running = [
            held.handle.latest
            for held in self._desk.held.values()
            if held.handle and not self._desk.paused(held.stored.device)
        ]
        return any(r is not None and r.eta_s is not None and r.eta_s < left for r in running)

    async def _flush(self) -> None:
        """Hand in what is ready: bounded when told to stop, without haste when all tasks are
        done.
        """
        outbox, desk = self._parts.outbox, self._desk
        until = self._clock.monotonic() + FLUSH_S
        while len(outbox) and desk.fatal is None:
            left = until - self._clock.monotonic()
            if desk.closing in ("release", "save") and left <= 0:
                self._parts.hub.notice(f"{len(outbox)} results are kept and sent at the next start")
                return
            await desk.unless(lambda: not len(outbox), self._clock.sleep(0.5))


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
