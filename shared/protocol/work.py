"""A task from claim to verdict, and the versions it begins from."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from shared.protocol.base import ContributionState, Message, Reason
from shared.workloads.base import DatasetManifest, Job

# Claim and lease.


class ClaimRequest(Message):
    """Request for a lease.

    `claim_id` is made and stored first: after a lost reply the same id gets the same live lease.
    """

    claim_id: str
    device: str = "cpu"
    step_flops: float = 0.0  # speed of a real training step on this device; 0 = unknown
    memory_bytes: int = 0
    runs: tuple[str, ...] = ()  # empty = any
    kinds: tuple[str, ...] = ()
    codecs: tuple[str, ...] = ("float32", "bf16")
    wait_s: float = 30.0


class Grant(Message):
    """Permission to upload for this lease: codec, size, number of parts."""

    codec: str
    bytes_max: int
    parts: int = 1


class Lease(Message):
    task: int
    attempt: int  # fencing token, only grows
    run: str
    job: Job
    dataset: str  # its manifest: GET /datasets/{name}
    chunks: tuple[int, ...]  # of the manifest that this task touches
    renew_by: float
    finish_by: float
    grant: Grant
    price_micro: int  # what an accepted contribution of this task earns
    now: float
    in_step: bool = False  # begin only after this worker's last contribution is submitted
    part_steps: int = 0  # submit after every so many steps; 0 = once, at the end
    pull_every: int = 0  # look for a newer version after so many steps; 0 = only when work begins
    # Wait for the verdict on each part: one that came too late is computed again.
    redo: bool = False
    # Data of this task alone (games, an opponent), in place of a dataset.
    data: DatasetManifest | None = None


class Idle(Message):
    reason: Reason
    message: str
    retry_after_s: float
    version: int | None = None


class ClaimReply(Message):
    lease: Lease | None = None
    idle: Idle | None = None


class BeginRequest(Message):
    """Work on a lease begins. With `newest`, work that has begun goes on from the newest version.

    With `base` it began from that version before the coordinator could be reached: refused where
    the plan does not let it.
    """

    attempt: int
    newest: bool = False
    known: int | None = None  # the version whose manifest is here: it is not sent again
    base: int | None = None


class BeginReply(Message):
    """Work begins, or goes on: the base version is bound now."""

    version: int
    global_step: int
    finish_by: float
    manifest: SignedManifest | None = None  # None where the version is the one that is known
    part: int = 0  # the next one that is wanted of this lease
    tries: int = 0  # how often that one came too late


class ReleaseRequest(Message):
    attempt: int
    reason: str = ""  # given back: nothing is counted
    failed: bool = False  # the task itself failed: counted against it


# Versions.


class BlobRef(Message):
    sha256: str
    size: int


class Link(Message):
    """Step from older published weights to newer ones: a blob, and the codec it is written in."""

    base: str  # SHA-256 of published weights
    weights: str  # SHA-256 of what comes out
    blob: BlobRef
    codec: str
    rounded: bool  # what comes out is rounded to bfloat16


class Snapshot(Message):
    """Published weights, packed."""

    weights: str  # SHA-256 of what comes out
    blob: BlobRef


class Downlink(Message):
    """Ways to a version's published weights that are shorter than the whole file, if there are any.

    What comes out of links and snapshots has the size of the whole file, which can always be had
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
    expires_at: float  # a frozen head is noticed
    downlink: Downlink = Downlink()


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
    mine: int = 0  # contributions of the volunteer who asks


# Contributions.


class UploadRequest(Message):
    task: int
    attempt: int
    part: int
    tries: int  # recomputations requested by the server
    sha256: str
    size: int


class UploadInfo(Message):
    upload_id: str
    offset: int
    size: int
    complete: bool
    expires_at: float


class SubmitRequest(Message, kw_only=True):
    """Unique on (task, attempt, part, tries).

    What it claims is checked, never believed; pay comes from the task.
    """

    attempt: int
    part: int = 0
    tries: int = 0
    base_version: int
    codec: str
    sha256: str
    size: int
    steps: int
    samples: int
    loss_first: float
    loss_last: float
    device: str = "cpu"
    train_s: float = 0.0
    paused_s: float = 0.0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    games: str = ""  # sha256 of an uploaded games file, for self-play


class Verdict(Message):
    contribution: int
    task: int
    run: str
    state: ContributionState
    reason: str = ""  # code
    message: str = ""  # a sentence
    weight: float | None = None
    version: int | None = None  # merged into
    credits_micro: int = 0  # pending or earned by now
    at: float = 0.0
    # Too late; the lease goes on: compute this part again from the newest version.
    redo: bool = False
