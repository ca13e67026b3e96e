"""Versions of a run: their signed manifests, the ways to their weights, the history."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from shared.protocol.base import Count, Message
from shared.protocol.transparency import TreeHead
from shared.signing import canonical, digest
from shared.workloads.base import ChunkRef, DatasetManifest, Job


class BlobRef(Message, omit_defaults=True):
    sha256: str
    size: int
    # SHA-256 of each MIRROR_PIECE_BYTES, where there are mirrors and more than one piece
    pieces: tuple[str, ...] = ()


class BlobUrl(Message):
    """Address in the object store for fetching a blob within some minutes; "" = here."""

    url: str


class Link(Message):
    """Step from older published weights to newer ones: a blob and its codec."""

    base: str  # SHA-256 of published weights
    weights: str  # SHA-256 of the resulting weights
    blob: BlobRef
    codec: str
    rounded: bool  # the resulting weights are rounded to bfloat16


class Snapshot(Message):
    """Published weights, packed."""

    weights: str  # SHA-256 of the resulting weights
    blob: BlobRef


class Downlink(Message):
    """Ways to a version's published weights that are shorter than the whole file, if any.

    The result of links and snapshots has the size of the whole file, which can always be fetched
    instead.
    """

    links: tuple[Link, ...] = ()  # the newest first
    snapshots: tuple[Snapshot, ...] = ()


class VersionManifest(Message):
    """Description of a version. Signed; the bytes signed are the canonical JSON of this struct."""

    run: str
    version: int
    workload: str
    workload_version: int
    config: dict[str, Any]
    weights: BlobRef  # published weights, a safetensors file of the run's schema
    master_sha256: str
    schema_sha256: str
    dataset: str
    dataset_sha256: str
    tokenizer_sha256: str
    global_step: int
    tokens: int
    created_at: float
    expires_at: float  # after this time an unchanging head is noticed
    downlink: Downlink = Downlink()
    chunks_sha256: str = ""  # hash of the dataset as volunteers get it; see `chunks_digest`
    # SHA-256 of the task suites on which it is scored, by name
    suites: dict[str, str] = msgspec.field(default_factory=dict)
    tree: TreeHead | None = None  # head of the coordinator's record when this was signed
    # Schedule of tasks that begin from this version: global steps that the run will make, and those
    # of its warm-up; 0 = as the lease says.
    total_steps: Count = 0
    warmup_steps: Count = 0

    def scheduled(self, job: Job) -> Job:
        """Return the job with this version's schedule."""
        if self.total_steps <= 0:
            return job
        train = msgspec.structs.replace(job.train, warmup_steps=max(0, self.warmup_steps))
        return msgspec.structs.replace(job, train=train, total_steps=self.total_steps)


class SuiteScore(Message):
    """Score of a version on a task suite."""

    version: int
    share: float  # share of the examples that were answered rightly
    error: float  # standard error of the share, binomial
    examples: int

    @property
    def text(self) -> str:
        """Return the score as text, with its standard error: 41.5 % ± 3.1."""
        return f"{100 * self.share:.1f} % ± {100 * self.error:.1f}"


class SuiteCourse(Message):
    """A task suite of a run: its scores before and after training."""

    name: str
    chance: float  # share of right answers that guessing gives
    total: int  # number of examples
    chat: bool = False  # prompts are written by the chat template of the run's data
    first: SuiteScore | None = None
    newest: SuiteScore | None = None  # score of a later version


class SignedManifest(Message):
    payload: str  # canonical JSON of a VersionManifest
    signature: str  # hex


class VersionInfo(Message):
    """One row of the history."""

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
    picture: BlobRef | None = None  # a PNG, where the sample is one
    update_norm: float | None = None
    heading: float | None = None  # cosine of its update to the outer momentum before it
    outer_scale: float = 1.0  # share of the plan's outer rate that the merge used
    mine: int = 0  # contributions of the asking volunteer


def chunks_digest(dataset: DatasetManifest) -> str:
    """Return the hash of a dataset's public part: training chunks, assets, and how to read them.
    The held-out split is not part of it and never leaves the coordinator.
    """

    def said(chunk: ChunkRef) -> list[Any]:
        return [chunk.sha256, chunk.size, chunk.items]

    assets = {name: said(chunk) for name, chunk in dataset.assets.items()}
    return digest(canonical([dataset.kind, [*map(said, dataset.chunks)], assets, dataset.meta]))
