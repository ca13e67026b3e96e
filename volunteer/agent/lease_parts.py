"""Parts of a lease, and their training.

A lease submits one gradient or update for each of its parts, and pulls the newest weights between
two parts, at the earliest after `pull_steps` mini-batches:

    pull ── part 0 ── submit ── part 1 ── submit ── pull ── part 2 ── ...

A part is a function of the version that it began from, the data, its job and its seed. An ordinary
task is one part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from shared.errors import VolunteerError
from shared.protocol.leases import Lease
from shared.protocol.versions import VersionManifest
from shared.sentences import Sentence
from shared.workloads.base import Job, Work, seed_from
from volunteer.agent.collaborators import LentDevice, Workplace
from volunteer.agent.downloads import Downloads
from volunteer.agent.held_leases import LeaseInWork
from volunteer.agent.model_steps import ModelSteps
from volunteer.control import events
from volunteer.training.job import Finished, Interrupted, TrainingJob, TrainingReport
from volunteer.training.local_task import LocalTask, PartResult
from volunteer.training.trainer import Handle

FOLLOW_S = 30.0  # wait before the next try to fetch a newer version


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasePlan:
    """Division of a lease, in steps: a part ends with a submission, a pull fetches the newest
    version.
    """

    steps: int
    part_steps: int
    pull_steps: int
    redo: bool  # each part waits for its verdict, since a late one is computed again

    @classmethod
    def of(cls, lease: Lease) -> LeasePlan:
        """Return the plan of a lease; only gradients come in parts."""
        steps = lease.job.steps
        if lease.job.update != "gradient":
            return cls(steps=steps, part_steps=steps, pull_steps=steps, redo=False)
        return cls(
            steps=steps,
            part_steps=min(lease.part_steps or steps, steps),
            pull_steps=lease.pull_every or steps,
            redo=lease.redo,
        )

    @property
    def several(self) -> bool:
        """Return True if the lease may need more than one result, base or try."""
        return self.redo or min(self.part_steps, self.pull_steps) < self.steps

    @property
    def parts(self) -> int:
        return max(1, -(-self.steps // max(1, self.part_steps)))

    def first(self, part: int) -> int:
        return part * self.part_steps

    def end(self, part: int) -> int:
        return min(self.steps, (part + 1) * self.part_steps)

    def lease_of(self, lease: Lease, part: int) -> Lease:
        """Return the lease of a part: its job and its price."""
        first, end = self.first(part), self.end(part)
        if (first, end) == (0, self.steps):
            return lease
        price = lease.price_micro * (end - first) // max(1, self.steps)
        return msgspec.structs.replace(lease, job=part_of(lease.job, first, end), price_micro=price)


@dataclass(eq=False, kw_only=True)
class PartRunner:
    """Trains parts on one device, with progress reports and newer versions."""

    device: LentDevice
    downloads: Downloads
    place: Workplace
    snapshot_s: float
    steps: ModelSteps

    async def run(
        self, work: LeaseInWork, task: LocalTask, on_report: Callable[[TrainingReport], None]
    ) -> Finished[PartResult] | Interrupted:
        """Train a part; return its result."""
        loop = asyncio.get_running_loop()
        whole, job = work.lease.job, task.files.held.lease.job

        def pass_on(report: TrainingReport) -> None:
            """Pass a report to the loop; runs on the training thread."""
            if not loop.is_closed():
                loop.call_soon_threadsafe(reported, of_whole(report, whole, job))

        def reported(report: TrainingReport) -> None:
            self._announce(work, report, task)
            on_report(report)

        def on_loop(act: Callable[[], None]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(act)

        def halved(micro: int) -> None:
            event = events.Halved(task=work.key[0], device=self.device.id, micro_batch=micro)
            on_loop(partial(self.place.hub.emit, event))

        handle = self.device.trainer.submit(
            TrainingJob(
                begin=task.begin,
                finish=task.finish,
                samples=job.stop - job.start,
                report=pass_on,
                halved=halved,
                save=task.save,
                save_every_s=self.snapshot_s,
                meter=self.steps.meter(
                    job, task.files.manifest.workload_version, self.device.id, on_loop
                ),
            )
        )
        work.phase, work.handle = "train", handle
        if work.ended:
            handle.stop(work.message)
        following = asyncio.ensure_future(self._follow(handle, task))
        try:
            return await asyncio.wrap_future(handle.future)
        finally:
            handle.stop(Sentence("the task was given up"))  # has no effect on finished work
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    def _announce(self, work: LeaseInWork, report: TrainingReport, task: LocalTask) -> None:
        lease, start = work.lease, work.stored.begun
        self.place.hub.emit(
            events.Training(
                step=report.step,
                steps=report.steps,
                samples=report.samples,
                loss=report.loss,
                steps_per_s=report.steps_per_s,
                eta_s=report.eta_s,
                preview=report.preview,
                counted=report.counted,
                task=lease.task,
                run=lease.run,
                device=self.device.id,
                tokens_per_s=report.samples_per_s * task.items_per_sample,
                version=start.version if start else 0,
                metrics=dict(report.metrics),
                items=task.items,
            )
        )

    async def _follow(self, handle: Handle[PartResult], task: LocalTask) -> None:
        """Fetch newer versions, as heartbeats announce them, for work that can continue on them."""
        lease, newest = task.files.held.lease, task.files.manifest.version
        if lease.job.kind != "selfplay":
            return
        holds: dict[int, ExitStack] = {}  # files of versions that the work may still need

        def let_go(version: int) -> None:
            """Release a version; runs on any thread."""
            if (hold := holds.pop(version, None)) is not None:
                hold.close()

        def swap(work: Work, manifest: VersionManifest, path: Path) -> None:
            task.swap(work, manifest, path)
            let_go(manifest.version)

        try:
            while True:
                change = self.place.life.change()
                if self._announced(lease.run) <= newest:
                    await change
                    continue
                change.close()
                try:
                    manifest, path, hold = await self.downloads.newer(lease)
                except VolunteerError as error:
                    self.place.hub.notice(
                        Sentence("version not fetched: {error}", error=error.message), "warning"
                    )
                    await self.place.life.clock.sleep(FOLLOW_S)
                    continue
                holds[manifest.version] = hold
                newest = manifest.version
                handle.tell(partial(swap, manifest=manifest, path=path))
        finally:
            for version in list(holds):
                let_go(version)

    def _announced(self, run: str) -> int:
        """Return the newest version of a run that a heartbeat announced."""
        return max((b.version for b in self.place.hub.status.beats if b.run == run), default=0)


def part_of(job: Job, first: int, end: int) -> Job:
    """Return steps [first, end) of a job as a job with its own seed."""
    start = job.start + first * job.batch_size
    return msgspec.structs.replace(
        job,
        start=start,
        stop=job.stop if end == job.steps else job.start + end * job.batch_size,
        steps=end - first,
        seed=seed_from(job.seed, first),
    )


def of_whole(report: TrainingReport, whole: Job, part: Job) -> TrainingReport:
    """Convert a report on a part to one on its whole lease."""
    if (part.start, part.stop) == (whole.start, whole.stop):
        return report
    samples = part.start - whole.start
    left = whole.stop - part.start - report.samples
    rate = report.samples_per_s
    return replace(
        report,
        step=samples // whole.batch_size + report.step,
        steps=whole.steps,
        samples=samples + report.samples,
        eta_s=max(0, left) / rate if rate > 0 else None,
    )
