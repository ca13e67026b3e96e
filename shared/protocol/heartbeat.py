"""Heartbeats, and the rows of read-only listings."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from shared.protocol.base import Message, RunState
from shared.protocol.work import Verdict
from shared.workloads.base import DatasetManifest

# Heartbeat.


class TaskBeat(Message):
    task: int
    attempt: int
    phase: Literal["queued", "fetch", "train", "encode", "upload", "paused"] = "train"
    step: int = 0
    steps: int = 0
    loss: float | None = None
    rate: float | None = None  # steps a second


class HeartbeatRequest(Message):
    tasks: tuple[TaskBeat, ...] = ()
    paused: bool = False
    reason: str = ""
    news_since: int = 0  # the last `news` this client has stored


class RunBeat(Message):
    """State of a run as each heartbeat reply has it."""

    run: str
    state: RunState
    version: int
    loss: float | None
    needs: int  # contributions until the next merge
    merge_in_s: float | None  # or this deadline
    workers: int


class TaskOrder(Message):
    """An order of the coordinator about one task."""

    task: int
    attempt: int
    order: Literal["continue", "pause", "cancel", "gone"]
    message: str = ""
    renew_by: float = 0.0
    finish_by: float = 0.0


class HeartbeatReply(Message):
    now: float
    next_s: float
    orders: tuple[TaskOrder, ...] = ()
    runs: tuple[RunBeat, ...] = ()
    news: tuple[Verdict, ...] = ()
    news_until: int = 0
    earned_micro: int | None = None
    pending_micro: int | None = None
    notice: str = ""


# Reading.


class LeaderRow(Message):
    rank: int
    nickname: str
    earned_micro: int
    accepted: int
    device_s: float
    workers: int
    me: bool = False


class LossPoint(Message):
    version: int
    loss: float
    at: float


class Summary(Message):
    run: str
    version: int
    workers: int
    accepted: int
    rejected: int
    tokens: int
    tokens_per_s: float
    bytes_in: int
    bytes_out: int
    loss_first: float | None
    loss_last: float | None


class LedgerRow(Message):
    """One line of a volunteer's history."""

    id: int
    at: float
    run: str
    kind: str  # "pending", "earned", "reversed", "spent"
    amount_micro: int
    contribution: int | None
    memo: str


class Page(Message):
    """A slice of a listing; `cursor` continues it."""

    rows: tuple[dict[str, Any], ...]
    cursor: str = ""


def dataset_view(manifest: DatasetManifest) -> DatasetManifest:
    """A manifest as volunteers may see it: without its held-out split."""
    return msgspec.structs.replace(manifest, heldout=())
