"""Claims and leases: from the request for a task to its begin or its release."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from shared.protocol.base import Count, Line, Message, Number, Reason, Size
from shared.protocol.versions import SignedManifest
from shared.units import DAY_S
from shared.workloads.base import DatasetManifest, Job

WORKLOADS_MAX = 64  # workloads of one worker


class ClaimRequest(Message):
    """Request for a lease. The worker stores `claim_id` first; a repeated id gets the same lease
    while it is live.
    """

    claim_id: str
    device: str = "cpu"
    step_flops: float = 0.0  # speed of a real training step on this device; 0 = unknown
    memory_bytes: int = 0
    host_bytes: int = 0  # memory of the host that a task may use beside the device's own
    runs: tuple[str, ...] = ()  # () = any run
    kinds: tuple[str, ...] = ()
    codecs: tuple[str, ...] = ("float32", "bf16")
    # Version of each workload on this worker; an unnamed workload is not checked.
    workload_versions: Annotated[dict[str, int], Meta(max_length=WORKLOADS_MAX)] = msgspec.field(
        default_factory=dict
    )
    libraries: tuple[str, ...] = ()  # installed libraries that only some runs need
    wait_s: float = 30.0
    audits: bool = False  # this program can do audits


class Grant(Message):
    """Permission to upload for this lease: codec, size, number of parts."""

    codec: str
    bytes_max: Size
    parts: Count = 1


class AuditWork(Message):
    """Terms of an audit, the recompute of another volunteer's task. The result is sums of the
    encoded update; the coordinator compares both volunteers' sums and keeps them secret.
    """

    seed: Number  # seed of the sums (`shared.tensors.sketch`)
    codec: str  # codec of the other volunteer's update


class Lease(Message):
    task: Number
    attempt: Count  # fencing token, which only grows
    run: str
    job: Job
    dataset: str  # name of the dataset: GET /datasets/{name}
    chunks: tuple[int, ...]  # chunks of the dataset that this task reads
    renew_by: float
    finish_by: float
    grant: Grant
    price_micro: int  # credit for an accepted contribution
    now: float
    in_step: bool = False  # True: begin only when this worker's previous contribution is submitted
    part_steps: int = 0  # steps of a part; 0 = one submission at the end
    pull_every: int = 0  # steps between checks for a newer version; 0 = only at the beginning
    # True: wait for the verdict on each part, since a late part is computed again from the newest
    # version.
    redo: bool = False
    counted: str = ""  # unit of the steps of a task that trains nothing: games, problems
    # Data of this task alone (games, an opponent), in place of a dataset.
    data: DatasetManifest | None = None
    audit: AuditWork | None = None
    # True: the samples are positions in this machine's own data; `dataset` names the example, whose
    # assets the task reads.
    member: bool = False


RETRY_S_MAX = DAY_S


class IdleReply(Message):
    reason: Reason
    message: str
    retry_after_s: Annotated[float, Meta(ge=0, le=RETRY_S_MAX)]
    version: int | None = None


class ClaimReply(Message):
    lease: Lease | None = None
    idle: IdleReply | None = None


class BeginRequest(Message):
    """Request to begin work on a lease, or with `newest` to continue it from the newest version."""

    attempt: Count
    newest: bool = False
    known: Count | None = None  # version whose manifest the worker already has


class BeginReply(Message):
    """Confirmation that work begins or continues; the base version is bound now."""

    version: Count
    finish_by: float
    manifest: SignedManifest | None = None  # None if the worker has the manifest
    part: Count = 0  # next wanted part of this lease
    tries: Count = 0  # number of times that this part came too late


class ReleaseRequest(Message):
    attempt: Count
    reason: Line = ""  # reason of the release, for people
    failed: bool = False  # the task itself failed: only this counts against it
