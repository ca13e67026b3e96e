"""Datasets: built once from an organiser's files, then only read, chunk by chunk, by hash."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from coordinator.database import datasets, experience, record, unreferenced_blobs, versions
from coordinator.database.datasets import DatasetRow
from coordinator.platform import PlatformService
from coordinator.rules.run_file import NAME_RULE, fits_a_path
from shared.errors import BadRequest, InvalidName, InvalidRunFile, NotFound
from shared.proofs.signing import canonical, digest
from shared.workloads.base import ChunkRef, DatasetManifest, DatasetWanted, load
from shared.workloads.data.local_data import LocalData
from shared.workloads.data.skipped_files import Skipped
from shared.workloads.data.task_suite import KIND as SUITE

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database
    from coordinator.storage.blobs import BlobStore
    from shared.clock import Clock
    from shared.workloads.data.image_dataset import ImageBuild
    from shared.workloads.data.text_dataset import TextBuild

STOPPED_S = 0.5  # interval at which a waiting thread checks whether its build was stopped
ANNOUNCED_S = 600.0  # interval of announcing the chunks of a long build again
Build = Callable[[Callable[[bytes], str]], DatasetManifest]
# Receives the progress of a build for the waiting command.
progress: ContextVar[Callable[[TextBuild | ImageBuild], None] | None] = ContextVar(
    "progress", default=None
)


class _ChunkStore:
    """Stores the chunks of one build, and announces them again while a long build runs."""

    def __init__(self, blobs: BlobStore, db: Database, clock: Clock) -> None:
        self._blobs, self._db, self._clock = blobs, db, clock
        self.serials: dict[str, str] = {}  # serials of announcements by name
        self._announced_at = clock.now()

    async def put(self, data: bytes) -> str:
        sha256 = await self._blobs.put_bytes(data)
        self.serials[sha256] = self._blobs.serials[sha256]
        now = self._clock.now()
        if now - self._announced_at > ANNOUNCED_S:
            self._announced_at = now
            await self._db.write(
                lambda conn: unreferenced_blobs.announce(conn, set(self.serials), now)
            )
        return sha256


class _ThreadPut:
    """Function `put` of a build in a thread: the event loop stores the chunks, until a stop."""

    def __init__(self, chunks: _ChunkStore) -> None:
        self._chunks, self._loop = chunks, asyncio.get_running_loop()
        self.stopped = threading.Event()
        self._tasks = set[asyncio.Task[None]]()

    def put(self, data: bytes) -> str:
        """Store a chunk and return its SHA-256. Raises CancelledError once the build is stopped."""
        future: Future[str] = Future()
        # The event loop creates the coroutine: one created here that the loop never runs would
        # cause a warning.
        self._loop.call_soon_threadsafe(self._begin, data, future)
        while not self.stopped.is_set():
            with contextlib.suppress(TimeoutError):
                return future.result(STOPPED_S)
        raise CancelledError

    def _begin(self, data: bytes, future: Future[str]) -> None:
        task = self._loop.create_task(self._store(data, future))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _store(self, data: bytes, future: Future[str]) -> None:
        try:
            future.set_result(await self._chunks.put(data))
        except BaseException as error:
            future.set_exception(error)


class Datasets(PlatformService):
    """Adds datasets and decides which blobs a volunteer may fetch."""

    async def add(self, build: Build, skipped: Skipped | None = None) -> DatasetManifest:
        """Run `build(put)` in a thread, store every chunk that it puts, then register the manifest.

        The sentences in `skipped` are stored for the listing. Raises InvalidRunFile, Conflict.
        """
        store = _ChunkStore(self._blobs, self._db, self._clock)
        thread_put = _ThreadPut(store)
        try:
            loop = asyncio.get_running_loop()
            manifest = await loop.run_in_executor(self._threads, build, thread_put.put)
        finally:
            thread_put.stopped.set()
        if not manifest.chunks and manifest.kind != SUITE:
            raise InvalidRunFile(
                f'the dataset "{manifest.name}" is empty: nothing was left to train on'
            )
        sha = digest(canonical(manifest))

        def register(conn: Connection) -> None:
            now = self._clock.now()
            kinds = [
                ("chunk", manifest.chunks),
                ("heldout", manifest.heldout),
                ("asset", manifest.assets.values()),
            ]
            rows = [(c.sha256, c.size, kind) for kind, chunks in kinds for c in chunks]
            datasets.register(conn, rows, now, store.serials)
            number = datasets.add(conn, manifest, sha)
            detail = {"manifest": sha, "chunks": len(manifest.chunks)}
            record.append(conn, "organiser", "dataset.add", manifest.name, detail, now)
            if skipped is not None:
                datasets.note_skipped(conn, number, skipped.sentences)

        await self._db.write(register)
        return manifest

    async def add_text(
        self, name: str, paths: Iterable[Path], **options: object
    ) -> DatasetManifest:
        """Add a token dataset from text files, folders or JSONL; see
        `shared.workloads.data.text_dataset.build_text`.
        """
        from shared.workloads.data.text_dataset import build_text

        return await self._named(name, build_text, paths, {"on_progress": progress.get()} | options)

    async def add_chat(
        self, name: str, paths: Iterable[Path], **options: object
    ) -> DatasetManifest:
        """Add a dataset of dialogues from JSON lines; see `chat_dataset.build_chat`."""
        from shared.workloads.data.chat_dataset import build_chat

        return await self._named(name, build_chat, paths, options)

    async def add_images(
        self, name: str, paths: Iterable[Path], **options: object
    ) -> DatasetManifest:
        """Add a dataset of images from folders, PNG and JPEG; see
        `shared.workloads.data.image_dataset.build_images`.
        """
        from shared.workloads.data.image_dataset import build_images

        return await self._named(
            name, build_images, paths, {"on_progress": progress.get()} | options
        )

    async def add_suite(
        self, name: str, paths: Iterable[Path], **options: object
    ) -> DatasetManifest:
        """Add a task suite from a file of JSON lines; see `shared.workloads.data.task_suite`."""
        from shared.workloads.data.task_suite import build_suite

        options.pop("skipped", None)  # no line of a suite can be skipped
        return await self._named(name, build_suite, paths, options)

    async def add_for(
        self, workload: str, request: DatasetWanted, skipped: Skipped
    ) -> DatasetManifest:
        """Add a dataset that a workload builds. Raises BadRequest, and the errors of `_named`."""
        try:
            workload_class = load(workload)
        except NotFound as error:  # the organiser named the unknown workload
            raise BadRequest(error.message) from error

        def build(
            name: str, _: object, put: Callable[[bytes], str], **__: object
        ) -> DatasetManifest:
            manifest = workload_class.dataset(request, put, skipped.add)
            if manifest.kind not in workload_class.dataset_kinds:
                raise InvalidRunFile(
                    f"the workload {workload} built a dataset of the kind {manifest.kind}, which it "
                    "does not train on: a fault of its package"
                )
            return msgspec.structs.replace(manifest, name=name)

        return await self._named(request.name, build, (), {"skipped": skipped})

    async def _named(
        self,
        name: str,
        builder: Callable[..., DatasetManifest],
        paths: Iterable[Path],
        options: dict[str, Any],
    ) -> DatasetManifest:
        """Build a dataset under a name that fits into paths. Raises InvalidName, InvalidRunFile,
        Conflict.
        """
        if not fits_a_path(name):
            raise InvalidName(f"the name of a dataset must be {NAME_RULE}")
        return await self.add(
            lambda put: builder(name, tuple(paths), put, **options), options.get("skipped")
        )

    async def listing(self) -> list[DatasetRow]:
        return await self._db.read(datasets.every)

    async def skipped(self, dataset_id: int) -> tuple[str, ...]:
        """Return the sentences about the files that a dataset's build skipped."""
        return await self._db.read(lambda conn: datasets.skipped(conn, dataset_id))

    async def manifest(self, name: str) -> DatasetManifest:
        """Return a dataset as volunteers see it, without its held-out split. Raises NotFound."""
        row = await self._db.read(lambda conn: datasets.by_name(conn, name))
        return msgspec.structs.replace(row.manifest, heldout=())

    async def may_read(self, sha256: str) -> bool:
        """Return True if a volunteer may fetch this blob: served data, published weights and
        samples; never the held-out split.
        """

        def read(conn: Connection) -> bool:
            return (
                datasets.is_served(conn, sha256)
                or versions.is_published(conn, sha256)
                or experience.is_chunk(conn, sha256)
            )

        return await self._db.read(read)

    async def is_stored(self, sha256: str) -> bool:
        """Return True if this blob is registered, so that the store must have it."""
        return bool(await self._db.read(lambda conn: datasets.blob_sizes(conn, [sha256])))


async def heldout(
    manifest: DatasetManifest, blobs: BlobStore, more: Mapping[str, ChunkRef]
) -> LocalData:
    """Return the held-out split of a dataset, or its first chunk if it has no such split, with the
    files `more` of its run.
    """
    split = msgspec.structs.replace(
        manifest, chunks=manifest.heldout or manifest.chunks[:1], heldout=()
    )
    refs: list[ChunkRef] = [*split.chunks, *split.assets.values(), *more.values()]
    return LocalData(split, {ref.sha256: await blobs.local(ref.sha256) for ref in refs}, more)
