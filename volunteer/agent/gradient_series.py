"""A lease that hands in several gradients: one after every n mini-batches, on weights pulled anew
after every m.

    pull ── train a stretch ── pull ── train a stretch ── hand in part 0 ── train a stretch ── ...

A stretch is what lies between two of these points. Where the run merges one version at a time, each
part waits for its verdict: one that came too late is computed again, for the same samples, from the
newest version. After a restart the coordinator says which part is wanted next, and the outbox which
ones are done already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from shared.protocol.leases import BeginReply, Lease
from shared.protocol.versions import VersionManifest
from shared.workloads.base import Job
from volunteer.agent.context import Parts
from volunteer.agent.shared_state import Held
from volunteer.storage.outbox import Entry
from volunteer.training.gradient_sum import StretchTask, Summed
from volunteer.training.job import Finished, Interrupted, Report
from volunteer.training.local_task import Place, TaskFiles

AHEAD = 2  # parts of one lease that may wait to be handed in while the next is computed


def comes_in_parts(lease: Lease) -> bool:
    """Return True if a lease is done as this module does it."""
    parted = lease.part_steps or lease.pull_every or lease.redo
    return lease.job.update == "gradient" and bool(parted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The version that is trained from, on this machine."""

    begun: BeginReply
    manifest: VersionManifest
    weights: Path


class Way(Protocol):
    """Interface of the pipeline that a series needs."""

    async def begin(
        self, held: Held, stack: ExitStack, known: VersionManifest | None = None
    ) -> Base | None:
        """Bind the base of a lease and bring it here, for as long as `stack` is open.

        With `known` the newest version; None where that is it.
        """

    async def train(
        self, held: Held, task: StretchTask, on_report: Callable[[Report], None]
    ) -> Finished[Entry | None] | Interrupted:
        """Do one stretch on the training thread."""


class Series:
    """Trains a lease whose result goes out in several gradients.

    `files` makes those of a task on a base.
    """

    def __init__(
        self, parts: Parts, way: Way, held: Held, files: Callable[[Base], TaskFiles]
    ) -> None:
        self._parts = parts
        self._way = way
        self._held = held
        self._files = files
        lease = held.stored.lease
        self._steps = lease.job.steps
        self._part_steps = min(lease.part_steps or self._steps, self._steps)
        self._pull_steps = lease.pull_every or self._steps
        self._pulled_at = 0  # the step before which the base was bound
        self._grip = ExitStack()  # on the weights that are trained from

    async def run(
        self, on_report: Callable[[Report], None]
    ) -> Finished[Entry] | Interrupted | None:
        """Do all parts that are wanted; None when every one of them was done by an earlier process.

        Raises Gone when the lease is no longer ours.
        """
        try:
            return await self._run(on_report)
        finally:
            self._grip.close()

    async def _run(
        self, on_report: Callable[[Report], None]
    ) -> Finished[Entry] | Interrupted | None:
        lease = self._held.stored.lease
        if lease.redo:
            await self._until(lambda: not self._waiting())
        base = await self._way.begin(self._held, self._grip)
        assert base is not None
        part, tries = self._first(base.begun)
        last: Finished[Entry] | None = None
        self._pulled_at = part * self._part_steps
        while part * self._part_steps < self._steps:
            await self._until(lambda: self._waiting() < AHEAD and not self._parts.outbox.full)
            place = Place(part=part, tries=tries, last=self._end(part) >= self._steps)
            name = f"{lease.task}-{lease.attempt}-{part}-{tries}"
            answer = self._parts.desk.expect(name) if lease.redo else None
            outcome, base = await self._part(base, place, on_report)
            if isinstance(outcome, Interrupted):
                return outcome
            last = outcome
            if answer is not None and (await answer).redo:
                base, tries = await self._pull(base, part * self._part_steps), tries + 1
                continue
            part, tries = part + 1, 0
        return last

    def _end(self, part: int) -> int:
        return min(self._steps, (part + 1) * self._part_steps)

    def _first(self, begun: BeginReply) -> tuple[int, int]:
        """Part and try to begin with: what the coordinator wants, unless it waits in the outbox
        already.
        """
        held = [e.submit.part for e in self._parts.outbox.entries() if self._ours(e)]
        after = max(held, default=-1) + 1
        return (begun.part, begun.tries) if begun.part >= after else (after, 0)

    def _ours(self, entry: Entry) -> bool:
        return (entry.task, entry.submit.attempt) == self._held.key

    def _waiting(self) -> int:
        return sum(map(self._ours, self._parts.outbox.entries()))

    async def _until(self, holds: Callable[[], bool]) -> None:
        while True:
            change = self._parts.desk.change()
            if holds():
                change.close()
                return
            await change

    async def _part(
        self, base: Base, place: Place, on_report: Callable[[Report], None]
    ) -> tuple[Finished[Entry] | Interrupted, Base]:
        """One part, stretch by stretch, and the base it ended on."""
        at, summed = place.part * self._part_steps, Summed()
        while True:
            if at - self._pulled_at >= self._pull_steps:
                base = await self._pull(base, at)
            end = min(self._end(place.part), self._pulled_at + self._pull_steps)
            ends_part = end == self._end(place.part)
            outcome = await self._stretch(base, (at, end), ends_part, place, summed, on_report)
            if isinstance(outcome, Interrupted):
                return outcome, base
            if outcome.value is not None:
                self._parts.desk.notify()  # it can be handed in
                return Finished(value=outcome.value, spent=outcome.spent), base
            at = end

    async def _stretch(
        self,
        base: Base,
        steps: tuple[int, int],
        ends_part: bool,
        place: Place,
        summed: Summed,
        on_report: Callable[[Report], None],
    ) -> Finished[Entry | None] | Interrupted:
        if self._held.ended:
            raise asyncio.CancelledError
        held, whole = self._held, self._held.stored.lease.job
        job = stretch_of(whole, *steps)
        files = self._files(base)
        price = held.stored.lease.price_micro * (
            self._end(place.part) - place.part * self._part_steps
        )
        lease = msgspec.structs.replace(
            held.stored.lease, job=job, price_micro=price // max(1, self._steps)
        )
        files = replace(files, held=msgspec.structs.replace(held.stored, lease=lease))
        held.steps_before = steps[0]
        tell = partial(
            of_whole, job=whole, steps=steps[0], samples=files.held.lease.job.start - whole.start
        )
        task = StretchTask(files, place, summed, ends_part=ends_part, tell=tell)
        try:
            return await self._way.train(held, task, on_report)
        finally:
            held.handle = None  # from here on giving it up ends what waits

    async def _pull(self, base: Base, at: int) -> Base:
        """The newest version; nothing of it moves when it is the one that is here."""
        if self._held.ended:
            raise asyncio.CancelledError
        self._pulled_at = at
        grip = ExitStack()
        try:
            newer = await self._way.begin(self._held, grip, base.manifest)
        except BaseException:
            grip.close()
            raise
        if newer is None:
            return base
        self._grip.close()
        self._grip = grip
        return newer


def stretch_of(job: Job, first: int, end: int) -> Job:
    """Steps [first, end) of a job as a job of their own, with a seed of their own."""
    start = job.start + first * job.batch_size
    return msgspec.structs.replace(
        job,
        start=start,
        stop=job.stop if end == job.steps else job.start + end * job.batch_size,
        steps=end - first,
        seed=(job.seed + first * 0x9E3779B97F4A7C15) & ((1 << 63) - 1),
    )


def of_whole(told: Report, job: Job, steps: int, samples: int) -> Report:
    """A report on a stretch as one on its lease, of which so much was done before."""
    left = job.stop - job.start - samples - told.samples
    rate = told.samples_per_s
    return replace(
        told,
        step=steps + told.step,
        steps=job.steps,
        samples=samples + told.samples,
        eta_s=max(0, left) / rate if rate > 0 else None,
    )
