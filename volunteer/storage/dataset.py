"""The part of a dataset that lies on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.errors import InvalidFrame, NotFound
from shared.protocol.leases import Lease
from shared.protocol.versions import BlobRef
from shared.workloads.base import ChunkRef, DatasetManifest


@dataclass(slots=True, kw_only=True)  # not frozen, because the interface is not
class LocalData:
    """See `Data`: chunks and assets as files of the cache."""

    manifest: DatasetManifest
    chunks: Mapping[int, Path]
    assets: Mapping[str, Path]

    def chunk(self, index: int) -> Path:
        if index not in self.chunks:
            raise NotFound(f"chunk {index} of {self.manifest.name} was not announced for this task")
        return self.chunks[index]

    def asset(self, name: str) -> Path:
        if name not in self.assets:
            raise NotFound(f'{self.manifest.name} has no "{name}"')
        return self.assets[name]


def wanted(lease: Lease, manifest: DatasetManifest) -> dict[int, BlobRef]:
    """The chunks a task touches. Raises InvalidFrame when the lease names one that is not there."""
    found = {}
    for index in lease.chunks:
        if not 0 <= index < len(manifest.chunks):
            raise InvalidFrame(f"the task names chunk {index}, which {manifest.name} does not have")
        found[index] = blob_of(manifest.chunks[index])
    return found


def blob_of(chunk: ChunkRef) -> BlobRef:
    return BlobRef(sha256=chunk.sha256, size=chunk.size)
