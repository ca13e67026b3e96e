"""Whole files to and from the coordinator: resumable, hashed during the transfer."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec

from shared.errors import (
    BadRequest,
    Conflict,
    Internal,
    InvalidFrame,
    NotFound,
    StorageFull,
    Unreachable,
    why,
)
from shared.files.cancel_safe_open import open_in_thread
from shared.protocol import endpoints
from shared.protocol.contributions import UploadInfo, UploadRequest
from shared.protocol.limits import DIRECT_BYTES, MIRROR_PIECE_BYTES, UPLOAD_PIECE_BYTES
from shared.protocol.versions import BlobRef
from shared.sentences import Sentence
from volunteer.net.api import Api
from volunteer.net.client import StreamedReply
from volunteer.storage.blob_cache import Cache, Partial, hash_of

SEND_BYTES = 512 << 10  # bytes read and sent at once; half of it takes a third more CPU
WRITE_BYTES = 512 << 10  # bytes written at once, in a thread; 64 KiB take twice the CPU
MEASURED_BYTES = 256 << 10  # smaller files do not measure the connection
DAMAGED_MAX = 3  # downloads of one blob with a wrong hash
MIRROR_REST_S = 60.0  # pause after a mirror lacked a piece

OnBytes: TypeAlias = Callable[[int], None]  # bytes done so far


class Transfers:
    """Downloads into the cache, uploads from the outbox."""

    def __init__(self, api: Api, cache: Cache, hub: Callable[[], str] | None = None) -> None:
        """Make the transfers; `hub` returns the address of the model hub that has public files."""
        self._api = api
        self._hub = hub
        self._client = api.client
        self._cache = cache
        self.store = False  # True if volunteers can reach the coordinator's store
        # Address of each mirror -> bytes a second; inf = not tried, 0 = it sent wrong bytes.
        self.mirrors: dict[str, float] = {}
        self._pause_ends: dict[str, float] = {}  # end of each mirror's pause
        self.up_bytes_per_s = 0.0  # rate of the last large file
        self.down_bytes_per_s = 0.0
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def fetch(self, ref: BlobRef, on_bytes: OnBytes, public: str = "") -> Path:
        """Return the file of a blob; download it if the cache lacks it.

        Sources are tried in this order: the model hub, if `public` is the blob's path there; the
        mirrors; the store; the coordinator. Raises InvalidFrame if the blob keeps arriving damaged.
        """
        async with self._locks[ref.sha256]:  # two devices may need the same blob
            file = await asyncio.to_thread(self._cache.find, ref.sha256, ref.size)
            if file is None:
                file = await self._from_hub(ref, on_bytes, public)
            if file is None and ref.size >= DIRECT_BYTES:
                file = await self._from_mirrors(ref, on_bytes)
            if file is None and self.store and ref.size >= DIRECT_BYTES:
                url = await self._api.blob_url(ref.sha256)
                if url and self._client.may_go_to(url):
                    file = await self._from_elsewhere(ref, on_bytes, url)
            if file is None:
                file = await self._download(ref, on_bytes)
        on_bytes(ref.size)
        return file

    async def _download(self, ref: BlobRef, on_bytes: OnBytes) -> Path:
        partial = await open_in_thread(self._cache.partial, ref.sha256, ref.size)

        async def once() -> StorageFull | None:
            """Return the error of a full disk, which is not retried: others may do the task."""
            try:
                await self._pull(partial, on_bytes)
            except StorageFull as error:
                return error
            return None

        try:
            damaged = 0
            while True:
                if (full := await self._client.retrying(once)) is not None:
                    raise full
                try:
                    return await asyncio.to_thread(partial.finish)
                except InvalidFrame:
                    damaged += 1
                    if damaged == DAMAGED_MAX:
                        raise
        finally:
            partial.close()

    async def _from_hub(self, ref: BlobRef, on_bytes: OnBytes, public: str) -> Path | None:
        """Return the file of a blob from the hub; None if the hub lacks it or the download is
        interrupted.
        """
        if not public or self._hub is None:
            return None
        address = await asyncio.to_thread(self._hub)
        if not address:
            return None
        return await self._from_elsewhere(ref, on_bytes, f"{address.rstrip('/')}/{public}")

    async def _from_mirrors(self, ref: BlobRef, on_bytes: OnBytes) -> Path | None:
        """Return the file of a blob from the fastest mirrors, each piece checked. Return None if no
        mirror has the next piece; the pieces so far are kept for another source.
        """
        hashes = ref.pieces or (ref.sha256,)
        if not self.mirrors or len(hashes) != -(-ref.size // MIRROR_PIECE_BYTES):
            return None
        with closing(await open_in_thread(self._cache.partial, ref.sha256, ref.size)) as partial:
            while partial.offset < ref.size:
                index, skip = divmod(partial.offset, MIRROR_PIECE_BYTES)
                start = partial.offset - skip
                stop = min(ref.size, start + MIRROR_PIECE_BYTES)
                piece = await self._mirror_piece(ref.sha256, (start, stop), hashes[index])
                if piece is None:
                    return None
                await _write(partial, piece[skip:])
                on_bytes(partial.offset)
            try:
                return await asyncio.to_thread(partial.finish)
            except InvalidFrame:  # the partial file began with wrong bytes
                return None

    async def _mirror_piece(self, sha256: str, span: tuple[int, int], digest: str) -> bytes | None:
        """Return the bytes `span` = [start, stop) of a blob, whose SHA-256 is `digest`, from a
        mirror; None if no mirror has them.

        A mirror that lacks them is asked again after a pause, a mirror that sends other bytes
        never.
        """
        start, stop = span
        now = self._client.clock.monotonic
        for mirror in sorted(self.mirrors, key=self.mirrors.__getitem__, reverse=True):
            url = f"{mirror}/{sha256[:2]}/{sha256}"
            paused = self._pause_ends.get(mirror, -math.inf) > now()
            if paused or not self.mirrors[mirror] or not self._client.may_go_to(url):
                continue
            began, data = now(), bytearray()
            headers = {"Range": f"bytes={start}-{stop - 1}"}
            try:
                async with self._client.get_elsewhere(url, headers) as reply:
                    async for chunk in reply.body:
                        data += chunk
                        if len(data) > stop - start:
                            break
            except Unreachable:
                self._pause_ends[mirror] = now() + MIRROR_REST_S
                continue
            intact = (await asyncio.to_thread(hashlib.sha256, data)).hexdigest() == digest
            self.mirrors[mirror] = len(data) / max(now() - began, 1e-6) if intact else 0.0
            if intact:
                return bytes(data)
        return None

    async def _from_elsewhere(self, ref: BlobRef, on_bytes: OnBytes, url: str) -> Path | None:
        """Return the file of a blob from another server; None if that fails."""
        partial = await open_in_thread(self._cache.partial, ref.sha256, ref.size)
        headers = {"Range": f"bytes={partial.offset}-"} if partial.offset else {}
        try:
            if partial.offset < partial.size:
                async with self._client.get_elsewhere(url, headers) as reply:
                    if reply.status != 206:
                        partial.restart()
                    await _pump(reply, partial, on_bytes)
            return await asyncio.to_thread(partial.finish)
        except (Unreachable, InvalidFrame):  # any failure: the coordinator has the file too
            return None
        finally:
            partial.close()

    async def _pull(self, partial: Partial, on_bytes: OnBytes) -> None:
        """Download the rest of a partial file. Raises Unreachable when it is still incomplete."""
        if partial.offset == partial.size > 0:
            return
        headers = {}
        if partial.offset:
            headers = {"Range": f"bytes={partial.offset}-", "If-Range": f'"{partial.sha256}"'}
        try:
            async with self._client.stream(f"/blobs/{partial.sha256}", headers) as reply:
                if reply.status != 206 and partial.offset:
                    partial.restart()
                began, before = self._client.clock.monotonic(), partial.offset
                await _pump(reply, partial, on_bytes)
                spent = self._client.clock.monotonic() - began
                self.down_bytes_per_s = _rate(partial.offset - before, spent, self.down_bytes_per_s)
        except BadRequest:
            if not headers:
                raise
            partial.restart()  # the range was refused: start over
            raise Unreachable(Sentence("the download has to start over")) from None
        if partial.offset < partial.size:
            raise Unreachable(Sentence("the download was interrupted"))

    async def upload(self, request: UploadRequest, path: Path, on_bytes: OnBytes) -> UploadInfo:
        """Send the bytes of a file that the server does not have, in one try, and return the state
        of the upload; a further call resumes where the server says.

        Raises InvalidFrame if the file is missing or damaged, Unreachable also if the server lost
        the upload or has other bytes than the file, Internal if the file cannot be read now.
        """
        try:
            return await self._upload(request, path, on_bytes)
        except (InvalidFrame, FileNotFoundError) as error:
            if await asyncio.to_thread(_is_intact, path, request.sha256):
                raise Unreachable(Sentence("the upload arrived damaged")) from error
            raise InvalidFrame(Sentence("{path} is missing or damaged", path=path)) from error
        except OSError as error:  # such as too many open files: the next try may read it
            raise Internal(
                Sentence("{path} cannot be read: {why}", path=path, why=why(error))
            ) from error

    async def _upload(self, request: UploadRequest, path: Path, on_bytes: OnBytes) -> UploadInfo:
        info = await self._api.call(endpoints.UPLOAD, body=request, patience_s=0)
        on_bytes(info.offset)
        if info.url:
            info = await self._upload_to_store(request, info, path, on_bytes)
        with path.open("rb") as file:
            while not info.complete:
                before = info.offset
                file.seek(before)
                began = self._client.clock.monotonic()
                info = await self._put(info, file, on_bytes)
                spent = self._client.clock.monotonic() - began
                self.up_bytes_per_s = _rate(info.offset - before, spent, self.up_bytes_per_s)
                if info.offset <= before and not info.complete:
                    raise Internal(Sentence("the coordinator accepts no more bytes of this upload"))
        return info

    async def _upload_to_store(
        self, request: UploadRequest, info: UploadInfo, path: Path, on_bytes: OnBytes
    ) -> UploadInfo:
        """Send pieces to the object store as long as it accepts them; return the state of the
        upload, whose remaining bytes the coordinator gets.
        """
        with path.open("rb") as file:
            while info.url and self._client.may_go_to(info.url) and not info.complete:
                before = info.offset
                file.seek(before)
                began, count = self._client.clock.monotonic(), _piece_end(info) - before
                try:
                    await self._client.put_elsewhere(info.url, count, _body(info, file, on_bytes))
                except Unreachable:
                    return msgspec.structs.replace(info, url="")
                spent = self._client.clock.monotonic() - began
                info = await self._api.call(endpoints.UPLOAD, body=request, patience_s=0)
                self.up_bytes_per_s = _rate(info.offset - before, spent, self.up_bytes_per_s)
                if info.offset <= before:
                    return info
        return info

    async def _put(self, info: UploadInfo, file: BinaryIO, on_bytes: OnBytes) -> UploadInfo:
        headers = {
            "Upload-Offset": str(info.offset),
            "Content-Length": str(_piece_end(info) - info.offset),
            "Content-Type": "application/octet-stream",
        }
        body = _body(info, file, on_bytes)
        try:
            return await self._client.put(f"/uploads/{info.upload_id}", headers, body, UploadInfo)
        except (Conflict, NotFound) as error:  # another request moved or ended the upload
            raise Unreachable(Sentence("the upload continues at another offset")) from error


def hub_address() -> str:
    """Return the address of the model hub (HF_ENDPOINT); "" if the hub's library is not
    installed.
    """
    try:
        from huggingface_hub import constants
    except ImportError:
        return ""
    return os.environ.get("HF_ENDPOINT") or constants.ENDPOINT


def _is_intact(path: Path, sha256: str) -> bool:
    return path.exists() and hash_of(path) == sha256


def _piece_end(info: UploadInfo) -> int:
    """Return the offset at which the next piece of an upload ends."""
    return min(info.size, info.offset + UPLOAD_PIECE_BYTES)


async def _body(info: UploadInfo, file: BinaryIO, on_bytes: OnBytes) -> AsyncIterator[bytes]:
    """Read the next piece of an upload. Raises InvalidFrame for a file that is too short."""
    done, stop = info.offset, _piece_end(info)
    while done < stop:
        # Read on the event loop: the file was just written and lies in memory. Measured for 256
        # KiB: 0.04 ms of CPU this way, 0.17 ms through a thread.
        piece = file.read(min(SEND_BYTES, stop - done))
        if not piece:
            raise InvalidFrame  # `upload` tells a damaged file from a wrong size of the server
        yield piece
        done += len(piece)
        on_bytes(done)


def _rate(count: int, spent_s: float, before: float) -> float:
    """Return the rate of a transfer in bytes a second, or `before` for a small transfer."""
    return count / spent_s if count >= MEASURED_BYTES and spent_s > 0 else before


async def _pump(reply: StreamedReply, partial: Partial, on_bytes: OnBytes) -> None:
    """Write a reply's body to a partial file, several pieces at once, in a thread. After a broken
    connection the pieces that arrived are written too.
    """
    pending = bytearray()
    try:
        async for piece in reply.body:
            pending += piece
            on_bytes(partial.offset + len(pending))
            if len(pending) >= WRITE_BYTES:
                data, pending = pending, bytearray()
                await _write(partial, data)
    finally:
        await _write(partial, pending)


async def _write(partial: Partial, piece: bytes | bytearray) -> None:
    """Write a piece in a thread; a cancelled caller still waits for the end of the write."""
    writing = asyncio.ensure_future(asyncio.to_thread(partial.write, piece))
    try:
        await asyncio.shield(writing)
    finally:
        await asyncio.wait({writing})  # the file must stay open until the write ends
