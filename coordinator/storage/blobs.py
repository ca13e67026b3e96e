"""Blobs: immutable bytes named by their SHA-256, on a disk or in an S3-compatible store, behind one
interface.

A blob is durable when `put_*` returns: its file and its directory are synced, as POSIX requires for
a rename. A failed sync is never retried: the kernel may have dropped the pages, so the caller must
write the bytes again. The meaning of a blob, the right to read it and its deletion are the callers'
business.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeAlias, TypeVar
from uuid import uuid4

import msgspec

from coordinator.storage.announced_blobs import AnnouncedBlobs, Announcer, unannounced
from shared.errors import BadRequest, StorageFull, Unavailable
from shared.files.cancel_safe_open import R, open_in_thread
from shared.files.deletions import Reason, delete_file
from shared.files.disk_writes import sync_directory, write_private

if TYPE_CHECKING:
    from coordinator.storage.staging import Staging

# Size of the pieces of a download; starlette's FileResponse reads 64 KiB, 7 to 11 times slower.
READ_BYTES = 1 << 20
OWNER = "owner"  # name of the file or object with the name of the store's coordinator
_NAME = re.compile(r"[0-9a-f]{64}")
T = TypeVar("T")
# Reads the header of a file and returns the ranges [start, stop) of bytes that are needed.
FindSpans: TypeAlias = Callable[[BinaryIO], Iterable[tuple[int, int]]]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BROKEN = {errno.EROFS, errno.EIO}  # errors after which a disk takes no more writes

# Threads for blob files, so that downloads never wait for a long merge in the default pool.
_POOL = ThreadPoolExecutor(max_workers=8, thread_name_prefix="blob")


class MissingBlob(Unavailable):
    """The store does not give a blob that the database names."""

    def __init__(self, sha256: str) -> None:
        super().__init__(f"the blob {sha256} is not in the store", retry_after_s=30.0)
        self.sha256 = sha256


class DamagedBlob(Unavailable):
    """The store gives bytes whose SHA-256 is not the name of the blob."""

    def __init__(self, sha256: str) -> None:
        super().__init__(f"the store gives other bytes than those of {sha256}", retry_after_s=60.0)
        self.sha256 = sha256


class BlobEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One stored blob."""

    sha256: str
    size: int


class Pieces(Protocol):
    """Stream of bytes in pieces; the caller must read to the end or call `aclose`."""

    def __aiter__(self) -> AsyncIterator[bytes | bytearray]: ...

    async def __anext__(self) -> bytes | bytearray: ...

    async def aclose(self) -> None: ...


class BlobStore(Protocol):
    """Interface of a blob store.

    Every method raises MissingBlob for a missing blob, and StorageFull when no space is left.
    `staging` holds uploads in progress if replicas share no files. Volunteers can reach a `public`
    store.
    """

    staging: Staging | None
    public: bool

    @property
    def serials(self) -> Mapping[str, str]:
        """Return the serials of the announcements under which this process has put blobs, by
        name.
        """

    async def put_file(self, sha256: str, path: Path) -> None:
        """Announce a blob, then store it as `store_file` does."""

    async def put_bytes(self, data: bytes) -> str:
        """Announce and store bytes; return their SHA-256."""

    async def store_file(self, sha256: str, path: Path) -> None:
        """Move the file at `path` into the store, durably; a repeated call does no harm.

        The caller has hashed the file. The blob must have been announced: otherwise no sweep would
        find it if no reference to it is stored.
        """

    async def local(self, sha256: str) -> Path:
        """Return a read-only local file with the blob's bytes, to be memory-mapped."""

    async def local_files(self, names: Sequence[str]) -> list[Path]:
        """Return the local files of several blobs."""

    async def part(self, sha256: str, spans: FindSpans, into: Path) -> Path:
        """Return a local file with at least these spans of the blob, to be memory-mapped.

        The file is the blob's own, or the new file `into` with holes, which the caller deletes.
        """

    async def hash(self, sha256: str) -> str:
        """Read a stored blob in full, past any cache; return its SHA-256, which shows bit rot."""

    async def size(self, sha256: str) -> int: ...

    async def open_range(self, sha256: str, start: int, stop: int) -> Pieces:
        """Return the bytes [start, stop) in reads of at most 1 MiB."""

    async def url(self, sha256: str) -> str:
        """Return the address at which volunteers fetch the bytes from the store itself; "" if they
        cannot reach the store.
        """

    async def delete(self, sha256: str, reason: Reason) -> None:
        """Remove a blob; a missing blob is no error."""

    def entries(self) -> AsyncIterator[BlobEntry]:
        """Return all blobs, in no order."""

    async def owner(self) -> str:
        """Return the name of the coordinator whose store this is; "" for a new store."""

    async def set_owner(self, name: str) -> None: ...

    def scratch(self) -> Path:
        """Return a directory on the same filesystem for files on their way into the store."""


def is_name(text: str) -> bool:
    """Return True for a SHA-256 in lower-case hex."""
    return _NAME.fullmatch(text) is not None


def check_name(sha256: str) -> str:
    """Return a valid name. Raises BadRequest for all but a SHA-256 in lower-case hex."""
    if not is_name(sha256):
        raise BadRequest("a blob is named by its SHA-256: 64 hexadecimal digits in lower case")
    return sha256


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn the errors of a disk that is full, or takes no writes, into StorageFull."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(
                "no space is left on the coordinator's disk", retry_after_s=30.0
            ) from error
        if error.errno in _BROKEN:
            raise StorageFull(
                "the coordinator's disk refuses to be written; keep your result, retry later",
                retry_after_s=30.0,
            ) from error
        raise


def sync_file(path: Path) -> None:
    """Make the bytes of a file durable."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


async def in_pool(function: Callable[..., T], *args: object) -> T:
    """Run blocking work with files in the pool of this module."""
    return await asyncio.get_running_loop().run_in_executor(_POOL, function, *args)


async def open_in_pool(function: Callable[..., R], *args: object) -> R:
    """Open a resource in the pool; close it if the caller is cancelled."""
    return await open_in_thread(function, *args, pool=_POOL)


def read_cached(file: BinaryIO, size: int) -> bytearray | None:
    """Return the next bytes of an unbuffered file if the kernel has them in memory; None if a
    thread must read them.
    """
    if not hasattr(os, "RWF_NOWAIT"):  # exists only on Linux
        return None
    room = bytearray(size)
    try:
        count = os.preadv(file.fileno(), [room], file.tell(), os.RWF_NOWAIT)
    except OSError:  # the bytes are not in memory, or the filesystem cannot tell
        return None
    file.seek(count, os.SEEK_CUR)
    del room[count:]
    return room or None


class FileStream:
    """Stream of the bytes [start, stop) of an unbuffered file in reads of 1 MiB.

    Bytes that the kernel has in memory are read without a thread: a change of threads for each read
    cost a quarter of the rate. Otherwise a thread reads the next piece while the last one is sent.
    """

    def __init__(self, file: BinaryIO, start: int, stop: int) -> None:
        self._file = file
        self._left = stop - start
        self._pending: asyncio.Future[bytes] | None = None
        file.seek(start)

    def _begin(self, size: int) -> None:
        self._pending = asyncio.ensure_future(in_pool(self._file.read, size)) if size else None

    def __aiter__(self) -> FileStream:
        return self

    async def __anext__(self) -> bytes | bytearray:
        size = min(READ_BYTES, self._left)
        if not size:
            await self.aclose()
            raise StopAsyncIteration
        data = read_cached(self._file, size) if self._pending is None else None
        if data is not None:
            self._left -= len(data)
            return data
        return await self._read_in_thread(size)

    async def _read_in_thread(self, size: int) -> bytes:
        if self._pending is None:
            self._begin(size)
        assert self._pending is not None
        data = await asyncio.shield(self._pending)  # the thread continues to read: see `aclose`
        if not data:
            raise OSError(errno.EIO, "a blob is shorter than its size")
        self._left -= len(data)
        self._begin(min(READ_BYTES, self._left))
        return data

    async def aclose(self) -> None:
        pending = self._pending
        if pending is None or pending.done():
            self._file.close()
        else:  # a thread still reads: close when it has ended
            pending.add_done_callback(lambda _: self._file.close())


class DiskBlobs:
    """Blobs as read-only files `ab/abcdef...` below a directory."""

    staging: Staging | None = None
    public = False

    def __init__(self, root: Path, announce: Announcer = unannounced) -> None:
        self._root = root
        self._announced_blobs = AnnouncedBlobs(announce)
        self._scratch = root / "tmp"
        self._scratch.mkdir(parents=True, exist_ok=True)
        if root.stat().st_mode & 0o777 != 0o700:  # skipped if equal: a read-only disk refuses chmod
            root.chmod(0o700)

    def _path(self, sha256: str) -> Path:
        return self._root / check_name(sha256)[:2] / sha256

    @property
    def serials(self) -> Mapping[str, str]:
        return self._announced_blobs.serials

    def scratch(self) -> Path:
        return self._scratch

    async def owner(self) -> str:
        path = self._root / OWNER
        return await in_pool(path.read_text) if await in_pool(path.is_file) else ""

    async def set_owner(self, name: str) -> None:
        with storage_errors():
            await in_pool(write_private, self._root / OWNER, name.encode())

    async def put_file(self, sha256: str, path: Path) -> None:
        async with self._announced_blobs.writing(sha256):
            await self.store_file(sha256, path)

    async def store_file(self, sha256: str, path: Path) -> None:
        await in_pool(self._take, sha256, path)

    def _take(self, sha256: str, path: Path) -> None:
        target = self._path(sha256)
        with storage_errors():
            if target.is_file() and target.stat().st_size == path.stat().st_size:
                delete_file(path, "moved")
            else:
                sync_file(path)
                path.chmod(0o400)
                new = not target.parent.exists()
                target.parent.mkdir(exist_ok=True)
                if new:
                    sync_directory(self._root)
                try:
                    path.replace(target)
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
                    self._copy(path, target)
            sync_directory(target.parent)

    def _copy(self, path: Path, target: Path) -> None:
        """Copy a file from another filesystem, so that its name appears whole or not at all."""
        part = self._scratch / f"{uuid4().hex}.part"
        try:
            shutil.copyfile(path, part)
            sync_file(part)
            part.chmod(0o400)
            part.replace(target)
        finally:
            delete_file(part, "scratch")
        delete_file(path, "moved")

    async def put_bytes(self, data: bytes) -> str:
        sha256 = hashlib.sha256(data).hexdigest()
        async with self._announced_blobs.writing(sha256):
            await in_pool(self._put_bytes, sha256, data)
        return sha256

    def _put_bytes(self, sha256: str, data: bytes) -> None:
        part = self._scratch / f"{uuid4().hex}.part"
        try:
            with storage_errors():
                part.write_bytes(data)
            self._take(sha256, part)
        finally:
            delete_file(part, "scratch")

    async def local(self, sha256: str) -> Path:
        return (await self.local_files([sha256]))[0]

    async def local_files(self, names: Sequence[str]) -> list[Path]:
        return await in_pool(lambda: [self._file(sha256) for sha256 in names])

    def _file(self, sha256: str) -> Path:
        path = self._path(sha256)
        if not path.is_file():
            raise MissingBlob(sha256)
        return path

    async def part(self, sha256: str, spans: FindSpans, into: Path) -> Path:
        return await self.local(sha256)

    async def hash(self, sha256: str) -> str:
        return await in_pool(self._hash, sha256)

    def _hash(self, sha256: str) -> str:
        with self._open(sha256) as file:
            digest = hashlib.sha256()
            while data := file.read(READ_BYTES):
                digest.update(data)
        return digest.hexdigest()

    async def size(self, sha256: str) -> int:
        return (await in_pool(self._stat, sha256)).st_size

    def _stat(self, sha256: str) -> os.stat_result:
        try:
            return self._path(sha256).stat()
        except FileNotFoundError as error:
            raise MissingBlob(sha256) from error

    async def open_range(self, sha256: str, start: int, stop: int) -> Pieces:
        return FileStream(await open_in_pool(self._open, sha256), start, stop)

    def _open(self, sha256: str) -> BinaryIO:
        try:
            return self._path(sha256).open("rb", buffering=0)
        except FileNotFoundError as error:
            raise MissingBlob(sha256) from error

    async def url(self, sha256: str) -> str:
        return ""

    async def delete(self, sha256: str, reason: Reason) -> None:
        await in_pool(delete_file, self._path(sha256), reason)

    async def entries(self) -> AsyncIterator[BlobEntry]:
        for folder in await in_pool(lambda: sorted(self._root.glob("[0-9a-f][0-9a-f]"))):
            for entry in await in_pool(self._entries, folder):
                yield entry

    def _entries(self, folder: Path) -> tuple[BlobEntry, ...]:
        return tuple(
            BlobEntry(sha256=path.name, size=path.stat().st_size)
            for path in folder.iterdir()
            if is_name(path.name)
        )
