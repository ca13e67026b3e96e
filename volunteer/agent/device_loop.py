"""Loop of one device: one task after another, the next one claimed while this one trains."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shared.errors import (
    Cancelled,
    Gone,
    NotFound,
    StorageFull,
    UnknownTask,
    VolunteerError,
)
from shared.protocol.leases import Lease
from shared.sentences import Sentence
from volunteer.agent.claimer import (
    AT_ONCE,
    DISK_WAIT_S,
    ENOUGH,
    OLDER_WAIT_S,
    UNWANTED,
    Claimer,
    IdleReason,
)
from volunteer.agent.downloads import OlderVersion
from volunteer.agent.held_leases import LeaseInWork
from volunteer.agent.lifecycle import FATAL, Lifecycle
from volunteer.agent.pause_board import PauseBoard
from volunteer.agent.pipeline import Pipeline
from volunteer.agent.run_choice import RunChoice
from volunteer.agent.work_news import WorkNews
from volunteer.agent.workplace import LentDevice
from volunteer.machine.device_memory import OutOfMemory, device_lost
from volunteer.net.retry import Backoff
from volunteer.storage.leases import HeldLease
from volunteer.storage.own_data import OwnDataUnusable
from volunteer.training.job import Interrupted, TrainingReport
from volunteer.training.trainer import ThreadDied

AHEAD_S = 60.0  # the next task is claimed when the current one needs at most this time
FAILURES_TOLD = 3  # failures in a row before the owner is told
# Short, since the coordinator, too, stops handing this machine tasks of a run that fails here.
FAILURE_WAIT_S, FAILURE_WAIT_S_MAX = 5.0, 15.0
ENDING = Sentence("the program ends")

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class DeviceLoop:
    """Runs one device: claim, train and submit in a loop."""

    device: LentDevice
    claimer: Claimer
    pipeline: Pipeline
    pauses: PauseBoard
    life: Lifecycle
    choice: RunChoice
    news: WorkNews
    failures: Backoff
    _resting: bool = field(default=False, init=False)
    # end of the previous task, which is being encoded
    _encoding: asyncio.Task[None] | None = field(default=None, init=False)
    # set when the next task can be claimed
    _near_end: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    # set when the weights of the next task can be fetched
    _at_end: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def run(self, revived: Sequence[HeldLease]) -> None:
        """Work until the agent ends, or all requested tasks are done."""
        ahead: asyncio.Task[LeaseInWork | None] | None = None
        try:
            for work in await self._take_over(revived):
                if self.life.ending:
                    break
                self.news.announce_lease(work)
                await self._perform(work)
            while not self.life.ending:
                next_lease = await ahead if ahead is not None else None
                ahead = None
                if next_lease is None:
                    await self._wait_for_previous()
                    next_lease = await self._next()
                if next_lease is None:
                    return
                ahead = asyncio.create_task(self._take_ahead())
                await self._perform(next_lease)
            await self._wait_for_previous()
        finally:
            await _cancel(ahead, self._encoding)
            for lease in [h for h in self.claimer.place.held if self._mine(h)]:
                await _cancel(lease.work)
                await self._give_up(lease)
            self.pipeline.close()

    async def _take_over(self, revived: Sequence[HeldLease]) -> list[LeaseInWork]:
        """Take the leases of an earlier process, so that heartbeats renew them, and return them as
        leases in work. Give back the leases beyond `max_tasks`.
        """
        holding, ends = self.claimer.place.held, self.claimer.ends
        leases: list[LeaseInWork] = []
        for work in map(LeaseInWork, revived):
            if holding.exhausted:
                await ends.end_without_result(work, "released", ENOUGH)
            else:
                holding.take(work)
                leases.append(work)
        return leases

    async def _take_ahead(self) -> LeaseInWork | None:
        """Claim the next task near the end of the present task; fetch its data and weights
        meanwhile.
        """
        await self._near_end.wait()
        work = await self._claim_ahead()
        if work is not None:
            try:
                await self.pipeline.downloads.prefetch_data(work)
                await self.life.unless(lambda: self.life.winding_up, self._fetch_weights(work))
            except Exception as error:
                # A lasting cause raises it again when the task begins, which then fails alone.
                log.info("task %s was not fetched ahead: %s", work.key[0], error)
        return work

    async def _claim_ahead(self) -> LeaseInWork | None:
        """Claim; a pause cancels the claim, which is repeated when the task continues."""
        # A claim could return this machine's own late task, whose result would then not count.
        while not self.claimer.place.held.late:
            work = await self._claim()
            if work is not None or not self._task_is_paused():
                return work
            await self.life.until(lambda: not self._task_is_paused())
        return None

    def _task_is_paused(self) -> bool:
        """Return True if the running task is paused and will continue."""
        paused = self.pauses.paused(self.device.id)
        return bool(self.news.at_work and paused) and not self.life.winding_up

    async def _fetch_weights(self, work: LeaseInWork) -> None:
        """Fetch the newest weights just before they are needed: fetched earlier, they would often
        be replaced by newer ones.
        """
        await self._at_end.wait()
        if self.news.at_work:
            await self.pipeline.bases.prefetch(work)

    async def _next(self) -> LeaseInWork | None:
        """Claim a task, if allowed; None when the agent ends or all requested tasks are done."""
        while not self.life.ending:
            change = self.life.change()  # taken before the check, so that no change is missed
            try:
                if late := self.claimer.late_result_reason:
                    self.news.announce_idle(late)
                    await change
                    continue
                work = await self._claim()
                if work is not None or self.claimer.done:
                    return work
                if self.life.finishing and not len(self.claimer.place.held):
                    message = Sentence("finished: no new work is taken until you resume")
                    self.news.announce_idle(IdleReason(reason="finished", message=message))
                await change
            finally:
                change.close()
        return None

    async def _claim(self) -> LeaseInWork | None:
        """Claim until there is a lease; None when claims are forbidden or need a change."""
        self.news.announce_claim()
        long_poll = self.news.at_work  # if idle, ask for a reply at once, to show the reason
        while self._may_claim_now():
            answer = await self._claim_once(long_poll=long_poll)
            if isinstance(answer, LeaseInWork):
                self.news.place.server_clock.learn(answer.lease.now)
                self.news.announce_lease(answer)
                return answer
            if answer.reason:
                self.news.announce_idle(answer)
            if answer.wait_s is None:
                return None
            if answer.wait_s > 0:
                await self._wait(answer.wait_s)
            else:
                long_poll = True
        return None

    async def _claim_once(self, *, long_poll: bool) -> LeaseInWork | IdleReason:
        """Claim, but cancel if claiming becomes forbidden or other work is chosen meanwhile."""
        device = self.device.id
        choice = self.choice.wanted_work(device)
        hindrance = self.claimer.hindrance(choice)
        if hindrance is not None or choice is None:
            return hindrance or UNWANTED
        claim = self.claimer.claim(choice, share=self.pauses.share(device), long_poll=long_poll)
        try:
            answer = await self.life.unless(
                lambda: not self._may_claim_now() or self.choice.wanted_work(device) != choice,
                claim,
            )
        except FATAL as error:
            self.life.give_up(error)
            return UNWANTED
        if isinstance(answer, Lease):
            return await self.claimer.accept(answer, choice)  # may give the lease back
        return answer or AT_ONCE

    def _may_claim_now(self) -> bool:
        return not self._resting and self._may_claim()

    def _may_claim(self) -> bool:
        hindered = self.life.winding_up or self.claimer.place.held.exhausted
        return not (hindered or self.pauses.paused(self.device.id))

    @contextmanager
    def _rest(self) -> Iterator[None]:
        """Claim nothing while entered, and cancel a running claim, so that another volunteer gets
        the task.
        """
        self._resting = True
        self.life.notify()
        try:
            yield
        finally:
            self._resting = False

    async def _wait(self, seconds: float) -> None:
        """Wait, but stop if claims become forbidden, the choice of work changes, or on `retry`."""
        before, device = self.life.retries, self.device.id
        choice = self.choice.wanted_work(device)
        await self.life.sleep(
            seconds,
            unless=lambda: (
                self.life.retries > before
                or not self._may_claim()
                or self.choice.wanted_work(device) != choice
            ),
        )

    def _mine(self, work: LeaseInWork) -> bool:
        return work.stored.device == self.device.id

    async def _perform(self, work: LeaseInWork) -> None:
        """Perform a task until it ends, or until the device is free while the result is encoded."""
        if self.life.finishing:
            work.finish()
        self._near_end.clear()
        self._at_end.clear()
        self.news.begin_task()
        work.work = asyncio.create_task(self._work(work))
        freed = asyncio.create_task(work.freed.wait())
        try:
            await asyncio.wait({work.work, freed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            freed.cancel()
            self.news.end_task()
            self._at_end.set()
        await self._wait_for_previous()  # at most one more task stays in memory
        self._encoding = asyncio.create_task(self._conclude(work, work.work))
        if work.work.done():
            await self._wait_for_previous()
        # This device claims after a failure only when the wait in `_wait_after_failure` is over.
        self._near_end.set()

    async def _wait_for_previous(self) -> None:
        """Wait until the previous task has ended."""
        if self._encoding is not None:
            await self._encoding
            self._encoding = None

    async def _conclude(self, lease: LeaseInWork, work: asyncio.Task[None]) -> None:
        await asyncio.wait({work})
        if work.cancelled():
            await self._give_up(lease)
        elif (error := work.exception()) is not None:
            await self._handle_failure(lease, error)

    async def _give_up(self, work: LeaseInWork) -> None:
        how, message = work.ended or "released", work.message or ENDING
        await self.claimer.ends.end_without_result(work, how, message)

    async def _work(self, work: LeaseInWork) -> None:
        if work.ended:
            raise asyncio.CancelledError
        await self.life.until(lambda: not self.pauses.paused(self.device.id))
        await self.choice.consent_by_joining(work.lease.run)
        outcome = await self.pipeline.run(work, self._watch_end)
        if isinstance(outcome, Interrupted):
            await self._handle_interruption(work, outcome)
            return
        self.failures.reset()
        self.claimer.ends.complete(work, outcome.value if outcome is not None else None)

    async def _handle_interruption(self, work: LeaseInWork, outcome: Interrupted) -> None:
        how, message = work.ended or "saved", work.message or outcome.reason
        await self.claimer.ends.end_without_result(work, how, message)

    def _watch_end(self, report: TrainingReport) -> None:
        if report.eta_s is not None and report.eta_s <= AHEAD_S:
            self._near_end.set()
            if report.eta_s <= self.pipeline.downloads.lead_s:
                self._at_end.set()

    async def _handle_failure(self, work: LeaseInWork, error: BaseException) -> None:
        if not isinstance(error, Exception):
            raise error
        ends = self.claimer.ends
        if isinstance(error, FileNotFoundError):
            error = self._cause_of_loss(work, error)
        expected = isinstance(error, VolunteerError | MemoryError)
        message = getattr(error, "message", str(error)) if expected else f"{error!r}"
        if device_lost(error):
            message = Sentence(
                "{device} does not answer any more ({error}): is it still plugged in, and does "
                "its driver work?",
                device=self.device.id,
                error=error,
            )
        if isinstance(error, Gone | UnknownTask):
            how = "cancelled" if isinstance(error, Cancelled) else "gone"
            await ends.end_without_result(work, how, message)
        elif isinstance(error, StorageFull):
            with self._rest():
                await ends.end_without_result(work, "released", message)
                self.news.announce_idle(
                    IdleReason(reason="disk_full", message=message, wait_s=DISK_WAIT_S)
                )
                await self._wait(DISK_WAIT_S)
        elif isinstance(error, OlderVersion):
            with self._rest():
                await ends.end_without_result(work, "released", message)
                if not await self.pipeline.downloads.accept_restore():
                    idle = IdleReason(reason="refused", message=message, wait_s=OLDER_WAIT_S)
                    self.news.announce_idle(idle)
                    await self._wait(OLDER_WAIT_S)
        elif isinstance(error, OwnDataUnusable):
            with self._rest():
                await ends.end_without_result(work, "released", message)
                await ends.withdraw(work.lease.run)  # then this machine gets no tasks of the run
                await self._wait_after_failure(message)
        elif isinstance(error, OutOfMemory):  # other runs may fit
            self.choice.does_not_fit(work.lease.run, self.device.id, error.needed_bytes)
            await ends.end_without_result(work, "released", message)
        elif isinstance(error, ThreadDied):
            await ends.end_without_result(work, "released", message)
            self.life.give_up(error)
        elif isinstance(error, FATAL):
            self.claimer.place.held.put_down(work, counted=False)
            self.life.give_up(error)
        else:
            with self._rest():
                # A missing workload, or one of another version, is not the task's fault. Neither is
                # the failure of an audit, since another machine has done that task.
                own_task = work.lease.audit is None and not isinstance(error, NotFound)
                how = "failed" if own_task else "released"
                await ends.end_without_result(work, how, message)
                await self._wait_after_failure(message)

    def _cause_of_loss(self, work: LeaseInWork, error: FileNotFoundError) -> Exception:
        """Return NotFound, which is not the task's fault, for a missing copy of own data and for a
        missing file of the cache; else the error.
        """
        if work.lease.member:
            return NotFound(
                Sentence(
                    "the copies of your data for {run} went away during the task",
                    run=work.lease.run,
                )
            )
        if str(self.claimer.place.store.cache.root) in str(error.filename):
            return NotFound(Sentence("files of the task were deleted from the cache"))
        return error

    async def _wait_after_failure(self, message: str) -> None:
        """Wait after a failure, longer each time: this device may be the cause."""
        wait = self.failures.next()
        if self.failures.failures >= FAILURES_TOLD:
            self.news.announce_failures(self.failures.failures, message)
        why = Sentence(
            "a task failed on {device}: {message}", device=self.device.id, message=message
        )
        self.news.announce_idle(IdleReason(reason="failing", message=why, wait_s=wait))
        await self._wait(wait)


async def _cancel(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks, and wait for their end."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
