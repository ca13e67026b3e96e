"""Parts of a lease, and their training.

A lease submits one gradient or update for each of its parts. Between two parts it pulls the newest
weights, if at least `pull_steps` mini-batches were trained since the last pull:

    pull ── part 0 ── submit ── part 1 ── submit ── pull ── part 2 ── ...

A part is a function of the version that it began from, the data, its job and its seed. An ordinary
task is one part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from shared.errors import VolunteerError
from shared.protocol.leases import Lease
from shared.protocol.versions import VersionManifest
from shared.sentences import Sentence
from shared.workloads.base import Job, Work, seed_from
from volunteer.agent.downloads import Downloads
from volunteer.agent.held_leases import LeaseInWork
from volunteer.agent.model_steps import ModelSteps
from volunteer.agent.workplace import LentDevice, Workplace
from volunteer.control import events
from volunteer.training.job import Finished, Interrupted, TrainingJob, TrainingReport
from volunteer.training.local_task import LocalTask, PartResult
from volunteer.training.trainer import Handle

FOLLOW_S = 30.0  # wait before the next try to fetch a newer version


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasePlan:
    """Division of a lease into parts, in steps; each part ends with a submission."""

    steps: int
    part_steps: int
    pull_steps: int
    redo: bool  # each part waits for its verdict, since a late part is computed again

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
    def is_divided(self) -> bool:
        """Return True if the lease may need more than one result, base or try."""
        return self.redo or min(self.part_steps, self.pull_steps) < self.steps

    @property
    def parts(self) -> int:
        return max(1, -(-self.steps // max(1, self.part_steps)))

    def first_step(self, part: int) -> int:
        return part * self.part_steps

    def end_step(self, part: int) -> int:
        return min(self.steps, (part + 1) * self.part_steps)

    def lease_of(self, lease: Lease, part: int) -> Lease:
        """Return the lease of a part: its job and its price."""
        first_step, end_step = self.first_step(part), self.end_step(part)
        if (first_step, end_step) == (0, self.steps):
            return lease
        price = lease.price_micro * (end_step - first_step) // max(1, self.steps)
        return msgspec.structs.replace(
            lease, job=part_of(lease.job, first_step, end_step), price_micro=price
        )


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
        """Train a part; return its result, or the interruption that ended the training."""
        loop = asyncio.get_running_loop()
        whole, job = work.lease.job, task.files.held.lease.job

        def post_report(report: TrainingReport) -> None:
            """Pass a report to the loop; runs on the training thread."""
            if not loop.is_closed():
                loop.call_soon_threadsafe(handle_report, whole_report(report, whole, job))

        def handle_report(report: TrainingReport) -> None:
            self._announce(work, report, task)
            on_report(report)

        def call_on_loop(act: Callable[[], None]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(act)

        def halved(micro: int) -> None:
            event = events.Halved(task=work.key[0], device=self.device.id, micro_batch=micro)
            call_on_loop(partial(self.place.bus.emit, event))

        handle = self.device.trainer.submit(
            TrainingJob(
                device=self.device.id,
                begin=task.begin,
                finish=task.finish,
                samples=job.stop - job.start,
                report=post_report,
                halved=halved,
                save=task.save,
                save_every_s=self.snapshot_s,
                meter=self.steps.meter(
                    job, task.files.manifest.workload_version, self.device.id, call_on_loop
                ),
            )
        )
        work.phase, work.handle = "train", handle
        if work.ended:
            handle.stop(work.message)
        following = asyncio.ensure_future(self._fetch_newer_versions(handle, task))
        try:
            return await asyncio.wrap_future(handle.future)
        finally:
            handle.stop(Sentence("the task was given up"))  # has no effect on finished work
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    def _announce(self, work: LeaseInWork, report: TrainingReport, task: LocalTask) -> None:
        lease, start = work.lease, work.stored.begun
        self.place.bus.emit(
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
                metrics=report.metrics,
                items=task.items,
            )
        )

    async def _fetch_newer_versions(self, handle: Handle[PartResult], task: LocalTask) -> None:
        """Fetch each newer version that heartbeats announce, for work that can continue on it."""
        lease, newest = task.files.held.lease, task.files.manifest.version
        if lease.job.kind != "selfplay":
            return
        holds: dict[int, ExitStack] = {}  # files of versions that the work may still need

        def release(version: int) -> None:
            """Release a version; runs on any thread."""
            if (hold := holds.pop(version, None)) is not None:
                hold.close()

        def swap(work: Work, manifest: VersionManifest, path: Path) -> None:
            task.swap(work, manifest, path)
            release(manifest.version)

        try:
            while True:
                change = self.place.life.change()
                if self._announced_version(lease.run) <= newest:
                    await change
                    continue
                change.close()
                try:
                    manifest, path, hold = await self.downloads.fetch_newest(lease)
                except VolunteerError as error:
                    self.place.bus.notice(
                        Sentence("version not fetched: {error}", error=error.message), "warning"
                    )
                    await self.place.life.clock.sleep(FOLLOW_S)
                    continue
                holds[manifest.version] = hold
                newest = manifest.version
                handle.tell(partial(swap, manifest=manifest, path=path))
        finally:
            for version in list(holds):
                release(version)

    def _announced_version(self, run: str) -> int:
        """Return the newest version of a run that a heartbeat announced."""
        return max((b.version for b in self.place.bus.status.beats if b.run == run), default=0)


def part_of(job: Job, first_step: int, end_step: int) -> Job:
    """Return steps [first, end) of a job as a job with its own seed."""
    start = job.start + first_step * job.batch_size
    return msgspec.structs.replace(
        job,
        start=start,
        stop=job.stop if end_step == job.steps else job.start + end_step * job.batch_size,
        steps=end_step - first_step,
        seed=seed_from(job.seed, first_step),
    )


def whole_report(report: TrainingReport, whole: Job, part: Job) -> TrainingReport:
    """Convert a report on a part to one on its whole lease."""
    if (part.start, part.stop) == (whole.start, whole.stop):
        return report
    samples = part.start - whole.start
    left = whole.stop - part.start - report.samples
    rate = report.samples_per_s
    return msgspec.structs.replace(
        report,
        step=samples // whole.batch_size + report.step,
        steps=whole.steps,
        samples=samples + report.samples,
        eta_s=max(0, left) / rate if rate > 0 else None,
    )
