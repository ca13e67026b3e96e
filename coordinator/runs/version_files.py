"""Files of a version in the blob store, and the manifest that the coordinator signs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from coordinator.rules.task_size import StepsAndTokens
from coordinator.runs.definition import Definition, definition
from shared.decoding import decode
from shared.proofs.signing import SigningKey, canonical
from shared.protocol.transparency import TreeHead
from shared.protocol.versions import (
    BlobRef,
    Downlink,
    SignedManifest,
    VersionManifest,
    chunks_digest,
)
from shared.tensors.frame import FrameWriter, WrittenFile, torch_tensors
from shared.units import DAY_S
from shared.workloads.training.lr_schedule import warmup

if TYPE_CHECKING:
    import torch

    from coordinator.database.datasets import DatasetRow
    from coordinator.database.runs import RunRow

MANIFEST_LIFE_S = 7 * DAY_S  # volunteers warn of an older signature, and then refuse it


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """Stored files of a version."""

    master_sha256: str
    master_size: int
    published_sha256: str
    size: int  # bytes of the published weights
    pieces: tuple[str, ...] = ()  # hashes of pieces of the published weights, for mirrors
    downlink: Downlink = Downlink()
    state_sha256: str | None = None
    state_size: int = 0

    @property
    def ways(self) -> tuple[BlobRef, ...]:
        """Return the blobs of shorter routes to the published weights, including older ones."""
        links, snapshots = self.downlink.links, self.downlink.snapshots
        return (*(link.blob for link in links), *(snapshot.blob for snapshot in snapshots))

    def blobs(self) -> list[tuple[str, int, str]]:
        """Return hash, size and kind of every blob, to be registered."""
        blobs = [
            (self.master_sha256, self.master_size, "weights"),
            (self.published_sha256, self.size, "weights"),
            *((ref.sha256, ref.size, "way") for ref in self.ways),
        ]
        if self.state_sha256:
            blobs.append((self.state_sha256, self.state_size, "state"))
        return blobs


class TrainingProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Training progress at a version."""

    version: int
    global_step: int
    tokens: int


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """Dataset, hashes of suites, and head of the record that a version's manifest names."""

    dataset: DatasetRow | None
    tree: TreeHead
    suites: Mapping[str, str] = {}


def write_weights(
    path: Path, about: Definition, weights: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> WrittenFile:
    """Write tensors of the run's schema as one file. Raises InvalidFrame, StorageFull."""
    with FrameWriter(path, about.schema, dict(metadata)) as writer:
        for spec in about.schema:
            writer.write(spec.name, weights[spec.name].detach().cpu().contiguous().numpy())
    assert writer.written is not None
    return writer.written


def read_weights(path: Path, about: Definition) -> dict[str, torch.Tensor]:
    """Return the tensors of a version, memory-mapped; writes stay private."""
    return torch_tensors(path, about.schema)


def sign(
    key: SigningKey,
    run: RunRow,
    around: Surroundings,
    content: Content,
    progress: TrainingProgress,
    now: float,
) -> SignedManifest:
    """Return the signed manifest of a version."""
    dataset = around.dataset
    about = definition(run)
    tokenizer = dataset.manifest.assets.get("tokenizer") if dataset else None
    whole = about.total_steps(run, StepsAndTokens(progress.global_step, progress.tokens))
    manifest = VersionManifest(
        version=progress.version,
        workload=run.workload,
        workload_version=run.workload_version,
        master_sha256=content.master_sha256,
        global_step=progress.global_step,
        tokens=progress.tokens,
        downlink=content.downlink,
        tree=around.tree,
        run=run.name,
        config=about.file.model,
        weights=BlobRef(sha256=content.published_sha256, size=content.size, pieces=content.pieces),
        schema_sha256=about.schema_sha256,
        dataset=dataset.name if dataset else "",
        tokenizer_sha256=tokenizer.sha256 if tokenizer else "",
        created_at=now,
        expires_at=now + MANIFEST_LIFE_S,
        chunks_sha256=chunks_digest(dataset.manifest) if dataset else "",
        suites=dict(around.suites),
        total_steps=whole if progress.tokens else 0,
        warmup_steps=warmup(about.file.train, whole) if progress.tokens else 0,
    )
    return signed(key, manifest)


def signed(key: SigningKey, manifest: VersionManifest) -> SignedManifest:
    """Sign a manifest."""
    payload = canonical(manifest)
    return SignedManifest(payload=payload.decode(), signature=key.sign(payload).hex())


def renewed(key: SigningKey, old: SignedManifest, now: float) -> SignedManifest:
    """Renew the signature of a version's manifest whose content is still valid.

    The head of a paused or slow run may be old and still valid; only an old manifest that somebody
    else sends again must expire.
    """
    manifest = decode(old.payload, VersionManifest)
    return signed(key, msgspec.structs.replace(manifest, expires_at=now + MANIFEST_LIFE_S))
