"""Published files of a new version, made from its master weights by the plan's `downlink`.

    float32   the master itself
    chain     published(n) = published(n - 1) - Q(published(n - 1) - master(n)),
              see shared/tensors/downlink.py; the files are the published weights, the link from
              the previous version, and sometimes a snapshot

Preparing only writes files next to the master; storing puts them into the blob store, where nothing
refers to them until the version is committed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from coordinator.database import datasets
from coordinator.runs.version_files import Content
from shared.decoding import decode
from shared.files.deletions import delete_file
from shared.network.download_plan import LINK_CODEC
from shared.protocol.limits import MIRROR_PIECE_BYTES
from shared.protocol.versions import BlobRef, Downlink, Link, Snapshot, VersionManifest
from shared.tensors.codec import codec
from shared.tensors.downlink import LinkSettings, round_weights, write_link
from shared.tensors.frame import open_frame
from shared.tensors.snapshot import write_snapshot

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.versions import VersionRow
    from coordinator.plan.plan_tables import Plan
    from coordinator.storage.blobs import BlobStore
    from shared.tensors.codec import EncodedUpdate
    from shared.tensors.frame import WrittenFile
    from shared.tensors.spec import Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedBase:
    """Published weights of the previous version, as volunteers hold them."""

    weights: BlobRef
    downlink: Downlink
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """New version, and the place where its files are made."""

    plan: Plan
    schema: Schema
    version: int
    master: Path  # scratch file; the names of other scratch files begin with its name
    written: WrittenFile  # size and hash of the master file
    base: PublishedBase | None  # None for the first version of a run
    mirrored: bool = False  # the manifest lists hashes of pieces

    def ref(self, path: Path, written: WrittenFile | EncodedUpdate) -> BlobRef:
        """Return the reference to a file of the version."""
        size = written.size
        pieces = _piece_hashes(path) if self.mirrored and size > MIRROR_PIECE_BYTES else ()
        return BlobRef(sha256=written.sha256, size=size, pieces=pieces)


@dataclass(slots=True)
class PreparedVersion:
    """Files of a version that are not stored yet."""

    content: Content
    published: Path  # weights that volunteers train from, and that are evaluated
    files: dict[str, Path] = field(default_factory=dict)  # files by hash

    async def store(self, blobs: BlobStore) -> Content:
        """Put every file into the store. Raises StorageFull."""
        for sha256, path in self.files.items():
            await blobs.put_file(sha256, path)
        return self.content


def discard(master: Path) -> None:
    """Remove the master and the unstored files made from it."""
    for path in (master, *_derived_paths(master)):
        delete_file(path, "scratch")


def prepare(order: Publication) -> PreparedVersion:
    """Write the files of a version; blocks the thread.

    The caller discards the remaining files in any case. Raises InvalidFrame for weights that are
    not finite, StorageFull.
    """
    master = order.written
    files = {master.sha256: order.master}
    if order.plan.downlink == "float32":
        content = Content(
            master_sha256=master.sha256,
            master_size=master.size,
            published_sha256=master.sha256,
            size=master.size,
            pieces=order.ref(order.master, master).pieces,
        )
        return PreparedVersion(content, order.master, files)
    published, link, snapshot = _derived_paths(order.master)
    weights, step = _published(order, published, link)
    packed = None
    if order.version % order.plan.snapshot_every == 0:
        with open_frame(published, order.schema) as frame:
            snapshot_file = write_snapshot(frame, order.schema, snapshot)
        blob = order.ref(snapshot, snapshot_file)
        packed = Snapshot(weights=weights.sha256, blob=blob)
    before = order.base.downlink if order.base else Downlink()
    ref = order.ref(published, weights)
    content = Content(
        master_sha256=master.sha256,
        master_size=master.size,
        published_sha256=weights.sha256,
        size=weights.size,
        pieces=ref.pieces,
        downlink=ways(before, ref, step, packed),
    )
    files[weights.sha256] = published
    files_made = {ref.blob.sha256: path for ref, path in ((step, link), (packed, snapshot)) if ref}
    # Only listed files are kept: a very small model may be smaller than its link or snapshot.
    files |= {
        ref.sha256: files_made[ref.sha256] for ref in content.ways if ref.sha256 in files_made
    }
    return PreparedVersion(content, published, files)


def _published(order: Publication, path: Path, link: Path) -> tuple[WrittenFile, Link | None]:
    """Write the published weights and, from one version to the next, the link between them."""
    if order.base is None:
        return round_weights(order.master, order.schema, path), None
    rounded = order.version % order.plan.snapshot_every == 0
    link_codec = codec(LINK_CODEC)
    how = LinkSettings(codec=link_codec, rounded=rounded, sync=True)
    encoded, written = write_link(order.base.path, order.master, order.schema, (link, path), how)
    if written.sha256 == order.base.weights.sha256:  # volunteers would get the same weights again
        return written, None
    step = Link(
        base=order.base.weights.sha256,
        weights=written.sha256,
        blob=order.ref(link, encoded),
        codec=link_codec.name,
        rounded=rounded,
    )
    return written, step


def with_state(content: Content, state: WrittenFile | None) -> Content:
    """Return the content of a version with its server-optimiser state, if it has a state."""
    if state is None:
        return content
    return msgspec.structs.replace(content, state_sha256=state.sha256, state_size=state.size)


def ways(
    before: Downlink, weights: BlobRef, link: Link | None, snapshot: Snapshot | None
) -> Downlink:
    """Return the links and snapshots that a manifest lists: the routes to the weights that may be
    the shortest for some volunteer.
    """
    links = {link.weights: link for link in (*before.links, *([link] if link else []))}
    packed = {
        snapshot.weights: snapshot
        for snapshot in (*before.snapshots, *([snapshot] if snapshot else []))
    }
    at, spent, limit = weights.sha256, 0, weights.size
    steps: list[Link] = []
    snapshots: list[Snapshot] = []
    while True:
        whole = packed.get(at)
        if whole is not None and spent + whole.blob.size < limit:
            snapshots.append(whole)
            limit = spent + whole.blob.size
        # removed, so that the walk ends even if weights return to earlier values
        step = links.pop(at, None)
        if step is None or spent + step.blob.size >= limit:
            return Downlink(links=tuple(steps), snapshots=tuple(snapshots))
        steps.append(step)
        spent, at = spent + step.blob.size, step.base


def content_of(conn: Connection, row: VersionRow) -> Content:
    """Return the files of an existing version."""
    hashes = [sha for sha in (row.master_sha256, row.state_sha256) if sha]
    sizes = datasets.blob_sizes(conn, hashes)
    manifest = decode(row.manifest, VersionManifest)
    return Content(
        master_sha256=row.master_sha256,
        published_sha256=row.published_sha256,
        size=row.size,
        downlink=manifest.downlink,
        state_sha256=row.state_sha256,
        master_size=sizes[row.master_sha256],
        pieces=manifest.weights.pieces,
        state_size=sizes[row.state_sha256] if row.state_sha256 else 0,
    )


async def base_of(blobs: BlobStore, row: VersionRow) -> PublishedBase:
    """Return a version as volunteers hold it. Raises Unavailable if its file is gone."""
    return PublishedBase(
        weights=BlobRef(sha256=row.published_sha256, size=row.size),
        downlink=decode(row.manifest, VersionManifest).downlink,
        path=await blobs.local(row.published_sha256),
    )


def _derived_paths(master: Path) -> tuple[Path, Path, Path]:
    """Return the paths for published weights, link and snapshot of a version."""
    published, link, snapshot = (
        master.with_name(f"{master.name}-{part}") for part in ("published", "link", "snapshot")
    )
    return published, link, snapshot


def _piece_hashes(path: Path) -> tuple[str, ...]:
    with path.open("rb") as file:
        pieces = iter(partial(file.read, MIRROR_PIECE_BYTES), b"")
        return tuple(hashlib.sha256(piece).hexdigest() for piece in pieces)
