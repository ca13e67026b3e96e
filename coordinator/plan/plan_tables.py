"""Table `[plan]` of a run file: its keys with their types, bounds and defaults."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
CountOrOff = Annotated[int, Meta(ge=0, le=1 << 53)]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
NotNegative = Annotated[float, Meta(ge=0, le=1e9)]
Decay = Annotated[float, Meta(ge=0, lt=1)]


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[plan]` table of a run file with every default written out; `plan.plan` makes and checks
    it.
    """

    preset: str = "fedavg"
    update: Literal["delta", "gradient"] = "delta"
    # mini-batches in one gradient; 0 = all of a task
    gradient_every: CountOrOff = 0
    # mini-batches between two checks for a newer version; 0 = a check only when a task begins
    pull_every: CountOrOff = 0
    codec: Literal["float32", "bf16", "int8", "int4"] = "int8"
    # Form in which volunteers get a version: "float32" is the exact weights, "chain" a chain of
    # quantised differences with a bfloat16 snapshot of every `snapshot_every`-th version. The
    # server keeps the exact weights in both cases.
    downlink: Literal["float32", "chain"] = "float32"
    snapshot_every: Count = 1  # versions
    # Largest share of a round for transfers, by which the server chooses the steps of a task; 0 =
    # tasks keep their least steps.
    transfer_share: Share = 0.05
    prox_mu: NotNegative = 0.0  # FedProx: pull towards the base

    # A merge comes at the quorum, the deadline or the work target, whichever is first. The quorum
    # is at most the number of live workers, so two laptops never wait for a third.
    quorum: Annotated[int, Meta(ge=1, le=10_000)] = 3
    quorum_share: Share = 0.0  # least quorum as a share of the live workers
    # A merge that has its quorum waits for the other live workers until no contribution has come
    # for this share of the longest training of the round. One of four equal machines would
    # otherwise always miss a quorum of three.
    grace: Share = 0.1
    deadline_seconds: NotNegative = 300.0  # time since the oldest waiting contribution; 0 = off
    # fewest contributions at the deadline and at the work target
    min_contributions: Annotated[int, Meta(ge=1, le=10_000)] = 1
    work_target: CountOrOff = 0  # merge at this many steps (deltas) or samples (gradients); 0 = off
    # what happens to leases at a merge
    in_flight: Literal["continue", "cancel", "redo"] = "continue"
    # True: a worker may begin its next task before its last contribution is merged. No device then
    # waits, and all work is one version late. False: every task begins from a model that contains
    # the worker's last work.
    overlap: bool = False

    # Weight of a late contribution. Staleness is counted in versions.
    max_staleness: Annotated[int, Meta(ge=0, le=100_000)] = 10
    table: Literal["linear", "s4", "polynomial", "constant", "inverse"] = "linear"
    damping: bool = False  # staleness shortens the step too, not only the share in the mean
    # Scale of the step of a merge of n of K live workers: n / K, (n / K)^1/2, or 1. If eight
    # workers that began at one version merge as three, three and two, three steps of scale 1 move
    # the model nearly three times as far as one merge of all eight.
    arrival_scale: Literal["share", "sqrt", "one"] = "share"

    # How contributions become one update.
    aggregate: Literal[
        "mean", "trimmed-mean", "median", "krum", "multi-krum", "centred-clip", "norm-clip"
    ] = "mean"
    # Least number of contributions for this rule; fewer than that are merged by the mean.
    aggregate_from: Count = 1
    trim: Annotated[float, Meta(ge=0, lt=0.5)] = 0.2  # share cut off at each end
    byzantine: Annotated[float, Meta(ge=0, lt=0.5)] = 0.2  # share that may be hostile
    # clipping radius as a multiple of the median norm; 0 = 1.0, but 1.5 for norm-clip
    clip_factor: NotNegative = 0.0

    # How the update changes the weights; with "adamw" a merged gradient is a step of `[train]`.
    optimizer: Literal["sgd", "nesterov", "delayed-nesterov", "adam", "yogi", "adamw"] = "sgd"
    lr: Positive = 1.0
    momentum: Decay = 0.0
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    bias_correction: bool = False
    # contributions of a window of delayed-nesterov; 0 = the number of live workers
    window: Annotated[int, Meta(ge=0, le=10_000)] = 0

    shards: Annotated[int, Meta(ge=1, le=1024)] = 1
    shard_by: Literal["size", "name"] = "size"
