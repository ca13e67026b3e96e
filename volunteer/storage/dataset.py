"""Blobs of a dataset that a task needs."""

from __future__ import annotations

from shared.errors import InvalidFrame
from shared.protocol.leases import Lease
from shared.protocol.versions import BlobRef
from shared.workloads.base import ChunkRef, DatasetManifest


def wanted(lease: Lease, manifest: DatasetManifest) -> dict[int, BlobRef]:
    """Return the chunks a task needs, by index.

    Raises InvalidFrame when the lease names one that is not there.
    """
    found = {}
    for index in lease.chunks:
        if not 0 <= index < len(manifest.chunks):
            raise InvalidFrame(f"the task names chunk {index}, which {manifest.name} does not have")
        found[index] = blob_of(manifest.chunks[index])
    return found


def blob_of(chunk: ChunkRef) -> BlobRef:
    return BlobRef(sha256=chunk.sha256, size=chunk.size)
