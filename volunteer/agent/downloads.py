"""Downloads of a task's files: its data, the weights of its base, newer versions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from shared.errors import InvalidFrame, NotFound, VolunteerError
from shared.protocol import endpoints
from shared.protocol.leases import Lease
from shared.protocol.versions import BlobRef, SignedManifest, VersionManifest, chunks_digest
from shared.sentences import Sentence
from shared.text import duration
from shared.units import DAY_S
from shared.workloads.base import ChunkRef, DatasetManifest, Workload
from shared.workloads.base import load as load_any
from shared.workloads.data.local_data import LocalData
from shared.workloads.data.pass_order import PassOrder
from volunteer.account.membership import check_form
from volunteer.account.record_check import RecordCheck
from volunteer.agent.held_leases import LeaseInWork
from volunteer.agent.workplace import Workplace
from volunteer.control import events
from volunteer.storage.manifests import verified_manifest
from volunteer.storage.receipts import KeptHead

FETCH_AT_ONCE = 4
LEAD_S = 3.0  # least time before the end of a task at which the next one's weights are fetched
MOVED_S = 0.1  # files that took less time were in the cache
EVENT_S = 0.25  # least time between two events about a transfer
GRACE_S = 7 * DAY_S  # a version is still used this long after its expiry, with a warning
NO_DATA = DatasetManifest(name="", kind="", licence="", source="", chunks=())


class OlderVersion(VolunteerError):
    """Raised when the newest version is older than one seen before."""


@dataclass(eq=False, kw_only=True)
class Downloads:
    """Downloads files into the cache and checks their hashes and signatures."""

    place: Workplace
    record: RecordCheck
    load: Callable[[str], Workload] = load_any
    _datasets: dict[str, DatasetManifest] = field(default_factory=dict, init=False)
    _fetch_s: float = field(default=0.0, init=False)  # duration of the last fetch of weights

    @property
    def lead_s(self) -> float:
        """Return how many seconds before the end of a task to fetch the next one's weights."""
        return LEAD_S + 2 * self._fetch_s

    async def data(self, work: LeaseInWork, stack: ExitStack) -> LocalData:
        """Fetch the data of a lease; the cache keeps them until `stack` closes."""
        lease = work.lease
        manifest = lease.data or await self._dataset(lease.dataset)
        workload = self.load(lease.job.workload)
        run_files = workload.files(lease.job.config)
        files_here: dict[str, Path] = {}
        if lease.member:
            manifest, files_here = await asyncio.to_thread(
                self._own_data, lease, manifest, workload
            )
        chunks = task_chunks(lease, manifest)
        blobs = run_files if lease.member else {**manifest.assets, **run_files}
        assets = {name: blob_of(chunk) for name, chunk in blobs.items()}
        refs = {ref.sha256: ref for ref in (*chunks.values(), *assets.values())}
        stack.enter_context(self.place.store.cache.hold(refs))
        progress = self._progress(work, "data", sum(ref.size for ref in refs.values()))
        origin = workload.origin(lease.job.config) if run_files else None
        files = await self._fetch_all(refs.values(), progress, origin.paths if origin else {})
        return LocalData(manifest, files_here | files, run_files)

    def _own_data(
        self, lease: Lease, example: DatasetManifest, workload: Workload
    ) -> tuple[DatasetManifest, dict[str, Path]]:
        """Return the manifest of own data for a run, and a task's verified files. Blocks on the
        disk.

        Raises OwnDataUnusable, and NotFound if the data were replaced since the task was handed
        out.
        """
        record = self.place.store.own_data.record(lease.run)
        manifest, job = record.manifest, lease.job
        check_form(lease.run, manifest, example)
        order = PassOrder(workload.samples(job.config, manifest), job.order_seed)
        if job.stop > order.total:
            raise NotFound(
                Sentence(
                    "your data for {run} were replaced after this task was handed out",
                    run=lease.run,
                )
            )
        chunks = [manifest.chunks[index] for index in order.chunks(job.start, job.stop)]
        refs = (*chunks, *manifest.heldout, *manifest.assets.values())
        return manifest, self.place.store.own_data.files(record, refs)

    async def prefetch_data(self, work: LeaseInWork) -> None:
        """Fetch the data of a task that has not begun into the cache."""
        with ExitStack() as stack:
            await self.data(work, stack)

    async def weights(self, work: LeaseInWork, manifest: VersionManifest) -> Path:
        """Fetch the weights of a version into the cache, with progress as events of the task."""
        progress = partial(self._progress, work, "weights")
        await self.place.life.files_allowed()
        began = self.place.timing.clock.monotonic()
        path = await self.place.remote.weights.fetch(manifest, progress)
        spent = self.place.timing.clock.monotonic() - began
        self._fetch_s = spent if spent >= MOVED_S else self._fetch_s
        return path

    async def hold_weights(
        self, work: LeaseInWork, manifest: VersionManifest, stack: ExitStack
    ) -> Path:
        """Fetch the weights of a version; the cache keeps them until `stack` closes."""
        stack.enter_context(self.place.store.cache.hold([manifest.weights.sha256]))
        return await self.weights(work, manifest)

    async def newest(self, lease: Lease) -> VersionManifest:
        """Return the verified manifest of the newest version of a lease's run."""
        floor = self.place.store.receipts.newest(lease.run)
        signed = await self.place.remote.api.query(endpoints.LATEST, run=lease.run)
        return self.verify(signed, lease, floor)

    async def fetch_newest(self, lease: Lease) -> tuple[VersionManifest, Path, ExitStack]:
        """Fetch the newest version without events; return its manifest, its file, and a stack whose
        closing lets the cache evict the file.
        """
        manifest = await self.newest(lease)
        with ExitStack() as hold:
            hold.enter_context(self.place.store.cache.hold([manifest.weights.sha256]))
            await self.place.life.files_allowed()
            path = await self.place.remote.weights.fetch(manifest, lambda total: lambda done: None)
            return manifest, path, hold.pop_all()

    async def fits(self, manifest: VersionManifest) -> bool:
        """Return True if the cache has room for a version and the files that it is built from."""
        return await asyncio.to_thread(self.place.store.cache.fits, 2 * manifest.weights.size)

    def verify(self, signed: SignedManifest, lease: Lease, floor: int = -1) -> VersionManifest:
        """Return the manifest after verifying its signature.

        If the newest version was requested, `floor` is the newest version seen before. Raises
        BadSignature, OlderVersion for a version below the floor, InvalidFrame also for a version
        that expired longer ago than the grace time.
        """
        manifest = verified_manifest(signed, self.place.remote.identity.public_key)
        if (manifest.run, manifest.workload) != (lease.run, lease.job.workload):
            raise InvalidFrame(Sentence("the coordinator sent the manifest of another run"))
        if manifest.version < floor:
            raise OlderVersion(
                Sentence(
                    "the coordinator offers version {version} of {run} as the newest, but had "
                    "signed version {floor} before, and has not signed that it was restored from a "
                    "backup: no work is taken from it (`volunteer receipts accept`, if its "
                    "organiser says that this is right)",
                    version=manifest.version,
                    run=manifest.run,
                    floor=floor,
                )
            )
        self._check_age(manifest)
        self.place.store.receipts.note_version(manifest.run, manifest.version)
        if manifest.tree is not None:
            self.place.store.receipts.unchecked_head = KeptHead(
                tree=manifest.tree, payload=signed.payload, signature=signed.signature
            )
        return manifest

    async def accept_restore(self) -> bool:
        """Accept a signed statement of the coordinator that it was restored from a backup. Return
        False if there is no new statement, or the check fails.
        """
        try:
            sentence = await self.record.accept_restore()
        except VolunteerError as error:
            self.place.bus.notice(error.message, "warning")
            return False
        if sentence:
            self.place.bus.notice(sentence, "warning")
        return bool(sentence)

    def check_data(self, manifest: VersionManifest, lease: Lease, dataset: DatasetManifest) -> None:
        """Check the dataset and the files of the run against the hashes signed with a version.
        Raises InvalidFrame.

        Data of one task, such as games, and manifests of older coordinators have no hash to check.
        """
        files = self.load(lease.job.workload).files
        if files(lease.job.config) != files(manifest.config):
            raise InvalidFrame(
                Sentence(
                    "the files of {run} are not those of version {version}: their hashes are not "
                    "what its manifest says",
                    run=lease.run,
                    version=manifest.version,
                )
            )
        if lease.data is not None:
            return
        if lease.member:
            dataset = self._datasets[lease.dataset]  # the published example of the own data
        if manifest.chunks_sha256 and chunks_digest(dataset) != manifest.chunks_sha256:
            wrong = Sentence("its hash")
        elif manifest.tokenizer_sha256 and _tokenizer(dataset) != manifest.tokenizer_sha256:
            wrong = Sentence("the hash of its tokenizer")
        else:
            return
        self._datasets.pop(lease.dataset, None)
        raise InvalidFrame(
            Sentence(
                'the dataset "{name}" is not the one of version {version}: {wrong} is not what '
                "its manifest says",
                name=dataset.name,
                version=manifest.version,
                wrong=wrong,
            )
        )

    def _check_age(self, manifest: VersionManifest) -> None:
        late_s = self.place.server_clock.now() - manifest.expires_at
        if late_s > GRACE_S:
            raise InvalidFrame(
                Sentence(
                    "version {version} of {run} expired {time} ago and was not signed again: "
                    "somebody replays an old one, or the coordinator does not work",
                    version=manifest.version,
                    run=manifest.run,
                    time=duration(late_s),
                )
            )
        if late_s > 0:
            self.place.bus.notice(
                Sentence(
                    "version {version} of {run} is older than its organiser promised: is the "
                    "coordinator still the right one?",
                    version=manifest.version,
                    run=manifest.run,
                ),
                "warning",
            )

    async def _fetch_all(
        self,
        refs: Iterable[BlobRef],
        progress: Callable[[int], None],
        public: Mapping[str, str],
    ) -> dict[str, Path]:
        done: dict[str, int] = {}
        files: dict[str, Path] = {}
        limit = asyncio.Semaphore(FETCH_AT_ONCE)

        async def fetch_one(ref: BlobRef) -> None:
            def moved(count: int) -> None:
                done[ref.sha256] = count
                progress(sum(done.values()))

            async with limit:
                await self.place.life.files_allowed()
                path = public.get(ref.sha256, "")
                files[ref.sha256] = await self.place.remote.transfers.fetch(ref, moved, path)

        jobs = [asyncio.ensure_future(fetch_one(ref)) for ref in refs]
        try:
            await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        return files

    async def _dataset(self, name: str) -> DatasetManifest:
        if not name:  # the run makes its own data
            return NO_DATA
        if name not in self._datasets:
            manifest = await self.place.remote.api.call(endpoints.DATASET, {"dataset": name})
            self._datasets[name] = manifest
        return self._datasets[name]

    def _progress(self, work: LeaseInWork, label: str, total: int) -> Callable[[int], None]:
        """Return a callback for a transfer's progress that emits a few events a second."""
        last = [float("-inf")]

        def moved(done: int) -> None:
            now = self.place.timing.clock.monotonic()
            if now - last[0] >= EVENT_S or done >= total:
                last[0] = now
                self.place.bus.emit(
                    events.Fetching(
                        task=work.key[0], what=label, done_bytes=done, total_bytes=total
                    )
                )

        return moved


def _tokenizer(dataset: DatasetManifest) -> str:
    chunk = dataset.assets.get("tokenizer")
    return chunk.sha256 if chunk else ""


def task_chunks(lease: Lease, manifest: DatasetManifest) -> dict[int, BlobRef]:
    """Return the chunks of a task, by index. Raises InvalidFrame for a missing chunk."""
    refs = {}
    for index in lease.chunks:
        if not 0 <= index < len(manifest.chunks):
            raise InvalidFrame(
                Sentence(
                    "the task names chunk {index}, which {name} does not have",
                    index=index,
                    name=manifest.name,
                )
            )
        refs[index] = blob_of(manifest.chunks[index])
    return refs


def blob_of(chunk: ChunkRef) -> BlobRef:
    return BlobRef(sha256=chunk.sha256, size=chunk.size)
