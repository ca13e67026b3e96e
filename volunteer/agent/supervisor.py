"""Supervision of the agent's parallel loops, and their orderly end.

At the end, tasks that need only seconds more are finished unless all tasks are saved, the other
tasks are released or saved, and ready results are submitted; each of these steps has a time limit.
A loop that ends before it is asked to is a fault and is reported; if the loop is vital, the
volunteer ends: without heartbeats, for example, its work would be lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import Internal, VolunteerError
from shared.sentences import Sentence, plural
from volunteer.agent.pause_board import PauseBoard
from volunteer.agent.workplace import Workplace

FLUSH_S = 8.0  # time to submit results when the agent has to end
GIVE_BACK_S = 8.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Loop with its name for messages; one that is not vital may fail without ending the agent."""

    name: str
    work: Coroutine[Any, Any, None]
    vital: bool = True


def fault_of(part: str, error: BaseException | None = None) -> Internal:
    """Return the error for a fault of this program; its traceback goes to the log."""
    log.error("%s failed", part, exc_info=error)
    why = Sentence("it ended by itself") if error is None else f"{type(error).__name__}: {error}"
    return Internal(Sentence("{what} failed ({why})", what=part, why=why))


@dataclass(eq=False, kw_only=True)
class Supervisor:
    """Runs the loops of the agent and ends them."""

    place: Workplace
    pauses: PauseBoard
    quit_s: float  # time for nearly finished tasks when the agent ends

    async def run(self, devices: Sequence[Loop], loops: Sequence[Loop]) -> None:
        """Run until all devices have ended or the agent ends; `loops` run until the last
        submission.
        """
        background = [asyncio.create_task(self._run_loop(loop, ends=False)) for loop in loops]
        work = [asyncio.create_task(self._run_loop(device, ends=True)) for device in devices]
        try:
            await self._until_over(work)
            await _cancel(work)
            await self._flush()
        finally:
            await _cancel([*work, *background])

    async def _run_loop(self, loop: Loop, *, ends: bool) -> None:
        """Run a loop; if it fails or ends early, a vital loop ends the volunteer, others warn."""
        try:
            await loop.work
            if ends:
                return
            error: VolunteerError = fault_of(loop.name)
        except VolunteerError as volunteer_error:
            error = volunteer_error
        except Exception as bug:
            error = fault_of(loop.name, bug)
        if loop.vital:
            self.place.life.give_up(error)
        else:
            self.place.bus.notice(error.message, "warning")

    async def _until_over(self, work: list[asyncio.Task[None]]) -> None:
        life = self.place.life
        while not all(task.done() for task in work):
            change = asyncio.ensure_future(life.change())
            try:
                if life.fatal is not None or life.closing in ("release", "save"):
                    await self._wind_up(work)
                    return
                if life.closing == "finish" and not self.place.held:
                    return
                going = [task for task in work if not task.done()]
                await asyncio.wait([*going, change], return_when=asyncio.FIRST_COMPLETED)
            finally:
                change.cancel()

    async def _wind_up(self, work: list[asyncio.Task[None]]) -> None:
        saving = self.place.life.closing == "save" or self.place.life.fatal is not None
        if not saving:
            await self._let_quick_ones_finish()
        for lease in self.place.held:
            if saving:
                lease.end("saved", Sentence("kept for the next start"), save=True)
            else:
                lease.end("released", Sentence("the volunteer ends"))
        await asyncio.wait(work, timeout=GIVE_BACK_S)

    async def _let_quick_ones_finish(self) -> None:
        life = self.place.life
        until = life.clock.monotonic() + self.quit_s
        while self._ends_before(until) and life.fatal is None:
            await life.unless(lambda: not self._ends_before(until), life.clock.sleep(0.5))

    def _ends_before(self, until: float) -> bool:
        """Return True if a running task is expected to end before `until`."""
        left = until - self.place.life.clock.monotonic()
        running = [
            work.handle.latest
            for work in self.place.held
            if work.handle and not self.pauses.paused(work.stored.device)
        ]
        return any(r is not None and r.eta_s is not None and r.eta_s < left for r in running)

    async def _flush(self) -> None:
        """Wait until ready results are submitted, with a time limit if the agent must stop."""
        outbox, life = self.place.store.outbox, self.place.life
        until = life.clock.monotonic() + FLUSH_S
        while len(outbox) and life.fatal is None:
            left = until - life.clock.monotonic()
            if life.closing in ("release", "save") and left <= 0:
                self.place.bus.notice(
                    plural(
                        "{n} result is kept and sent at the next start",
                        "{n} results are kept and sent at the next start",
                        len(outbox),
                    )
                )
                return
            await life.unless(lambda: not len(outbox), life.clock.sleep(0.5))


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
