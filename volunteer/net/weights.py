"""Published weights of a version, fetched by the route with the fewest bytes.

cache             nothing is downloaded
links from base   the changes from an earlier version in the cache; each result's hash is checked
snapshot          a packed version, and the links from it
whole file        always possible; used when the other routes fail
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias
from weakref import WeakValueDictionary

from shared.errors import BadRequest, InvalidFrame, NotFound, StorageFull
from shared.files.deletions import delete_file
from shared.network.download_plan import Route, routes
from shared.protocol.versions import VersionManifest
from shared.sentences import Sentence
from shared.tensors.codec import codec
from shared.tensors.downlink import LinkSettings, follow_link, schema_of_link
from shared.tensors.frame import WrittenFile
from shared.tensors.snapshot import unpack_snapshot
from volunteer.net.transfers import OnBytes, Transfers
from volunteer.storage.blob_cache import Cache

ProgressMaker: TypeAlias = Callable[
    [int], OnBytes
]  # makes a file's progress callback from its size
Notice: TypeAlias = Callable[[str], None]


class Weights:
    """Fetches and builds the weights of versions, in the cache."""

    def __init__(self, transfers: Transfers, cache: Cache, notice: Notice) -> None:
        self._transfers = transfers
        self._cache = cache
        self._notice = notice
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def fetch(self, manifest: VersionManifest, progress_of: ProgressMaker) -> Path:
        """Return the file of a version's weights. Raises InvalidFrame, StorageFull."""
        weights = manifest.weights
        lock = self._locks.setdefault(weights.sha256, asyncio.Lock())
        async with lock:  # two devices may need the same version
            if not await self._is_cached(weights.sha256, weights.size):
                for route in await self._routes(manifest):
                    try:
                        return await self._follow(route, manifest, progress_of(route.size))
                    except (InvalidFrame, NotFound, BadRequest, StorageFull) as error:
                        self._notice(
                            Sentence(
                                "version {version} of {run} is downloaded another way: {error}",
                                version=manifest.version,
                                run=manifest.run,
                                error=error.message,
                            )
                        )
            return await self._transfers.fetch(weights, progress_of(weights.size))

    async def _is_cached(self, sha256: str, size: int) -> bool:
        return await asyncio.to_thread(self._cache.find, sha256, size) is not None

    async def _routes(self, manifest: VersionManifest) -> list[Route]:
        bases, size = {link.base for link in manifest.downlink.links}, manifest.weights.size
        return routes(manifest, [base for base in bases if await self._is_cached(base, size)])

    async def _follow(self, route: Route, manifest: VersionManifest, on_bytes: OnBytes) -> Path:
        with self._cache.hold(route.hashes):
            files, done = {}, 0
            for blob in route.blobs:

                def tell(count: int, before: int = done) -> None:
                    on_bytes(before + count)

                files[blob.sha256] = await self._transfers.fetch(blob, tell)
                done += blob.size
            try:
                return await asyncio.to_thread(self._build, route, manifest, files)
            except FileNotFoundError as error:
                raise NotFound(
                    Sentence("a file of this download is no longer in the cache")
                ) from error

    def _build(self, route: Route, manifest: VersionManifest, files: dict[str, Path]) -> Path:
        """Build the weights from a route's files, and check every result by its hash. Blocks.

        Raises InvalidFrame, FileNotFoundError, StorageFull.
        """
        size = manifest.weights.size
        if route.snapshot is not None:
            packed, into = files[route.snapshot.blob.sha256], self._cache.scratch_file(size)
            written = unpack_snapshot(packed, manifest.schema_sha256, into, size)
            path = self._adopt(into, written, route.snapshot.weights)
        else:
            base = self._cache.find(route.base, size)
            if base is None:
                raise FileNotFoundError(route.base)
            path = base
        for link in route.links:
            file, into = files[link.blob.sha256], self._cache.scratch_file(size)
            schema = schema_of_link(path, file, manifest.schema_sha256)
            how = LinkSettings(codec=codec(link.codec), rounded=link.rounded)
            written = follow_link(path, file, schema, into, how)
            path = self._adopt(into, written, link.weights)
        return path

    def _adopt(self, built: Path, written: WrittenFile, sha256: str) -> Path:
        if written.sha256 != sha256:
            delete_file(built, "scratch")
            raise InvalidFrame(Sentence("the result does not have the hash of the manifest"))
        return self._cache.adopt(built, sha256)
