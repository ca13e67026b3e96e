"""Blobs in an S3-compatible object store, with a local cache for memory-mapped files.

Address and credentials come from the usual AWS_* variables (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID,
...); none is a setting. If volunteers reach the store at AWS_ENDPOINT_URL_PUBLIC, bytes travel
between them and the store by URLs that are signed for one object and some minutes.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from coordinator.storage.announced_blobs import AnnouncedBlobs, Announcer, unannounced
from coordinator.storage.blobs import (
    OWNER,
    READ_BYTES,
    BlobEntry,
    DamagedBlob,
    FileStream,
    FindSpans,
    MissingBlob,
    Pieces,
    check_name,
    in_pool,
    is_name,
    open_in_pool,
    storage_errors,
    sync_file,
)
from coordinator.storage.sparse_copy import SparseCopy
from coordinator.storage.staging import Staging
from shared.errors import Configuration, NotFound, Unavailable
from shared.files.deletions import Reason, delete_file
from shared.programs.installation import missing_extra_error

CACHE_BYTES_MAX = 32 << 30
SIGNED = timedelta(minutes=15)  # validity of a signed URL
# Patterns in the text of an error: the HTTP method, a status that another try does not mend, and
# the store's reason.
_CALL = re.compile(r"performing ([A-Z]+) http")
_REFUSED = re.compile(r"status code: ((?:4(?!08|29)\d\d|501)[ \w]*)")
_REASON = re.compile(r"<Code>(\w+)</Code>")
READS = 2  # downloads with a wrong hash after which a blob counts as damaged
PUTS_AT_ONCE = 4  # parts of one file that are uploaded at once, 5 MiB each


class StoreRefused(Unavailable):
    """The object store refuses a call that this program needs."""

    exit_code = 78


class S3Blobs:
    """Blobs as objects `prefix/ab/abcdef...` of a bucket, with a local cache. Raises Unavailable if
    the store does not answer.
    """

    def __init__(
        self,
        url: str,
        cache: Path,
        announce: Announcer = unannounced,
        *,
        cache_bytes_max: int = CACHE_BYTES_MAX,
        retry_s: float = 30.0,
        still_s: float = 60.0,
    ) -> None:
        """Set up the store; a transfer fails after `still_s` seconds without a byte, however long
        it takes in all. Raises Configuration without the extra `s3`, or for settings that the store
        refuses.
        """
        try:
            import obstore
        except ImportError as error:
            raise missing_extra_error("s3://", "s3") from error
        from obstore.store import S3Store

        plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        try:
            self._store = S3Store.from_url(
                url,
                client_options={
                    "allow_http": plain,
                    # limit for a whole body, where the default of 30 s would cut off a long one
                    "timeout": timedelta(days=1),
                    "read_timeout": timedelta(seconds=still_s),
                },
                retry_config={"retry_timeout": timedelta(seconds=retry_s)},
            )
        except Exception as error:
            reason_line = str(error).partition("\n")[0]  # a dump of the error follows
            raise Configuration(f"the object store {url} cannot be used: {reason_line}") from error
        self._obstore = obstore
        public = os.environ.get("AWS_ENDPOINT_URL_PUBLIC", "")
        self._signing = S3Store.from_url(url, endpoint=public) if public else None
        self.public = self._signing is not None
        self._announced_blobs = AnnouncedBlobs(announce)
        self._cache = cache
        self._cache_bytes_max = cache_bytes_max
        self.staging: Staging | None = Staging(self)
        (cache / "tmp").mkdir(parents=True, exist_ok=True)

    @property
    def serials(self) -> Mapping[str, str]:
        return self._announced_blobs.serials

    def scratch(self) -> Path:
        return self._cache / "tmp"

    def key(self, sha256: str) -> str:
        return f"{check_name(sha256)[:2]}/{sha256}"

    async def owner(self) -> str:
        try:
            stream = await self.object_range(OWNER, 0, await self.object_size(OWNER))
        except NotFound:
            return ""
        return b"".join([data async for data in stream]).decode()

    async def set_owner(self, name: str) -> None:
        await self.put_object(OWNER, name.encode(), len(name))

    async def put_file(self, sha256: str, path: Path) -> None:
        async with self._announced_blobs.writing(sha256):
            await self.store_file(sha256, path)

    async def store_file(self, sha256: str, path: Path) -> None:
        await self.put_object(self.key(sha256), path, (await in_pool(path.stat)).st_size)
        await in_pool(self._keep, sha256, path)

    async def put_object(self, key: str, data: Path | bytes, size: int) -> None:
        """Store an object of `size` bytes. A failed call is no error if the object is there with
        this size: the store had only not confirmed it in time.
        """
        try:
            await self._call(
                self._obstore.put_async(self._store, key, data, max_concurrency=PUTS_AT_ONCE)
            )
        except (NotFound, Unavailable) as error:
            try:
                if await self.object_size(key) == size:
                    return
            except (NotFound, StoreRefused):
                pass
            if isinstance(error, StoreRefused):
                raise
            raise Unavailable("the object store did not take a file", retry_after_s=5.0) from error

    def _keep(self, sha256: str, path: Path) -> None:
        """Move a newly stored file into the cache, since a merge will read it soon. The file is
        synced first: the bytes of a name in the cache are not hashed again.
        """
        with storage_errors():
            sync_file(path)
            path.chmod(0o400)
            path.replace(self._cache / sha256)
        self._evict()

    def _evict(self) -> None:
        """Delete the least recently used files of a full cache; the bytes of a memory-mapped file
        stay until it is unmapped.
        """
        files: list[tuple[float, int, Path]] = []
        for path in self._cache.iterdir():
            with suppress(FileNotFoundError):  # another thread evicts too
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    files.append((status.st_atime, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files, key=lambda item: item[0]):
            if total <= self._cache_bytes_max:
                return
            delete_file(path, "copy")
            total -= size

    async def put_bytes(self, data: bytes) -> str:
        sha256 = hashlib.sha256(data).hexdigest()
        async with self._announced_blobs.writing(sha256):
            await self.put_object(self.key(sha256), data, len(data))
        return sha256

    async def local(self, sha256: str) -> Path:
        path = self._cache / check_name(sha256)
        with suppress(FileNotFoundError):
            await in_pool(os.utime, path)
            return path
        part = self.scratch() / f"{uuid4().hex}.part"
        try:
            for _ in range(READS):
                if await self._download(sha256, part) == sha256:
                    break
            else:
                raise DamagedBlob(sha256)
            await in_pool(self._keep, sha256, part)
        finally:
            await in_pool(lambda: delete_file(part, "scratch"))
        return path

    async def local_files(self, names: Sequence[str]) -> list[Path]:
        return [await self.local(sha256) for sha256 in names]

    async def part(self, sha256: str, spans: FindSpans, into: Path) -> Path:
        path = self._cache / check_name(sha256)
        if await in_pool(path.is_file):
            return path
        with missing_object(sha256):
            size = await self.object_size(self.key(sha256))
            await in_pool(self._fill, self.key(sha256), size, spans, into)
        return into

    def _fill(self, key: str, size: int, spans: FindSpans, into: Path) -> None:
        def get(start: int, stop: int) -> Any:
            with _store_errors():
                return self._obstore.get_range(self._store, key, start=start, end=stop)

        with storage_errors(), SparseCopy(into, size, get) as file:
            for start, stop in spans(file):
                file.fetch(start, stop)

    async def _download(self, sha256: str, part: Path) -> str:
        digest = hashlib.sha256()
        stream = await self._whole(sha256)
        async with aclosing(stream):
            with storage_errors(), part.open("wb") as file:
                async for data in stream:
                    await in_pool(file.write, data)
                    await in_pool(digest.update, data)
        return digest.hexdigest()

    async def _whole(self, sha256: str) -> AsyncGenerator[bytes, None]:
        with missing_object(sha256):
            size = await self.object_size(self.key(sha256))
            return await self.object_range(self.key(sha256), 0, size)

    async def hash(self, sha256: str) -> str:
        digest = hashlib.sha256()
        stream = await self._whole(sha256)
        async with aclosing(stream):
            async for data in stream:
                await in_pool(digest.update, data)
        return digest.hexdigest()

    async def size(self, sha256: str) -> int:
        try:
            return (await in_pool((self._cache / check_name(sha256)).stat)).st_size
        except FileNotFoundError:
            with missing_object(sha256):
                return await self.object_size(self.key(sha256))

    async def object_size(self, key: str) -> int:
        """Return the bytes of an object. Raises NotFound."""
        head = await self._call(self._obstore.head_async(self._store, key))
        return int(head["size"])

    async def open_range(self, sha256: str, start: int, stop: int) -> Pieces:
        path = self._cache / check_name(sha256)
        try:
            file = await open_in_pool(lambda: path.open("rb", buffering=0))
        except FileNotFoundError:
            with missing_object(sha256):
                return await self.object_range(self.key(sha256), start, stop)
        return FileStream(file, start, stop)

    async def object_range(self, key: str, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        """Return the bytes [start, stop) of an object, as `open_range` does for a blob."""
        if stop <= start:
            return _nothing()
        request = self._obstore.get_async(self._store, key, options={"range": (start, stop)})
        return self._pieces(await self._call(request))

    async def _pieces(self, download: Any) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a store's reply in pieces of at most READ_BYTES."""
        stream = aiter(download.stream(min_chunk_size=READ_BYTES))
        while (data := await self._call(anext(stream, None))) is not None:
            view = memoryview(data)
            for start in range(0, len(view), READ_BYTES):
                yield bytes(view[start : start + READ_BYTES])

    async def url(self, sha256: str) -> str:
        return await self.signed("GET", self.key(sha256))

    async def signed(self, method: Literal["GET", "PUT"], key: str) -> str:
        """Return a URL for one request to one object; "" if volunteers cannot reach the store."""
        if self._signing is None:
            return ""
        return str(await self._call(self._obstore.sign_async(self._signing, method, key, SIGNED)))

    async def copy_object(self, key: str, to: str) -> None:
        """Copy an object within the store. Raises NotFound."""
        await self._call(self._obstore.copy_async(self._store, key, to))

    async def keep(self, sha256: str, path: Path) -> None:
        """Move a file into the cache, once its blob is in the store."""
        await in_pool(self._keep, sha256, path)

    async def delete(self, sha256: str, reason: Reason) -> None:
        await self.delete_object(self.key(sha256), reason)
        await in_pool(delete_file, self._cache / sha256, reason)

    async def delete_object(self, key: str, reason: Reason) -> None:
        try:
            await self._call(self._obstore.delete_async(self._store, key))
        except NotFound:
            pass  # some stores report a missing blob, most do not

    async def entries(self) -> AsyncIterator[BlobEntry]:
        async for item in self.objects(None):
            folder, _, name = item["path"].rpartition("/")
            if folder == name[:2] and is_name(name):
                yield BlobEntry(sha256=name, size=int(item["size"]))

    async def objects(self, prefix: str | None) -> AsyncIterator[Any]:
        """Yield obstore's metadata of the objects below a prefix (path, size, last_modified)."""
        batches = aiter(self._obstore.list(self._store, prefix=prefix))
        while (batch := await self._call(anext(batches, None))) is not None:
            for item in batch:
                yield item

    async def _call(self, awaitable: Any) -> Any:
        with _store_errors():
            return await awaitable


@contextmanager
def missing_object(sha256: str) -> Iterator[None]:
    """Turn the block's NotFound, for the object of a blob, into MissingBlob."""
    try:
        yield
    except NotFound as error:
        raise MissingBlob(sha256) from error


@contextmanager
def _store_errors() -> Iterator[None]:
    """Turn the errors of obstore into NotFound, StoreRefused and Unavailable."""
    from obstore.exceptions import BaseError, NotFoundError

    try:
        yield
    except (BaseError, OSError) as error:
        call, status, reason = (
            pattern.search(str(error)) for pattern in (_CALL, _REFUSED, _REASON)
        )
        missing = isinstance(error, NotFoundError | FileNotFoundError)
        if missing and not (call and call[1] == "PUT"):
            raise NotFound("the object store does not have this object") from error
        if call and status:
            answer = f"{status[1]} ({reason[1]})" if reason else status[1]
            raise StoreRefused(
                f"the object store answers {call[1]} with {answer}", retry_after_s=5.0
            ) from error
        raise Unavailable("the object store does not answer", retry_after_s=5.0) from error


async def _nothing() -> AsyncGenerator[bytes, None]:
    empty: tuple[bytes, ...] = ()
    for data in empty:
        yield data
