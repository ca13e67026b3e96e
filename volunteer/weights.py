"""The published weights of a version, brought here by the way that needs the fewest bytes.

held already        nothing travels
links from a base   when one of the versions before is in the cache; each result is checked by its hash
a snapshot          and the links from it
the whole file      always possible, and what is left when another way leads to something damaged or is gone
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from shared.errors import BadRequest, InvalidFrame, NotFound
from shared.protocol import BlobRef, Link, Snapshot, VersionManifest
from shared.tensors.downlink import follow_link, schema_of_link
from shared.tensors.frame import Written
from shared.tensors.quantize import codec
from shared.tensors.snapshot import unpack_snapshot
from volunteer.cache import Cache
from volunteer.transfer import OnBytes, Transfers

LINK_CODECS = frozenset({"int8", "int4"})  # what a link may be written in

Teller: TypeAlias = Callable[[int], OnBytes]  # from the bytes in all to who hears of those done
Notice: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """From a base or a snapshot over links to the weights that are wanted."""

    base: str = ""  # SHA-256 of weights that are here
    snapshot: Snapshot | None = None
    links: tuple[Link, ...] = ()  # in the order in which they are followed

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        packed = (self.snapshot.blob,) if self.snapshot else ()
        return (*packed, *(link.blob for link in self.links))

    @property
    def hashes(self) -> tuple[str, ...]:
        """All that is needed or made on the way."""
        made = (self.snapshot.weights,) if self.snapshot else (self.base,)
        return (
            *made,
            *(blob.sha256 for blob in self.blobs),
            *(link.weights for link in self.links),
        )

    @property
    def size(self) -> int:
        """Bytes that travel."""
        return sum(blob.size for blob in self.blobs)


class Weights:
    """Fetches and builds the weights of versions, in the cache."""

    def __init__(self, transfers: Transfers, cache: Cache, notice: Notice) -> None:
        self._transfers = transfers
        self._cache = cache
        self._notice = notice
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def fetch(self, manifest: VersionManifest, teller: Teller) -> Path:
        """The file of a version's published weights. Raises InvalidFrame when all that comes is damaged, StorageFull."""
        wanted = manifest.weights
        async with self._locks[wanted.sha256]:  # two devices may want the same version
            if not await self._held(wanted.sha256, wanted.size):
                for route in await self._routes(manifest):
                    try:
                        return await self._follow(route, manifest, teller(route.size))
                    except (InvalidFrame, NotFound, BadRequest) as error:
                        self._notice(
                            f"version {manifest.version} of {manifest.run} is fetched another way: {error.message}"
                        )
            return await self._transfers.fetch(wanted, teller(wanted.size))

    async def _held(self, sha256: str, size: int) -> bool:
        return await asyncio.to_thread(self._cache.find, sha256, size) is not None

    async def _routes(self, manifest: VersionManifest) -> list[Route]:
        """Every way that is fewer bytes than the whole file, the fewest first."""
        links = {link.weights: link for link in manifest.downlink.links}
        packed = {each.weights: each for each in manifest.downlink.snapshots}
        size = manifest.weights.size
        at = manifest.weights.sha256
        steps: tuple[Link, ...] = ()
        found: list[Route] = []
        while True:
            if steps and await self._held(at, size):
                found.append(Route(base=at, links=steps))
            if at in packed:
                found.append(Route(snapshot=packed[at], links=steps))
            link = links.pop(at, None)
            if link is None or link.codec not in LINK_CODECS:
                break
            at, steps = link.base, (link, *steps)
        return sorted((route for route in found if route.size < size), key=lambda route: route.size)

    async def _follow(self, route: Route, manifest: VersionManifest, on_bytes: OnBytes) -> Path:
        with self._cache.hold(route.hashes):
            files, done = {}, 0
            for blob in route.blobs:

                def tell(count: int, before: int = done) -> None:
                    on_bytes(before + count)

                files[blob.sha256] = await self._transfers.fetch(blob, tell)
                done += blob.size
            return await asyncio.to_thread(self._build, route, manifest, files)

    def _build(self, route: Route, manifest: VersionManifest, files: dict[str, Path]) -> Path:
        """In a thread: unpack, follow, and check every result by its hash. Raises InvalidFrame, StorageFull."""
        size = manifest.weights.size
        if route.snapshot is not None:
            packed, into = files[route.snapshot.blob.sha256], self._cache.building(size)
            written = unpack_snapshot(packed, manifest.schema_sha256, into)
            path = self._adopt(into, written, route.snapshot.weights)
        else:
            found = self._cache.find(route.base, size)
            if found is None:
                raise NotFound("the version it was to be made from is gone from the cache")
            path = found
        for link in route.links:
            file, into = files[link.blob.sha256], self._cache.building(size)
            schema = schema_of_link(path, file, manifest.schema_sha256)
            chosen = codec(link.codec)
            written = follow_link(path, file, schema, into, chosen, rounded=link.rounded)
            path = self._adopt(into, written, link.weights)
        return path

    def _adopt(self, built: Path, written: Written, sha256: str) -> Path:
        if written.sha256 != sha256:
            built.unlink(missing_ok=True)
            raise InvalidFrame("what came out has another hash than the manifest says")
        return self._cache.adopt(built, sha256)
