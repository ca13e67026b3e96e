"""Uploads in progress in an object store: pieces as objects, so that any replica can continue them.

uploads/UPLOAD/OFFSET-BYTES    a piece: the bytes of one request, or the beginning that arrived
checked/NAME                   a copy of a piece, which is hashed: no signed URL leads to it

The holder of a signed URL may overwrite its piece at any time, so a blob is made of the copy that
was hashed, or of a local file, never of a piece.
"""

from __future__ import annotations

import hashlib
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from coordinator.storage.blobs import in_pool, storage_errors
from shared.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from coordinator.storage.s3 import S3Blobs

FOLDER, CHECKED = "uploads", "checked"


class StagedPiece(NamedTuple):
    """One stored piece of an upload."""

    offset: int
    bytes: int
    key: str


class Staging:
    """Pieces of uploads in the store of an `S3Blobs`. Raises Unavailable if the store does not
    answer.
    """

    def __init__(self, blobs: S3Blobs) -> None:
        self._blobs = blobs

    async def try_calls(self) -> None:
        """Try each call to the store that a server needs. Raises StoreRefused for a refused
        call.
        """
        upload_id, data = f"try-{uuid4().hex}", uuid4().bytes
        sha256, path = hashlib.sha256(data).hexdigest(), self._blobs.scratch() / upload_id
        await in_pool(path.write_bytes, data)
        await self.put(upload_id, 0, path, len(data))
        copy = await self.collect(upload_id, len(data), path)
        await self.store(sha256, path, copy)
        await self.release(copy)
        await self.drop(upload_id)
        await self._blobs.hash(sha256)
        await self._blobs.delete(sha256, "scratch")

    async def pieces(self, upload_id: str) -> list[StagedPiece]:
        """Return the pieces that follow one another from the beginning of the upload.

        A request may have stored bytes before it was abandoned and sent again: of two pieces at one
        offset the longer one counts, and a piece inside another is left out.
        """
        longest: dict[int, StagedPiece] = {}
        for item in await self._stored(f"{FOLDER}/{upload_id}/"):
            offset, size = map(int, item["path"].rpartition("/")[2].split("-"))
            if item["size"] != size:
                continue  # a signed URL lets a client put anything there
            piece = StagedPiece(offset, size, item["path"])
            longest[offset] = max(
                longest.get(offset, piece), piece, key=lambda staged: staged.bytes
            )
        chain: list[StagedPiece] = []
        while (piece := longest.get(stored_bytes(chain))) is not None:  # type: ignore[assignment]
            chain.append(piece)
        return chain

    async def put(self, upload_id: str, offset: int, path: Path, size: int) -> None:
        """Store a piece, durably."""
        await self._blobs.put_object(_key(upload_id, offset, size), path, size)

    async def url(self, upload_id: str, offset: int, size: int) -> str:
        """Return the address to which a volunteer uploads a piece itself; "" if volunteers cannot
        reach the store.
        """
        return await self._blobs.signed("PUT", _key(upload_id, offset, size))

    async def collect(self, upload_id: str, size: int, into: Path) -> str:
        """Write a complete upload into a file. Return the key of a copy in the store with the same
        bytes, or "" if the upload has several pieces; `release` deletes the copy.

        Raises Unavailable if the store lacks bytes that it listed or confirmed before.
        """
        pieces = await self.pieces(upload_id)
        if stored_bytes(pieces) != size:
            raise _absent()
        copy = f"{CHECKED}/{uuid4().hex}" if len(pieces) == 1 else ""
        try:
            if copy:
                await self._blobs.copy_object(pieces[0].key, copy)
                pieces = [StagedPiece(0, size, copy)]
            await self._write(pieces, into)
        except NotFound as error:
            await self.release(copy)
            raise _absent() from error
        except BaseException:
            await self.release(copy)
            raise
        return copy

    async def _write(self, pieces: list[StagedPiece], into: Path) -> None:
        with storage_errors(), into.open("wb") as file:
            for piece in pieces:
                stream = await self._blobs.object_range(piece.key, 0, piece.bytes)
                async with aclosing(stream):
                    async for data in stream:
                        await in_pool(file.write, data)

    async def store(self, sha256: str, path: Path, copy: str) -> None:
        """Make a blob of the file that `collect` wrote, or of its `copy` in the store."""
        if copy:
            await self._blobs.copy_object(copy, self._blobs.key(sha256))
            await self._blobs.keep(sha256, path)
        else:
            await self._blobs.store_file(sha256, path)

    async def release(self, copy: str) -> None:
        """Delete the copy that `collect` made; "" = no copy."""
        if copy:
            await self._blobs.delete_object(copy, "scratch")

    async def drop(self, upload_id: str) -> None:
        """Delete all pieces of an upload."""
        for item in await self._stored(f"{FOLDER}/{upload_id}/"):
            await self._blobs.delete_object(item["path"], "settled")

    async def sweep(self, before: float) -> None:
        """Delete pieces and copies stored before an instant: their uploads are abandoned."""
        for folder in (FOLDER, CHECKED):
            for item in await self._stored(f"{folder}/"):
                if item["last_modified"].timestamp() < before:
                    await self._blobs.delete_object(item["path"], "expired")

    async def _stored(self, prefix: str) -> list[Any]:
        return [item async for item in self._blobs.objects(prefix)]


def _key(upload_id: str, offset: int, size: int) -> str:
    return f"{FOLDER}/{upload_id}/{offset:016d}-{size:016d}"


def stored_bytes(pieces: list[StagedPiece]) -> int:
    """Return the offset after the last of pieces that follow one another: the number of stored
    bytes.
    """
    return pieces[-1].offset + pieces[-1].bytes if pieces else 0


def _absent() -> Unavailable:
    return Unavailable("the object store does not give all bytes of this upload", retry_after_s=5.0)
