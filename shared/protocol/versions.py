"""Versions of a run: their signed manifests, the routes to their weights, the history."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.proofs.signing import canonical, digest
from shared.protocol.base import Count, Message
from shared.protocol.transparency import TreeHead
from shared.workloads.base import ChunkRef, DatasetManifest, Job


class BlobRef(Message, omit_defaults=True):
    sha256: str
    size: int
    # SHA-256 of each piece of MIRROR_PIECE_BYTES, if there are mirrors and more than one piece.
    pieces: tuple[str, ...] = ()


class BlobUrl(Message):
    """Address of a blob in the object store, valid for some minutes; "" = download it here."""

    url: str


class Link(Message):
    """Step from older published weights to newer ones: a blob and its codec."""

    base: str  # SHA-256 of the published weights before the link
    weights: str  # SHA-256 of the published weights after the link
    blob: BlobRef
    codec: str
    rounded: bool  # the resulting weights are rounded to bfloat16


class Snapshot(Message):
    """Published weights, packed."""

    weights: str  # SHA-256 of the resulting weights
    blob: BlobRef


class Downlink(Message):
    """Links and snapshots that lead to a version's published weights with fewer bytes than the
    whole file. The whole file can always be downloaded instead.
    """

    links: tuple[Link, ...] = ()  # newest first
    snapshots: tuple[Snapshot, ...] = ()


class VersionManifest(Message):
    """Signed description of a version; the signature covers the canonical JSON of this struct."""

    run: str
    version: int
    workload: str
    workload_version: int
    config: dict[str, object]
    weights: BlobRef  # published weights, a safetensors file of the run's schema
    master_sha256: str
    schema_sha256: str
    dataset: str
    tokenizer_sha256: str
    global_step: int
    tokens: int
    created_at: float
    expires_at: float  # a volunteer warns if this is still the newest version after this time
    downlink: Downlink = Downlink()
    chunks_sha256: str = ""  # hash of the dataset's public part; see `chunks_digest`
    # SHA-256 of the task suites that score the version, by name.
    suites: dict[str, str] = msgspec.field(default_factory=dict)
    tree: TreeHead | None = None  # head of the coordinator's record at the signing
    # Schedule of tasks that begin from this version: total global steps of the run, and its warm-up
    # steps; 0 = as the lease says.
    total_steps: Count = 0
    warmup_steps: Count = 0

    def bound(self, job: Job) -> Job:
        """Return the job with this version as its base, and this version's schedule."""
        job = msgspec.structs.replace(
            job,
            global_step=self.global_step,
            base_version=self.version,
            base_sha256=self.weights.sha256,
        )
        if self.total_steps <= 0:
            return job
        train = msgspec.structs.replace(job.train, warmup_steps=max(0, self.warmup_steps))
        return msgspec.structs.replace(job, train=train, total_steps=self.total_steps)


class SuiteScore(Message):
    """Score of a version on a task suite."""

    version: int
    share: float  # share of correctly answered examples
    error: float  # standard error of the share, binomial
    examples: int

    @property
    def text(self) -> str:
        """Return the score as text, with its standard error: 41.5 % ± 3.1."""
        return f"{100 * self.share:.1f} % ± {100 * self.error:.1f}"


class SuiteCourse(Message):
    """Task suite of a run: its scores before and after training."""

    name: str
    chance: float  # share of correct answers by guessing
    total: int  # number of examples
    chat: bool = False  # the chat template of the run's data formats the prompts
    first: SuiteScore | None = None
    newest: SuiteScore | None = None  # score of a later version


class SignedManifest(Message):
    payload: str  # canonical JSON of a VersionManifest
    signature: str  # hex


class VersionInfo(Message):
    """Row of the history."""

    version: int
    kind: Literal["initial", "merge", "rollback"]
    created_at: float
    contributions: int
    global_step: int
    tokens: int
    published_sha256: str
    loss: float | None = None
    evaluation: Literal["waiting", "running", "done", "skipped", "failed"] = "waiting"
    best: bool = False
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    sample: str = ""
    picture: BlobRef | None = None  # a PNG, if the sample is an image
    update_norm: float | None = None
    mine: int = 0  # contributions of the requesting volunteer


def chunks_digest(dataset: DatasetManifest) -> str:
    """Return the SHA-256 in hex of a dataset's public part: training chunks, assets, kind and
    metadata. The held-out split is not part of it and is never served to volunteers.
    """

    def facts(chunk: ChunkRef) -> list[object]:
        return [chunk.sha256, chunk.size, chunk.items]

    assets = {name: facts(chunk) for name, chunk in dataset.assets.items()}
    return digest(canonical([dataset.kind, [*map(facts, dataset.chunks)], assets, dataset.meta]))
