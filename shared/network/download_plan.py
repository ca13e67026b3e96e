"""Routes to the published weights of a version, and their bytes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shared.protocol.versions import BlobRef, Link, Snapshot, VersionManifest

LINK_CODEC = "int8"  # codec of the links that the coordinator writes and a volunteer applies


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Way to the wanted weights: from weights on this machine (`base`), or from a snapshot, by
    applying links.
    """

    base: str = ""  # SHA-256 of weights on this machine; "" with a snapshot
    snapshot: Snapshot | None = None
    links: tuple[Link, ...] = ()  # in the order of application

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """Return the blobs to download, in the order of use."""
        packed = (self.snapshot.blob,) if self.snapshot else ()
        return (*packed, *(link.blob for link in self.links))

    @property
    def hashes(self) -> tuple[str, ...]:
        """Return the hashes of the route's blobs, and of each weights file that is read or built on
        the route, from the base or snapshot to the wanted weights.
        """
        snapshot_weights = (self.snapshot.weights,) if self.snapshot else (self.base,)
        return (
            *snapshot_weights,
            *(blob.sha256 for blob in self.blobs),
            *(link.weights for link in self.links),
        )

    @property
    def size(self) -> int:
        """Return the bytes to download."""
        return sum(blob.size for blob in self.blobs)


def routes(manifest: VersionManifest, cached: Collection[str]) -> list[Route]:
    """Return the routes with fewer bytes than the whole weights file, the smallest first; `cached`
    are the SHA-256 hashes of weights on this machine.
    """
    links = {link.weights: link for link in manifest.downlink.links}
    packed = {snapshot.weights: snapshot for snapshot in manifest.downlink.snapshots}
    size, at = manifest.weights.size, manifest.weights.sha256
    steps: tuple[Link, ...] = ()
    candidates: list[Route] = []
    while True:
        if steps and at in cached:
            candidates.append(Route(base=at, links=steps))
        if at in packed:
            candidates.append(Route(snapshot=packed[at], links=steps))
        link = links.pop(at, None)
        if link is None or link.codec != LINK_CODEC:
            break
        at, steps = link.base, (link, *steps)
    smaller = (route for route in candidates if route.size < size)
    return sorted(smaller, key=lambda route: route.size)
