"""Resumable uploads: streamed to disk, counted against their grant, hashed and synced meanwhile,
then stored as a blob.

Memory stays constant for any size: at most two batches of an upload are in memory, one being
received and one being hashed and written in a thread. There is one writer at a time; a newer
request ends an older one, since the client waits only for the newer one. A running upload is a
file, or pieces in an object store, so that any replica can continue it.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from coordinator.batcher import Batcher
from coordinator.database import contributions, datasets, tasks, unreferenced_blobs, upload_rows
from coordinator.database.tasks import TaskRow
from coordinator.database.upload_rows import QuotaUse, UploadRow
from coordinator.platform import Platform, PlatformService
from coordinator.rules.standing import PROBATION_LEASES
from coordinator.storage.blobs import check_name, in_pool, open_in_pool, storage_errors
from coordinator.storage.staging import stored_bytes
from coordinator.ttl_cache import CachedValue
from shared.clock import machine_time
from shared.errors import (
    BadRequest,
    Conflict,
    Gone,
    InvalidFrame,
    OffsetMismatch,
    StorageFull,
    TooLarge,
    TooManyRequests,
    Unavailable,
    UnknownTask,
    VolunteerError,
)
from shared.files.deletions import delete_file
from shared.programs.machine_limits import disk_bytes
from shared.protocol.contributions import UploadInfo, UploadRequest
from shared.protocol.limits import (
    DIRECT_BYTES,
    PARTS_MAX,
    TRIES_MAX,
    UPLOAD_BYTES_MAX,
    UPLOAD_PIECE_BYTES,
)
from shared.tensors.writer import BackgroundSync
from shared.units import DAY_S

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.accounts.accounts import Principal
    from coordinator.storage.staging import Staging

BATCH_BYTES = 2 << 20
# an upload, or its rest, up to this size is received whole before it is written
SMALL_BYTES = 256 << 10
UPLOAD_TTL_S = DAY_S  # an upload that is not submitted by then is deleted
WAITING_MAX = 1024  # uploads of one volunteer that are not submitted yet
PLACE_MAX = 2  # uploads of one part: a volunteer that lost its file may compute it again once
UNVETTED_SHARE = 0.5  # share of the free disk above the floor for all unvetted volunteers together
# most hash states kept between requests; a missing state is recomputed from the file
HASHES_MAX = 512
BATCH_MAX = 64  # uploads in one transaction
FREE_S = 1.0  # age of the free bytes by which uploads are granted
UPLOAD_ID = re.compile(r"[0-9a-f]{32}")
EXPIRE_MAX = 500


class _UploadWriter:
    """Request that is writing an upload."""

    def __init__(self) -> None:
        self.scope = asyncio.timeout(None)
        self.done = asyncio.Event()
        self.storing = False  # every byte has arrived: the upload becomes a blob
        self._ended = False

    def end(self) -> None:
        """End this writer's request, once, even if several newer writers call this."""
        if not (self.storing or self._ended):
            self._ended = True
            self.scope.reschedule(asyncio.get_running_loop().time())


class _PartialFile:
    """File of a running upload, for one thread at a time."""

    def __init__(self, path: Path, offset: int, digest: hashlib._Hash) -> None:
        self.offset = offset
        self.digest = digest
        self._file = path.open("r+b" if path.exists() else "xb", buffering=0)
        self._file.seek(offset)
        self._syncing = BackgroundSync(self._file.fileno())

    def append(self, data: memoryview) -> None:
        """Append bytes with one write and one hash, since each call waits for the interpreter's
        lock.
        """
        size, left = len(data), data
        with storage_errors():
            while left:
                left = left[self._file.write(left) :]
        self.digest.update(data)
        self.offset += size
        with self._safe():
            self._syncing.add(size)

    @contextmanager
    def _safe(self) -> Iterator[None]:
        """Start the upload again at byte 0 if a write or sync in this block fails: the system
        reports a failed sync only once.
        """
        try:
            with storage_errors():
                yield
        except BaseException:
            self.offset, self.digest = 0, hashlib.sha256()
            raise

    def close(self) -> None:
        """Close the file, cut to the hashed bytes."""
        try:
            with self._safe():
                self._syncing.end()
        finally:
            self._file.truncate(self.offset)
            self._file.close()


class _Asked(NamedTuple):
    """Request to begin an upload, and the free bytes of the disk."""

    principal: Principal
    request: UploadRequest
    free: float


_Granted = tuple[UploadRow, bool]  # an upload, and whether it is new


class Uploads(PlatformService):
    """Receives the bytes of contributions."""

    def __init__(self, on: Platform) -> None:
        super().__init__(on)
        self._directory = on.blobs.scratch() / "uploads"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._writers: dict[str, _UploadWriter] = {}
        self._hashes: OrderedDict[str, tuple[int, hashlib._Hash]] = OrderedDict()
        # A grant reserves no space: the bytes arrive later, and if the disk is full by then, they
        # are refused.
        self._free = CachedValue(self._free_bytes, FREE_S, on.clock)
        self._granted_bytes: dict[int, int] = {}  # update size by run, whose model never changes
        # uploads of one account are granted in turn, since each counts against its quota
        self._granting = Batcher(
            self._grant_all, BATCH_MAX, key=lambda each: each.principal.volunteer_id
        )
        self._reading = Batcher(self._read_all, BATCH_MAX)
        self._finishing = Batcher(self._store_all, BATCH_MAX)

    def _path(self, upload_id: str) -> Path:
        return self._directory / upload_id

    # --- begin ---

    async def create(self, principal: Principal, request: UploadRequest) -> UploadInfo:
        """Grant an upload to the holder of a lease; a repeated request finds the same upload.

        Raises UnknownTask, Gone and Cancelled for a lost lease, Gone for a result that was
        submitted, TooLarge beyond the grant, Conflict, TooManyRequests beyond the quota,
        StorageFull, BadRequest.
        """
        check_name(request.sha256)
        if not (0 <= request.part < PARTS_MAX and 0 <= request.tries < TRIES_MAX):
            raise BadRequest("part or tries is out of range")
        if not 0 < request.size <= UPLOAD_BYTES_MAX:
            raise TooLarge(f"an upload has between 1 and {UPLOAD_BYTES_MAX} bytes")
        if (free := await self._free.get()) < request.size:
            raise StorageFull(
                "the coordinator's disk is nearly full; keep your result, retry later",
                retry_after_s=60.0,
            )
        row, fresh = await self._granting.ask(_Asked(principal, request, free))
        return await self._directed(self._view(row, 0) if fresh else await self._info(row))

    async def _directed(self, info: UploadInfo) -> UploadInfo:
        """Add the address for sending the next piece straight to the store, if enough bytes are
        left.
        """
        left, staging = info.size - info.offset, self._blobs.staging
        if staging is None or info.complete or left < DIRECT_BYTES:
            return info
        size = min(left, UPLOAD_PIECE_BYTES)
        url = await staging.url(info.upload_id, info.offset, size)
        return msgspec.structs.replace(info, url=url)

    async def _grant_all(self, asked: Sequence[_Asked]) -> list[_Granted | Exception]:
        return await self._db.write(lambda conn: self._grant(conn, asked))

    def _grant(self, conn: Connection, asked: Sequence[_Asked]) -> list[_Granted | Exception]:
        """Store new uploads; return each upload and whether it is new, or an error."""
        numbers = [each.request.task for each in asked]
        tasks_by_id = tasks.holders(conn, numbers)
        uploads = upload_rows.of_tasks(conn, numbers)
        submitted = contributions.submitted(conn, numbers, [one.request.sha256 for one in asked])
        uses = upload_rows.quota_use(conn, [each.principal.volunteer_id for each in asked])
        answers: list[_Granted | Exception] = []
        unvetted = 0  # bytes
        for each in asked:
            try:
                request = each.request
                if (task := tasks_by_id.get(request.task)) is None:
                    raise UnknownTask(f"there is no task {request.task} of yours")
                key = (
                    request.task, request.attempt, request.part, request.tries, request.sha256
                )  # fmt: skip
                if (*key, each.principal.worker_id) in submitted:
                    raise Gone("this result was submitted: submit it again for its answer")
                row = self._row_of(each, task)
                place = [upload for upload in uploads if _place(upload) == _place(row)]
                if (earlier := _same(place, row)) is not None:
                    answers.append((earlier, False))
                    continue
                use = uses[each.principal.volunteer_id]
                self._check_grant(
                    row, use, place, tasks.grant_bytes(conn, task, self._granted_bytes)
                )
                if not use.vetted:
                    _check_share(conn, unvetted + row.size, each.free)
                    unvetted += row.size
                answers.append((row, True))
            except VolunteerError as error:
                answers.append(error)
        new = [answer[0] for answer in answers if isinstance(answer, tuple) and answer[1]]
        names = {row.sha256 for row in new}
        serials = unreferenced_blobs.announce(conn, names, self._clock.now())
        upload_rows.add(conn, [row for row in new if row.sha256 in serials])
        return [
            unreferenced_blobs.being_deleted()
            if isinstance(answer, tuple) and answer[1] and answer[0].sha256 not in serials
            else answer
            for answer in answers
        ]

    def _row_of(self, each: _Asked, task: TaskRow) -> UploadRow:
        """Return the row of an upload that its worker may begin. Raises like `create`."""
        (principal, request, _), now = each, self._clock.now()
        tasks.may_submit(task, principal.worker_id, request.attempt)
        return UploadRow(
            attempt=request.attempt,
            part=request.part,
            tries=request.tries,
            worker_id=principal.worker_id,
            sha256=request.sha256,
            size=request.size,
            id=secrets.token_hex(16),
            task_id=request.task,
            complete=False,
            expires_at=now + UPLOAD_TTL_S,
        )

    def _check_grant(
        self, row: UploadRow, use: QuotaUse, place: Sequence[UploadRow], granted: int
    ) -> None:
        """Raise TooLarge beyond a lease's grant, TooManyRequests beyond the quota, and Conflict if
        `place`, the uploads of the same part, is full.
        """
        if row.size > granted:
            raise TooLarge(f"{row.size} bytes were announced, task {row.task_id} grants {granted}")
        if len(place) >= PLACE_MAX:
            raise Conflict(f"task {row.task_id} has {PLACE_MAX} uploads of this part already")
        quota = self._settings.constants.upload_quota_bytes
        if not use.vetted:
            quota = min(quota, 2 * granted * PROBATION_LEASES)
        if use.count >= WAITING_MAX or use.bytes + row.size > quota:
            raise TooManyRequests(
                "too many uploaded bytes are not submitted yet; submit them first",
                retry_after_s=60.0,
            )

    async def _free_bytes(self) -> float:
        """Return the free bytes above the floor."""
        free, _ = await in_pool(disk_bytes, self._directory)
        return free - self._settings.space_floor_bytes

    # --- receive ---

    async def _row(self, principal: Principal, upload_id: str) -> UploadRow:
        row = await self._reading.ask(upload_id) if UPLOAD_ID.fullmatch(upload_id) else None
        mine = row is not None and row.worker_id == principal.worker_id
        if row is None or not mine or row.expires_at < self._clock.now():
            raise UnknownTask("there is no such upload, or it was deleted: start it again")
        return row

    async def _read_all(self, asked: Sequence[str]) -> list[UploadRow | None]:
        found = await self._db.read(lambda conn: upload_rows.by_ids(conn, asked))
        return [found.get(upload_id) for upload_id in asked]

    async def _info(self, row: UploadRow) -> UploadInfo:
        offset = row.size if row.complete else await self._there(row)
        if self._blobs.staging is not None and offset < row.size:
            row = await self._reading.ask(row.id) or row  # another replica may have finished it
            offset = row.size if row.complete else offset
        if offset == row.size and not row.complete and row.id not in self._writers:
            async with self._alone(row.id) as writer:  # all bytes are there, but no blob yet
                writer.storing = True
                return await self._finish(row)
        return self._view(row, offset)

    async def _there(self, row: UploadRow) -> int:
        """Return how many bytes of an upload have arrived."""
        here = await in_pool(self._offset, row.id)
        if self._blobs.staging is None or here == row.size:
            return here
        return stored_bytes(await self._blobs.staging.pieces(row.id))

    def _offset(self, upload_id: str) -> int:
        try:
            return self._path(upload_id).stat().st_size
        except FileNotFoundError:
            return 0

    def _view(self, row: UploadRow, offset: int, complete: bool | None = None) -> UploadInfo:
        return UploadInfo(
            upload_id=row.id,
            offset=offset,
            size=row.size,
            complete=row.complete if complete is None else complete,
            expires_at=row.expires_at,
        )

    async def write(
        self, principal: Principal, upload_id: str, offset: int, stream: AsyncIterator[bytes]
    ) -> UploadInfo:
        """Append the bytes of a stream to an upload; the last byte triggers the hash check and
        durable storage.

        Raises OffsetMismatch if the file is not at `offset`, TooLarge beyond the announced size,
        InvalidFrame if the bytes are not the announced ones (the upload is then deleted), Conflict
        if a newer request has taken over, NotFound.
        """
        async with self._alone(upload_id) as writer:
            row = await self._row(principal, upload_id)
            if row.complete:
                return self._view(row, row.size)
            append = self._append_all if self._blobs.staging is None else self._append_piece
            there = await append(row, offset, stream)
            if there == row.size:
                writer.storing = True
                return await self._finish(row)
            return self._view(row, there)

    async def _append_all(self, row: UploadRow, offset: int, stream: AsyncIterator[bytes]) -> int:
        """Append a stream to the file of the upload. Return the file's size."""
        receive = self._receive_small if row.size - offset <= SMALL_BYTES else self._receive
        return await receive(row, offset, stream)

    async def _append_piece(self, row: UploadRow, offset: int, stream: AsyncIterator[bytes]) -> int:
        """Append a stream as a piece in the store and return the new offset; a piece cut short by a
        broken connection is kept. Raises OffsetMismatch, TooLarge.
        """
        there = await self._there(row)
        if offset != there:
            raise OffsetMismatch(f"the upload is at byte {there}, not at {offset}")
        piece = msgspec.structs.replace(row, id=f"{row.id}.{offset}", size=row.size - offset)
        path = self._path(piece.id)
        await in_pool(lambda: delete_file(path, "scratch"))  # left by a process that died
        try:
            await self._append_all(piece, 0, stream)
        finally:
            there += await asyncio.shield(self._stage(row, offset, piece.id))
        return there

    async def _stage(self, row: UploadRow, offset: int, piece: str) -> int:
        """Store a received piece; an upload of one piece skips the staging. Return the size of the
        piece.
        """
        size, path = await in_pool(self._offset, piece), self._path(piece)
        known = self._hashes.pop(piece, None)
        if size == row.size:
            await in_pool(path.replace, self._path(row.id))
            if known is not None:
                self._hashes[row.id] = known
        elif size and self._blobs.staging is not None:
            await self._blobs.staging.put(row.id, offset, path, size)
        await in_pool(lambda: delete_file(path, "moved"))
        return size

    @asynccontextmanager
    async def _alone(self, upload_id: str) -> AsyncIterator[_UploadWriter]:
        """Hold the exclusive right to write this upload inside the block. Raises Conflict if a
        newer request took it.
        """
        while (older := self._writers.get(upload_id)) is not None:
            older.end()
            await older.done.wait()
        writer = self._writers[upload_id] = _UploadWriter()
        try:
            async with writer.scope:
                yield writer
        except TimeoutError as error:
            raise Conflict("a newer request continues this upload") from error
        finally:
            del self._writers[upload_id]
            writer.done.set()

    def _open(self, row: UploadRow, offset: int) -> _PartialFile:
        path = self._path(row.id)
        there = self._offset(row.id)
        if offset != there:
            raise OffsetMismatch(f"the upload is at byte {there}, not at {offset}")
        known = self._hashes.pop(row.id, None)
        if known is not None and known[0] == offset:
            return _PartialFile(path, offset, known[1])
        return _PartialFile(path, offset, _hash_file(path, offset))

    async def _receive(self, row: UploadRow, offset: int, stream: AsyncIterator[bytes]) -> int:
        """Append bytes as they arrive; return the size so far."""
        part = await open_in_pool(self._open, row, offset)
        try:
            await self._fill(row, part, stream)
        finally:
            await asyncio.shield(in_pool(part.close))
            self._remember(row.id, part.offset, part.digest)
        return part.offset

    async def _receive_small(
        self, row: UploadRow, offset: int, stream: AsyncIterator[bytes]
    ) -> int:
        """Receive a small upload in memory, which needs one change of threads instead of three.
        Raises TooLarge.
        """
        received = bytearray()
        try:
            async for data in stream:
                if offset + len(received) + len(data) > row.size:
                    raise TooLarge(f"more bytes arrived than the {row.size} announced")
                received += data
        finally:
            part = await asyncio.shield(in_pool(self._append, row, offset, received))
            self._remember(row.id, part.offset, part.digest)
        return part.offset

    def _append(self, row: UploadRow, offset: int, data: bytearray) -> _PartialFile:
        part = self._open(row, offset)
        try:
            part.append(memoryview(data))
        finally:
            part.close()
        return part

    async def _fill(self, row: UploadRow, part: _PartialFile, stream: AsyncIterator[bytes]) -> None:
        """Fill one buffer while the other is written. Bytes that arrived before a broken connection
        are kept. Raises TooLarge.

        The buffers are made once: allocating megabytes for each batch costs more system time than
        the disk.
        """
        pending: asyncio.Future[None] | None = None
        filled, room = 0, row.size - part.offset
        batch = min(BATCH_BYTES, max(1, room))
        filling, other = memoryview(bytearray(batch)), memoryview(bytearray(batch))
        try:
            async for data in stream:
                room -= len(data)
                if room < 0:
                    raise TooLarge(f"more bytes arrived than the {row.size} announced")
                left = memoryview(data)
                while left:
                    count = min(len(left), batch - filled)
                    filling[filled : filled + count] = left[:count]
                    left, filled = left[count:], filled + count
                    if filled == batch:
                        if pending is not None:
                            await asyncio.shield(pending)
                        pending = asyncio.ensure_future(in_pool(part.append, filling))
                        filling, other, filled = other, filling, 0
        finally:
            if pending is not None:
                await pending
            if filled:
                await in_pool(part.append, filling[:filled])

    def _remember(self, upload_id: str, offset: int, digest: hashlib._Hash) -> None:
        self._hashes[upload_id] = (offset, digest)
        while len(self._hashes) > HASHES_MAX:
            self._hashes.popitem(last=False)

    # --- finish ---

    async def _finish(self, row: UploadRow) -> UploadInfo:
        """Store a complete upload as a blob. Raises InvalidFrame for other bytes than announced.

        Another replica may do the same at this moment: an error is ignored if the other has
        completed the upload.
        """
        path, staging = self._path(row.id), self._blobs.staging
        in_pieces = staging is not None and await in_pool(self._offset, row.id) != row.size
        try:
            await self._make_blob(row, staging if in_pieces else None)
        except (InvalidFrame, Unavailable):
            current = await self._reading.ask(row.id)
            if current is None or not current.complete:
                raise
            await in_pool(lambda: delete_file(path, "moved"))
        else:
            await self._finishing.ask(row)
            if staging is not None and in_pieces:
                await staging.drop(row.id)
        return self._view(row, row.size, complete=True)

    async def _make_blob(self, row: UploadRow, staging: Staging | None) -> None:
        """Make a blob of the bytes whose hash was checked: of the file here, or with `staging` of
        the pieces in the store. Raises InvalidFrame, and drops the upload, if the hash is not the
        announced one.
        """
        path = self._path(row.id)
        copy = "" if staging is None else await staging.collect(row.id, row.size, path)
        try:
            offset, digest = self._hashes.pop(row.id, (-1, hashlib.sha256()))
            if offset != row.size:
                digest = await in_pool(_hash_file, path, row.size)
            if digest.hexdigest() != row.sha256:
                await self._drop([row.id], incomplete=True)
                raise InvalidFrame(
                    "the bytes do not have the hash that was announced; upload them again"
                )
            if staging is not None:
                await staging.store(row.sha256, path, copy)
            else:
                await self._blobs.store_file(row.sha256, path)
        finally:
            if staging is not None:
                await staging.release(copy)

    async def _store_all(self, rows: Sequence[UploadRow]) -> list[None]:
        """Mark uploads complete, even if their senders have left."""
        await self._db.write(lambda conn: self._store(conn, rows))
        return [None] * len(rows)

    def _store(self, conn: Connection, rows: Sequence[UploadRow]) -> None:
        now = self._clock.now()
        datasets.register_referenced(conn, [(row.sha256, row.size, "update") for row in rows], now)
        upload_rows.finish(conn, [row.id for row in rows])

    async def _drop(self, upload_ids: list[str], *, incomplete: bool = False) -> None:
        """Delete uploads; with `incomplete` only the uploads that no replica has completed."""
        dropped = await self._db.write(
            lambda conn: upload_rows.remove(conn, upload_ids, incomplete=incomplete)
        )
        for upload_id in upload_ids:
            self._hashes.pop(upload_id, None)
            await in_pool(lambda path: delete_file(path, "settled"), self._path(upload_id))
        if self._blobs.staging is not None:
            for upload_id in dropped:
                await self._blobs.staging.drop(upload_id)

    async def expire(self) -> int:
        """Delete uploads past their time or lease, and files unchanged for two days; return the
        number of uploads.
        """
        now = self._clock.now()

        def over(conn: Connection) -> list[str]:
            late = upload_rows.expired(conn, now, EXPIRE_MAX)
            return [*late, *upload_rows.abandoned(conn, EXPIRE_MAX)]

        gone = list(dict.fromkeys(await self._db.read(over)))
        gone = [upload_id for upload_id in gone if upload_id not in self._writers]
        await self._drop(gone)
        await in_pool(self._sweep, machine_time(self._clock) - 2 * UPLOAD_TTL_S)
        return len(gone)

    def _sweep(self, older_than: float) -> None:
        for path in self._directory.iterdir():
            with suppress(FileNotFoundError):  # its upload ended just now
                if path.stat().st_mtime < older_than and path.name not in self._writers:
                    delete_file(path, "expired")


def _place(row: UploadRow) -> tuple[int, int, int, int]:
    """Return the task, the attempt, the part and the try that an upload is for."""
    return row.task_id, row.attempt, row.part, row.tries


def _same(place: Sequence[UploadRow], row: UploadRow) -> UploadRow | None:
    """Return an earlier upload of these bytes for this part, or None. Raises NotFound, Conflict."""
    known = next((one for one in place if one.sha256 == row.sha256), None)
    if known is not None and known.worker_id != row.worker_id:
        raise UnknownTask(f"there is no task {row.task_id} of yours")
    if known is not None and known.size != row.size:
        raise Conflict("these bytes were announced before with another size")
    return known


def _check_share(conn: Connection, size: int, free: float) -> None:
    """Raise StorageFull if all unvetted volunteers together would fill half of the free disk."""
    filled = upload_rows.waiting_unvetted(conn)
    if filled + size > (free + filled) * UNVETTED_SHARE:
        raise StorageFull(
            "newcomers have filled their share of the coordinator's disk; keep your result, "
            "it will be taken later",
            retry_after_s=60.0,
        )


def _hash_file(path: Path, size: int) -> hashlib._Hash:
    digest = hashlib.sha256()
    if size:
        with path.open("rb") as file:
            left = size
            while left and (data := file.read(min(BATCH_BYTES, left))):
                digest.update(data)
                left -= len(data)
    return digest
