"""One lease from its files to the outbox: fetch the data, bind the base version, fetch its weights,
train, encode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from shared.errors import InvalidFrame, VolunteerError
from shared.local_data import LocalData
from shared.protocol.accounts import Device
from shared.protocol.leases import BeginReply, Lease
from shared.protocol.versions import BlobRef, SignedManifest, VersionManifest
from shared.workloads.base import DatasetManifest, Work
from volunteer.agent.context import Parts
from volunteer.agent.gradient_series import Base, Series, comes_in_parts
from volunteer.agent.offline_begin import NEWEST, Early
from volunteer.agent.shared_state import Held, with_begin
from volunteer.control import events
from volunteer.storage.dataset import blob_of, wanted
from volunteer.storage.manifests import checked
from volunteer.storage.outbox import Entry
from volunteer.training.background_thread import Aside
from volunteer.training.gradient_sum import StretchTask
from volunteer.training.job import Assignment, Finished, Interrupted, Report, Spent
from volunteer.training.local_task import LocalTask, TaskFiles
from volunteer.training.trainer import Handle, Trainer

FETCH_AT_ONCE = 4
FOLLOW_S = 30.0  # before the next try to fetch a newer version
LEAD_S = 3.0  # before the end of a task the next one's weights are fetched, at least
MOVED_S = 0.1  # what took less was here already
EVENT_S = 0.25  # progress of a transfer is told at most this often
GIB = 1 << 30
NO_DATA = DatasetManifest(name="", kind="", licence="", source="", chunks=())

T = TypeVar("T")


class Pipeline:
    """Does tasks on one device."""

    def __init__(self, parts: Parts, device: Device, trainer: Trainer) -> None:
        self._parts = parts
        self._device = device
        self._trainer = trainer
        self._early = Early(parts)
        self._datasets: dict[str, DatasetManifest] = {}
        self._fetch_s = 0.0  # what the last weights took to come
        self._encoder = Aside(f"encoder {device.id}", yields=True)

    @property
    def memory_bytes(self) -> int:
        """Return what a task may spend on this device."""
        allowed = int(self._parts.settings.memory_gb * GIB)
        return min(allowed, self._device.memory_bytes) if allowed else self._device.memory_bytes

    async def prefetch(self, held: Held) -> None:
        """Bring the data of a task that has not begun into the cache."""
        with ExitStack() as stack:
            await self._fetch_data(held, stack)

    @property
    def lead_s(self) -> float:
        """Return how long before the end of a task to `prefetch_weights`."""
        return LEAD_S + 2 * self._fetch_s

    async def prefetch_weights(self, held: Held) -> None:
        """Bring the newest version into the cache for a task that has not begun, where there is
        room beside what is in use.

        The base is bound when the task begins: if a newer version was published by then, only what
        leads there is left to fetch.
        """
        lease = held.stored.lease
        if lease.in_step or lease.job.kind not in NEWEST:
            return
        signed = await self._parts.api.latest(lease.run)
        manifest = self._checked(signed, lease)
        need = 2 * manifest.weights.size  # with what it is made from
        if await asyncio.to_thread(self._parts.cache.fits, need):
            await self._fetch_weights(held, manifest)
            self._early.brought(manifest, signed)

    async def run(
        self, held: Held, on_report: Callable[[Report], None]
    ) -> Finished[Entry] | Interrupted | None:
        """Do a task; None when an earlier process had done all of it.

        Raises Gone when its lease is no longer ours, InvalidFrame and others when it cannot be
        done.
        """
        held.phase = "fetch"
        with ExitStack() as stack:
            data = await self._fetch_data(held, stack)
            if comes_in_parts(held.stored.lease):
                series = Series(self._parts, self, held, lambda base: self._files(held, base, data))
                return await series.run(on_report)
            base = await self.begin(held, stack)
            assert base is not None
            local = LocalTask(self._files(held, base, data))
            telling = asyncio.ensure_future(self._early.tell(held))
            try:
                outcome = await self._train(held, local, local.finish, on_report)
            finally:
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)
            if isinstance(outcome, Interrupted):
                return outcome
            held.phase = "encode"
            if local.roomy:
                held.free()
            entry = await self._encoder.do(partial(local.hand_in, outcome.value))
            return Finished(value=entry, spent=outcome.spent)

    async def train(
        self, held: Held, task: StretchTask, on_report: Callable[[Report], None]
    ) -> Finished[Entry | None] | Interrupted:
        """One stretch of a series."""
        outcome = await self._train(held, task, task.finish_stretch, on_report)
        if isinstance(outcome, Interrupted):
            return outcome
        made, entry = outcome.value, None
        if made is not None:
            entry = await self._encoder.do(partial(task.hand_in, made))
        return Finished(value=entry, spent=outcome.spent)

    def close(self) -> None:
        """Nothing more is done here."""
        self._encoder.close()

    async def _fetch_data(self, held: Held, stack: ExitStack) -> LocalData:
        lease = held.stored.lease
        manifest = lease.data or await self._dataset(lease.dataset)
        chunks = wanted(lease, manifest)
        assets = {name: blob_of(chunk) for name, chunk in manifest.assets.items()}
        refs = {ref.sha256: ref for ref in (*chunks.values(), *assets.values())}
        stack.enter_context(self._parts.cache.hold(refs))
        tell = self._teller(held, "data", sum(ref.size for ref in refs.values()))
        found = await self._fetch_all(refs.values(), tell)
        return LocalData(manifest, found)

    async def _fetch_all(
        self, refs: Iterable[BlobRef], tell: Callable[[int], None]
    ) -> dict[str, Path]:
        done: dict[str, int] = {}
        found: dict[str, Path] = {}
        limit = asyncio.Semaphore(FETCH_AT_ONCE)

        async def one(ref: BlobRef) -> None:
            def progress(count: int) -> None:
                done[ref.sha256] = count
                tell(sum(done.values()))

            async with limit:
                found[ref.sha256] = await self._parts.transfers.fetch(ref, progress)

        jobs = [asyncio.ensure_future(one(ref)) for ref in refs]
        try:
            await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        return found

    async def _dataset(self, name: str) -> DatasetManifest:
        if not name:  # a run that makes its own data
            return NO_DATA
        if name not in self._datasets:
            self._datasets[name] = await self._parts.api.dataset(name)
        return self._datasets[name]

    async def begin(
        self, held: Held, stack: ExitStack, known: VersionManifest | None = None
    ) -> Base | None:
        """Bind the base version and bring its weights here, for as long as `stack` is open.

        The newest one, or the one it had before a restart. With `known` the newest; None where that
        is it.
        """
        lease, before = held.stored.lease, held.stored.begun
        if lease.in_step and before is None:
            await self._handed_in(lease.run)
        if known is None:
            begun = await self._early.begin(held)
        else:
            begun = await self._parts.api.begin(lease.task, lease.attempt, known.version)
            if begun.version == known.version:
                return None
        if begun.manifest is None:
            raise InvalidFrame("the coordinator sent no manifest of the version to begin from")
        manifest = self._checked(begun.manifest, lease)
        if before is None or before.version != begun.version:
            self._parts.leases.snapshot(lease).unlink(missing_ok=True)  # of another base
        with_begin(held, begun=begun, lease=_bound(lease, begun, manifest))
        self._parts.leases.keep(held.stored)
        stack.enter_context(self._parts.cache.hold([manifest.weights.sha256]))
        weights = await self._fetch_weights(held, manifest)
        self._early.brought(manifest, begun.manifest)
        return Base(begun=begun, manifest=manifest, weights=weights)

    async def _fetch_weights(self, held: Held, manifest: VersionManifest) -> Path:
        began = self._parts.clock.monotonic()
        teller = partial(self._teller, held, "weights")
        path = await self._parts.weights.fetch(manifest, teller)
        spent = self._parts.clock.monotonic() - began
        self._fetch_s = spent if spent >= MOVED_S else self._fetch_s
        return path

    async def _handed_in(self, run: str) -> None:
        """Wait until the last result for this run has left: the next base is to hold it."""
        told = False
        while self._unsent(run):
            change = self._parts.desk.change()
            if not told:
                told = True
                message = "handing in the last result; the next task begins with the next version"
                self._parts.hub.emit(events.Idle(reason="merging", message=message))
            await change

    def _unsent(self, run: str) -> bool:
        """Return True if a result for this run is being encoded, or waits to be handed in."""
        encoding = any(
            held.phase == "encode" and held.stored.lease.run == run
            for held in self._parts.desk.held.values()
        )
        return encoding or any(entry.run == run for entry in self._parts.outbox.entries())

    def _checked(self, signed: SignedManifest, lease: Lease) -> VersionManifest:
        """The manifest, once it is known to be the coordinator's own word.

        Raises BadSignature, InvalidFrame.
        """
        manifest = checked(signed, self._parts.identity.public_key)
        if (manifest.run, manifest.workload) != (lease.run, lease.job.workload):
            raise InvalidFrame("the coordinator sent the manifest of another run")
        now = self._parts.clock.now() + self._parts.desk.offset_s
        if manifest.expires_at < now:
            self._parts.hub.notice(
                f"version {manifest.version} of {manifest.run} is older than its organiser "
                "promised: "
                "is the coordinator still the right one?",
                "warning",
            )
        return manifest

    def _files(self, held: Held, base: Base, data: LocalData) -> TaskFiles:
        parts, lease = self._parts, held.stored.lease
        return TaskFiles(
            held=held.stored,
            manifest=base.manifest,
            workload=lambda: parts.load(lease.job.workload),
            weights=base.weights,
            data=data,
            carried=parts.residuals.of(lease.run, self._device.id),
            snapshot=parts.leases.snapshot(lease),
            outbox=parts.outbox,
            memory_bytes=self.memory_bytes,
            now=parts.clock.now,
        )

    async def _train(
        self,
        held: Held,
        local: LocalTask,
        finish: Callable[[Work, Spent], T],
        on_report: Callable[[Report], None],
    ) -> Finished[T] | Interrupted:
        loop = asyncio.get_running_loop()
        files, job = local.files, local.files.held.lease.job

        def pass_on(report: Report) -> None:
            """On the training thread."""
            if not loop.is_closed():
                told = local.told(report)
                loop.call_soon_threadsafe(self._reported, held, told, local, on_report)

        def halved(micro: int) -> None:
            if not loop.is_closed():
                event = events.Halved(task=held.key[0], device=self._device.id, micro_batch=micro)
                loop.call_soon_threadsafe(self._parts.hub.emit, event)

        handle = self._trainer.submit(
            Assignment(
                begin=local.begin,
                finish=finish,
                samples=job.stop - job.start,
                report=pass_on,
                halved=halved,
                save=local.save,
                save_every_s=self._parts.settings.snapshot_seconds,
            )
        )
        held.phase, held.handle = "train", handle
        if held.ended:
            handle.stop(held.message)
        following = asyncio.ensure_future(self._follow(files, handle, local))
        try:
            return await asyncio.wrap_future(handle.future)
        finally:
            handle.stop("the task was given up")  # without effect on one that is over
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self, files: TaskFiles, handle: Handle[T], local: LocalTask) -> None:
        """Bring newer versions to work that may go on with them, as heartbeats announce them."""
        lease, newest = files.held.lease, files.manifest.version
        if lease.job.kind != "selfplay":
            return
        holds: dict[int, ExitStack] = {}  # of files that the work has yet to go on with

        def let_go(version: int) -> None:
            """On any thread."""
            if (hold := holds.pop(version, None)) is not None:
                hold.close()

        def swap(work: Work, manifest: VersionManifest, path: Path) -> None:
            local.swap(work, manifest, path)
            let_go(manifest.version)

        try:
            while True:
                change = self._parts.desk.change()
                if self._parts.desk.heads.get(lease.run, 0) <= newest:
                    await change
                    continue
                change.close()
                try:
                    manifest = self._checked(await self._parts.api.latest(lease.run), lease)
                    with ExitStack() as hold:
                        hold.enter_context(self._parts.cache.hold([manifest.weights.sha256]))
                        path = await self._parts.weights.fetch(
                            manifest, lambda total: lambda done: None
                        )
                        holds[manifest.version] = hold.pop_all()
                except VolunteerError as error:
                    self._parts.hub.notice(f"version not fetched: {error.message}", "warning")
                    await self._parts.clock.sleep(FOLLOW_S)
                    continue
                newest = manifest.version
                handle.tell(partial(swap, manifest=manifest, path=path))
        finally:
            for version in list(holds):
                let_go(version)

    def _reported(
        self, held: Held, report: Report, local: LocalTask, on_report: Callable[[Report], None]
    ) -> None:
        lease, begun = held.stored.lease, held.stored.begun
        self._parts.hub.emit(
            events.Training(
                task=lease.task,
                run=lease.run,
                device=self._device.id,
                step=report.step,
                steps=report.steps,
                samples=report.samples,
                loss=report.loss,
                steps_per_s=report.steps_per_s,
                tokens_per_s=report.samples_per_s * local.items_per_sample,
                eta_s=report.eta_s,
                version=begun.version if begun else 0,
                preview=report.preview,
                metrics=dict(report.metrics),
                items=local.items,
                counted=report.counted,
            )
        )
        on_report(report)

    def _teller(self, held: Held, what: str, total: int) -> Callable[[int], None]:
        """Turns progress into a few events a second."""
        clock, told = self._parts.clock, [float("-inf")]

        def tell(done: int) -> None:
            now = clock.monotonic()
            if now - told[0] >= EVENT_S or done >= total:
                told[0] = now
                self._parts.hub.emit(
                    events.Fetching(task=held.key[0], what=what, done_bytes=done, total_bytes=total)
                )

        return tell


def _bound(lease: Lease, begun: BeginReply, manifest: VersionManifest) -> Lease:
    """The lease with what became known when work began."""
    job = msgspec.structs.replace(
        lease.job,
        global_step=begun.global_step,
        base_version=begun.version,
        base_sha256=manifest.weights.sha256,
    )
    return msgspec.structs.replace(lease, finish_by=begun.finish_by, job=job)
