"""Heartbeats: the progress of tasks in the request; orders, runs and verdicts in the reply."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shared.protocol.accounts import Me
from shared.protocol.base import Count, Line, Message, Number, RunState, Standstill
from shared.protocol.contributions import Verdict
from shared.protocol.limits import NEWS_MAX
from shared.workloads.declaration import Measure

TASKS_MAX = 1024  # most tasks in one heartbeat
ANNOUNCEMENTS_MAX = 20  # most announcements in one reply


class TaskBeat(Message):
    task: Number
    attempt: Count
    phase: Literal["queued", "fetch", "train", "encode", "upload", "paused"] = "train"
    step: int = 0
    steps: int = 0
    loss: float | None = None
    rate: float | None = None  # steps a second


class HeartbeatRequest(Message):
    tasks: Annotated[tuple[TaskBeat, ...], Meta(max_length=TASKS_MAX)] = ()
    paused: bool = False
    reason: Line = ""
    celsius: float | None = None  # temperature of the hottest lent device
    news_since: Number = 0  # last `news_until` stored by this client
    ordered_at: float = 0.0  # time of the owner's last order that this machine carried out


class RunBeat(Message):
    """State of a run, a part of each heartbeat reply."""

    run: str
    state: RunState
    version: int
    loss: float | None
    needs: int  # contributions until the next merge
    merge_in_s: float | None  # seconds until the deadline of the next merge
    workers: int
    # Games or other episodes that all machines make in an hour together; None in a run whose data
    # is a dataset.
    episodes_per_hour: float | None = None
    episodes: str = "games"  # name of the episodes
    measure: Measure = "loss"  # what the field `loss` measures
    standstill: Standstill | None = None


class TaskOrder(Message):
    """Order of the coordinator about one task."""

    task: Number
    attempt: Count
    order: Literal["continue", "cancel", "gone"]
    message: str = ""
    renew_by: float = 0.0
    finish_by: float = 0.0


class Announcement(Message):
    """Sentence of the organiser, shown until `until`; None = until the organiser removes it."""

    id: int
    text: str
    run: str = ""  # run that the sentence is about; "" = no particular run
    at: float = 0.0
    until: float | None = None


class OwnOrder(Message):
    """Order of the owner to this machine, sent from another machine; `at` is the server's time."""

    order: Literal["pause", "resume", "finish"]
    at: float


class HeartbeatReply(Message):
    now: float
    next_s: float
    orders: tuple[TaskOrder, ...] = ()
    runs: tuple[RunBeat, ...] = ()
    news: Annotated[tuple[Verdict, ...], Meta(max_length=NEWS_MAX)] = ()
    news_until: Number = 0
    earned_micro: int | None = None
    pending_micro: int | None = None
    me: Me | None = None  # account at the instant of `news`; None without news
    announcements: Annotated[tuple[Announcement, ...], Meta(max_length=ANNOUNCEMENTS_MAX)] = ()
    ordered: OwnOrder | None = None  # the owner's order, if newer than the request's `ordered_at`
