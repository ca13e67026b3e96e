"""Pipeline of a lease from its files to the outbox: fetch the data, bind the base version, fetch
its weights, train, encode. A lease may have several parts.

If the plan of the run recomputes late parts (`redo`), each part waits for its verdict; a late part
is computed again from the newest version with the same samples. After a restart the coordinator
names the next part, and the outbox holds the finished parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import msgspec

from shared.protocol.leases import BeginReply
from shared.workloads.data.local_data import LocalData
from volunteer.agent.base_versions import BaseVersion, BaseVersions
from volunteer.agent.downloads import Downloads
from volunteer.agent.held_leases import LeaseInWork
from volunteer.agent.lease_parts import LeasePlan, PartRunner
from volunteer.agent.lifecycle import Lifecycle
from volunteer.agent.verdict_news import Verdicts
from volunteer.storage.leases import HeldLease
from volunteer.storage.outbox import Outbox, QueuedResult
from volunteer.training.background_thread import BackgroundThread
from volunteer.training.job import Finished, Interrupted, TrainingReport
from volunteer.training.local_task import LocalTask, PartPosition, TaskFiles

AHEAD = 2  # while so many parts of a lease wait to be submitted, its next part is not begun


@dataclass(eq=False, kw_only=True)
class Pipeline:
    """Runs the tasks of one device. `files` collects the files of a part."""

    downloads: Downloads
    bases: BaseVersions
    parts: PartRunner
    encoder: BackgroundThread
    outbox: Outbox
    verdicts: Verdicts
    life: Lifecycle
    files: Callable[[HeldLease, BaseVersion, LocalData], TaskFiles]

    async def run(
        self, work: LeaseInWork, on_report: Callable[[TrainingReport], None]
    ) -> Finished[QueuedResult] | Interrupted | None:
        """Train all parts of a lease and return the last result; None if an earlier process trained
        them all.

        Raises Gone when the lease is lost, InvalidFrame and other errors when it cannot be done.
        """
        work.phase = "fetch"
        with ExitStack() as stack:
            data = await self.downloads.data(work, stack)
            lease_run = _LeaseRun(self, work, data, on_report)
            stack.callback(lease_run.close)
            await lease_run.begin()
            return await lease_run.run_parts()

    def close(self) -> None:
        """End the encoder; the pipeline must not be used afterwards."""
        self.encoder.close()


class _LeaseRun:
    """Work on the parts of one lease; `_base` is the base version that was bound last."""

    def __init__(
        self,
        pipeline: Pipeline,
        work: LeaseInWork,
        data: LocalData,
        on_report: Callable[[TrainingReport], None],
    ) -> None:
        self._pipeline = pipeline
        self._work = work
        self._data = data
        self._on_report = on_report
        self._plan = LeasePlan.of(work.lease)
        self._base: BaseVersion
        self._pulled_at = 0  # step at which the base was bound
        self._weights_hold = ExitStack()  # protects the base's weights from eviction

    def close(self) -> None:
        """Release the weights."""
        self._weights_hold.close()

    async def begin(self) -> None:
        """Bind the first base."""
        if self._plan.redo:
            await self._pipeline.life.until(lambda: not self._waiting_results())
        base = await self._pipeline.bases.bind(self._work, self._weights_hold)
        assert base is not None
        dataset = self._data.manifest
        self._pipeline.downloads.check_data(base.manifest, self._work.lease, dataset)
        self._base = base

    async def run_parts(self) -> Finished[QueuedResult] | Interrupted | None:
        """Train part after part; return the result of the last part."""
        plan, lease, pipeline = self._plan, self._work.lease, self._pipeline
        part, tries = self._first_part(self._base.begun)
        last: Finished[QueuedResult] | None = None
        self._pulled_at = plan.first_step(part)
        while part < plan.parts:
            await pipeline.life.until(self._has_room)
            if plan.first_step(part) - self._pulled_at >= plan.pull_steps > 0:
                await self._pull(plan.first_step(part))
            place = PartPosition(part=part, tries=tries, last=part + 1 == plan.parts)
            name = f"{lease.task}-{lease.attempt}-{part}-{tries}"
            answer = pipeline.verdicts.expect(name) if plan.redo else None
            outcome = await self._run_part(place)
            if isinstance(outcome, Interrupted):
                return outcome
            last = outcome
            if answer is not None and (await answer).redo:
                await self._pull(plan.first_step(part))
                tries += 1
                continue
            part, tries = part + 1, 0
        return last

    def _first_part(self, start: BeginReply) -> tuple[int, int]:
        """Return the part and the try to begin with: as the coordinator names them, or the part
        after the last part in the outbox if that is later.
        """
        done = [e.submit.part for e in self._pipeline.outbox.entries() if self._is_own(e)]
        after = max(done, default=-1) + 1
        return (start.part, start.tries) if start.part >= after else (after, 0)

    def _is_own(self, entry: QueuedResult) -> bool:
        return (entry.task, entry.submit.attempt) == self._work.key

    def _waiting_results(self) -> int:
        return sum(map(self._is_own, self._pipeline.outbox.entries()))

    def _has_room(self) -> bool:
        """Return True if the outbox may hold one more result of this lease."""
        waiting = self._waiting_results()
        return not waiting or (waiting < AHEAD and not self._pipeline.outbox.full)

    async def _run_part(self, place: PartPosition) -> Finished[QueuedResult] | Interrupted:
        """Train and encode one part, on one base; return its result, or the interruption."""
        work, plan, pipeline = self._work, self._plan, self._pipeline
        if work.ended:
            raise asyncio.CancelledError
        lease = plan.lease_of(work.lease, place.part)
        part_lease = msgspec.structs.replace(work.stored, lease=lease)
        task = LocalTask(pipeline.files(part_lease, self._base, self._data), place)
        work.steps_before = plan.first_step(place.part)
        try:
            outcome = await pipeline.parts.run(work, task, self._on_report)
            if isinstance(outcome, Interrupted):
                return outcome
            work.phase = "encode"
            if place.last and not plan.redo and task.leaves_room:
                work.free()
            entry = await pipeline.encoder.do(partial(task.submit, outcome.value))
            pipeline.life.notify()  # the part can be submitted
            return Finished(value=entry, spent=outcome.spent)
        finally:
            work.handle = None  # `held.end` now cancels this coroutine instead of the training

    async def _pull(self, at: int) -> None:
        """Continue on the newest version, if it is not already loaded."""
        if self._work.ended:
            raise asyncio.CancelledError
        self._pulled_at = at
        weights_hold = ExitStack()
        try:
            newer = await self._pipeline.bases.bind(self._work, weights_hold, self._base.manifest)
        except BaseException:
            weights_hold.close()
            raise
        if newer is not None:
            self._weights_hold.close()
            self._weights_hold, self._base = weights_hold, newer
