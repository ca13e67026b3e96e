"""Series of backups in an object store, where the backups share their blobs.

PREFIX/INSTANT/backup.json ...   as in a folder, without blobs
PREFIX/ab/abcdef...              blobs of all backups, named by hash
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.storage.blobs import in_pool
from coordinator.storage.s3 import S3Blobs
from coordinator.upkeep import backup as backups
from coordinator.upkeep.backup import LIST, SIGNATURE, BackupList, BackupSummary
from coordinator.upkeep.backup_series import IS_NAME, newest
from shared.errors import BadRequest, BadSignature, Configuration, NotFound

if TYPE_CHECKING:
    from coordinator.storage.blobs import BlobStore


class StoredBackups:
    """Backups below a URL, or a single named backup; `scratch` is a folder for files in transit."""

    def __init__(self, url: str, scratch: Path) -> None:
        self._url, self._only = url.rstrip("/"), ""
        above, _, last = self._url.rpartition("/")
        if IS_NAME.fullmatch(last):
            self._url, self._only = above, last
        self._store = S3Blobs(self._url, scratch / "cache", cache_bytes_max=0)

    async def names(self) -> list[str]:
        """Return the names of the complete backups, oldest first."""
        objects = self._store.objects(self._only or None)
        paths = [item["path"].split("/") async for item in objects]
        return sorted(p[0] for p in paths if p[1:] == [LIST] and IS_NAME.fullmatch(p[0]))

    async def listing(self, scratch: Path) -> list[BackupSummary]:
        """Return the summary of each backup, oldest first; the signatures are checked."""
        return [
            backups.summary(f"{self._url}/{name}", await self._list(name, scratch / name))
            for name in await self.names()
        ]

    async def fetch(self, folder: Path) -> None:
        """Copy the newest backup into a folder, or the one that the URL names. Raises BadRequest if
        there is no complete backup.
        """
        names = await self.names()
        if not names:
            place = f"{self._url}/{self._only}".rstrip("/")
            raise BadRequest(f"{place} holds no complete backup")
        listed = await self._list(names[-1], folder)
        for part in ("tables", "keys"):
            async for item in self._store.objects(f"{names[-1]}/{part}"):
                await self._get(item["path"], folder / part / Path(item["path"]).name)
        for sha in listed.blobs:
            await backups.copy_blob(self._store, sha, folder / "blobs" / sha[:2] / sha)

    async def prune(self, keep: int) -> list[str]:
        """Delete all but the newest backups, and their blobs unless a kept backup lists them.

        A backup's list is deleted last, so that the next call completes an interrupted deletion.
        """
        self._check_several()
        names = await self.names()
        surplus, needed, lost = names[:-keep], set[str](), set[str]()
        keys = dict[str, str]()
        with tempfile.TemporaryDirectory() as scratch:
            for name in names[-keep:] if surplus else ():
                listed = await self._list(name, Path(scratch) / name)
                needed |= listed.blobs.keys()
                keys[listed.public_key] = name
            for name in surplus:
                # the list of a damaged backup does not show its blobs
                with suppress(BadRequest, BadSignature, Configuration, NotFound):
                    listed = await self._list(name, Path(scratch) / name)
                    lost |= listed.blobs.keys()
                    keys[listed.public_key] = name
        backups.check_one_key(self._url, keys)
        for sha in sorted(lost - needed):
            await self._store.delete(sha, "asked")
        for name in surplus:
            paths = [item["path"] async for item in self._store.objects(name)]
            for path in sorted(paths, key=f"{name}/{LIST}".__eq__):
                await self._store.delete_object(path, "asked")
        return [f"{self._url}/{name}" for name in surplus]

    def _check_several(self) -> None:
        if self._only:
            raise BadRequest(f"{self._only} names one backup: name {self._url}, where all are")

    async def _list(self, name: str, folder: Path) -> BackupList:
        for file in (LIST, SIGNATURE):
            await self._get(f"{name}/{file}", folder / file)
        return await in_pool(backups.read_list, folder)

    async def _get(self, key: str, path: Path) -> None:
        size = await self._store.object_size(key)
        await in_pool(lambda: path.parent.mkdir(parents=True, exist_ok=True, mode=0o700))
        stream = await self._store.object_range(key, 0, size)
        async with aclosing(stream):
            with path.open("wb") as file:
                async for data in stream:
                    await in_pool(file.write, data)

    async def place(self, blobs: BlobStore) -> StorePlace:
        """Return the place for a new backup."""
        self._check_several()
        return StorePlace(
            self._store, blobs, {e.sha256: e.size async for e in self._store.entries()}
        )


class StorePlace:
    """Place for a new backup in an object store."""

    def __init__(self, store: S3Blobs, blobs: BlobStore, there: dict[str, int]) -> None:
        self._store, self._blobs, self._there = store, blobs, there

    async def take(self, sha256: str) -> bool:
        if sha256 in self._there:
            return True
        copy = self._store.scratch() / sha256
        if not await backups.copy_blob(self._blobs, sha256, copy):
            return False
        size = (await in_pool(copy.stat)).st_size
        await self._store.store_file(sha256, copy)
        if await self._store.hash(sha256) != sha256:
            raise Configuration(f"the object store gave back other bytes for {sha256}")
        self._there[sha256] = size
        return True

    async def finish(self, folder: Path, listed: BackupList, payload: bytes) -> None:
        await in_pool(lambda: backups.check_files(folder, listed, listed.blobs))
        files = await in_pool(lambda: [path for path in folder.rglob("*") if path.is_file()])
        for path in files:
            key = f"{folder.name}/{path.relative_to(folder).as_posix()}"
            await self._store.put_object(key, path, path.stat().st_size)
        await self._look_again(listed)
        await self._store.put_object(f"{folder.name}/{LIST}", payload, len(payload))

    async def _look_again(self, listed: BackupList) -> None:
        """Copy blobs again that were deleted meanwhile. Raises NotFound, Configuration."""
        self._there = {entry.sha256: entry.size async for entry in self._store.entries()}
        for sha, size in listed.blobs.items():
            if self._there.get(sha) == size:
                continue
            self._there.pop(sha, None)
            if not await self.take(sha):
                raise NotFound(
                    f"the blob {sha} is no longer in the store of the backup, nor in that of the "
                    "coordinator: back up once more"
                )


@contextmanager
def at_hand(place: str) -> Iterator[Path]:
    """Yield the folder of a place's newest or only backup; a backup in an object store is copied
    first.
    """
    if not place.startswith("s3://"):
        yield newest(Path(place).expanduser().absolute())
        return
    with tempfile.TemporaryDirectory(prefix="coordinator-backup-") as scratch:
        folder = Path(scratch) / "backup"
        asyncio.run(StoredBackups(place, Path(scratch)).fetch(folder))
        yield folder
