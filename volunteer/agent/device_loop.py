"""One device at work: claims tasks, does them one after another, and claims the next while the
current one trains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from shared.errors import Cancelled, Gone, StorageFull, VolunteerError
from shared.protocol.accounts import Benchmark, Device
from volunteer.agent.claimer import DISK_WAIT_S, Claimer
from volunteer.agent.context import Parts
from volunteer.agent.pipeline import Pipeline
from volunteer.agent.shared_state import FATAL, Held
from volunteer.control import events
from volunteer.machine.device_memory import device_lost
from volunteer.net.retry import Backoff
from volunteer.storage.leases import HeldLease
from volunteer.storage.outbox import Entry
from volunteer.training.job import Finished, Interrupted, Report
from volunteer.training.trainer import ThreadDied, Trainer

AHEAD_S = 60.0  # the next task is claimed when the current one needs no longer than this
FAILURES_TOLD = 3  # in a row
FAILURE_WAIT_S, FAILURE_WAIT_S_MAX = 5.0, 600.0
ENDING = "the program ends"


class Lane:
    """Runs one device: claim, train, submit, again and again.

    `benchmark` says how fast the device is.
    """

    def __init__(
        self, parts: Parts, device: Device, trainer: Trainer, benchmark: Benchmark | None
    ) -> None:
        self.device = device
        self.trainer = trainer
        self._parts = parts
        self._desk = parts.desk
        self._pipeline = Pipeline(parts, device, trainer)
        self._claimer = Claimer(parts, device, self._pipeline.memory_bytes, benchmark)
        self._failures = Backoff(parts.rng, FAILURE_WAIT_S, FAILURE_WAIT_S_MAX)
        # the end of the task before, as it is encoded
        self._behind: asyncio.Task[None] | None = None
        self._near_end = asyncio.Event()  # time to claim the next task
        self._at_end = asyncio.Event()  # time to fetch the weights it will begin with

    async def run(self, revived: Sequence[HeldLease]) -> None:
        """Work until the agent closes, or all tasks that were asked for are done."""
        ahead: asyncio.Task[Held | None] | None = None
        try:
            for stored in revived:
                if self._desk.ending:
                    break
                held = Held(stored)
                self._desk.take(held)
                self._claimer.tell(held)
                await self._perform(held)
            while not self._desk.ending:
                held_next = await ahead if ahead is not None else None
                ahead = None
                if held_next is None:
                    await self._settle()
                    held_next = await self._next()
                if held_next is None:
                    return
                if self._parts.settings.prefetch:
                    ahead = asyncio.create_task(self._take_ahead())
                await self._perform(held_next)
            await self._settle()
        finally:
            await _cancelled(ahead, self._behind)
            for left in [h for h in self._desk.held.values() if self._mine(h)]:
                await _cancelled(left.work)
                await self._ended(left, left.ended or "released", left.message or ENDING)
            self._pipeline.close()

    async def _take_ahead(self) -> Held | None:
        """Claim the next task near the end of this one, and fetch its data and weights
        meanwhile.
        """
        await self._near_end.wait()
        held = await self._claim_ahead()
        if held is not None:
            try:
                await self._pipeline.prefetch(held)
                await self._desk.unless(self._winding_up, self._fetch_weights(held))
            except VolunteerError:
                pass  # it comes up again when the task is done
        return held

    async def _claim_ahead(self) -> Held | None:
        """A pause ends a claim that is under way: it is made again when the task goes on."""
        while not self._desk.late:  # claiming such a task again would take it away from ourselves
            held = await self._claimer.take()
            if held is not None or not self._kept():
                return held
            await self._desk.unless(lambda: not self._kept(), _forever())
        return None

    def _kept(self) -> bool:
        """Only a pause keeps the task in work from its end."""
        device = self.device.id
        return bool(self._claimer.busy and self._desk.paused(device)) and not self._winding_up()

    async def _fetch_weights(self, held: Held) -> None:
        """As late as still brings them in time: a version published after that has to be fetched as
        well.
        """
        await self._at_end.wait()
        if self._claimer.busy:
            await self._pipeline.prefetch_weights(held)

    def _winding_up(self) -> bool:
        return self._desk.ending or self._desk.finishing

    async def _next(self) -> Held | None:
        """Claim a task, when that is allowed.

        None when the program ends or all that were asked for are handed in.
        """
        while not self._desk.ending:
            change = self._desk.change()  # from before the look, so that none is missed
            try:
                if any(self._parts.outbox.holds(*key) for key in self._desk.late):
                    self._claimer.idle("late", "handing in a late result before more is claimed")
                    await change
                    continue
                held = await self._claimer.take()
                if held is not None or (self._desk.exhausted and not len(self._parts.outbox)):
                    return held
                if self._desk.finishing and not self._desk.held:
                    message = "finished: no new work is taken until you resume"
                    self._claimer.idle("finished", message)
                await change
            finally:
                change.close()
        return None

    def _mine(self, held: Held) -> bool:
        return held.stored.device == self.device.id

    async def _perform(self, held: Held) -> None:
        """Do a task to its end, whatever the end is, or until the device can do the next one beside
        its encoding.
        """
        if self._desk.finishing and held.stored.begun is None:
            held.end("released", "no more work is wanted")
        self._near_end.clear()
        self._at_end.clear()
        self._claimer.at_work(True)
        held.work = asyncio.create_task(self._work(held))
        freed = asyncio.create_task(held.freed.wait())
        try:
            await asyncio.wait({held.work, freed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            freed.cancel()
            self._claimer.at_work(False)
            self._at_end.set()
        await self._settle()  # one model more in memory, not two
        self._behind = asyncio.create_task(self._conclude(held, held.work))
        if held.work.done():
            await self._settle()
        # after the wait that follows a failure: others may do the next task meanwhile
        self._near_end.set()

    async def _settle(self) -> None:
        """Wait until the task before has come to its end."""
        if self._behind is not None:
            await self._behind
            self._behind = None

    async def _conclude(self, held: Held, work: asyncio.Task[None]) -> None:
        await asyncio.wait({work})
        if work.cancelled():
            await self._ended(held, held.ended or "released", held.message or ENDING)
        elif (error := work.exception()) is not None:
            await self._failed(held, error)

    async def _work(self, held: Held) -> None:
        if held.ended:
            raise asyncio.CancelledError
        if self._desk.paused(self.device.id):
            await self._desk.unless(lambda: not self._desk.paused(self.device.id), _forever())
        await self._claimer.agree(held.stored.lease.run)
        outcome = await self._pipeline.run(held, self._watch_end)
        if outcome is None:
            self._parts.leases.drop(held.stored.lease)
            self._desk.put_down(held, counted=True)
        elif isinstance(outcome, Finished):
            self._finished(held, outcome)
        else:
            await self._interrupted(held, outcome)

    def _watch_end(self, report: Report) -> None:
        if report.eta_s is not None and report.eta_s <= AHEAD_S:
            self._near_end.set()
            if report.eta_s <= self._pipeline.lead_s:
                self._at_end.set()

    def _finished(self, held: Held, outcome: Finished[Entry]) -> None:
        entry, said = outcome.value, outcome.value.submit
        measured = bool(said.loss_first or said.loss_last)  # the wire says 0 where there is none
        job = held.stored.lease.job
        self._failures.reset()
        self._parts.leases.drop(held.stored.lease)
        self._parts.hub.emit(
            events.Trained(
                task=entry.task,
                run=entry.run,
                steps=job.steps,
                samples=job.stop - job.start,
                loss_first=said.loss_first if measured else None,
                loss_last=said.loss_last if measured else None,
                train_s=said.train_s,
            )
        )
        self._desk.put_down(held, counted=True)

    async def _interrupted(self, held: Held, outcome: Interrupted) -> None:
        await self._ended(held, held.ended or "saved", held.message or outcome.reason)

    async def _failed(self, held: Held, error: BaseException) -> None:
        if not isinstance(error, Exception):
            raise error
        known = isinstance(error, VolunteerError | MemoryError)
        message = str(error) if known else f"{error!r}"
        if device_lost(error):
            message = (
                f"{self.device.id} does not answer any more ({error}): is it still "
                "plugged "
                "in, and its driver well?"
            )
        if isinstance(error, Gone):
            how = "cancelled" if isinstance(error, Cancelled) else "gone"
            await self._ended(held, how, message)
        elif isinstance(error, StorageFull):
            with self._claimer.resting():
                await self._ended(held, "released", message)
                self._claimer.idle("disk_full", message, wait=DISK_WAIT_S)
                await self._claimer.pause(DISK_WAIT_S)
        elif isinstance(error, ThreadDied):
            await self._ended(held, "released", message)
            self._desk.give_up(error)
        elif isinstance(error, FATAL):
            self._desk.put_down(held, counted=False)
            self._desk.give_up(error)
        else:
            with self._claimer.resting():
                await self._ended(held, "failed", message)
                await self._calm_down(message)

    async def _calm_down(self, message: str) -> None:
        """After a failure wait, longer each time: this device may be the reason."""
        wait = self._failures.next()
        if self._failures.failures >= FAILURES_TOLD:
            self._parts.hub.notice(
                f"{self._failures.failures} tasks in a row failed on {self.device.id}: {message}",
                "error",
            )
        self._claimer.idle("failing", f"a task failed on {self.device.id}: {message}", wait=wait)
        await self._claimer.pause(wait)

    async def _ended(self, held: Held, how: str, message: str) -> None:
        """A task ends here without a contribution."""
        if how in ("released", "failed"):
            await self._claimer.give_back(held, message, failed=how == "failed")
        elif how != "saved":
            self._parts.leases.drop(held.stored.lease)
        self._desk.put_down(held, counted=False)
        self._parts.hub.emit(events.TaskEnded(task=held.key[0], how=how, message=message))


async def _cancelled(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel those that are there, and wait for their end."""
    given = [task for task in tasks if task is not None]
    for task in given:
        task.cancel()
    await asyncio.gather(*given, return_exceptions=True)


async def _forever() -> None:
    await asyncio.Event().wait()
