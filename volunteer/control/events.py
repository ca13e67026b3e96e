"""Events of a volunteer as frozen structs: the agent emits them, the TUI and `--no-ui` show them.

Every event has its time (`at`, UTC epoch seconds of this machine). Money is in micro-credits, sizes
in bytes, times in seconds.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, TypeAlias, dataclass_transform

import msgspec

from shared.protocol.accounts import Benchmark, Device, Me, RunInfo
from shared.protocol.contributions import Verdict
from shared.protocol.heartbeat import Announcement, RunBeat
from shared.sentences import Words
from shared.workloads.declaration import Measure
from volunteer.control.model_step import ModelStep
from volunteer.control.shortage import Shortage


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all events; the tag (`type`) is the class name."""

    at: float = 0.0


class Started(Event):
    coordinator: str
    server: str
    nickname: str
    fingerprint: str
    volunteer_id: str
    worker_id: str = ""


class Connection(Event):
    """State of the connection and time of the next retry; every retry of any loop emits one."""

    online: bool
    message: Words = ""
    retry_at: float | None = None
    queued: int = 0  # results waiting in the outbox
    since: float | None = None  # when the outage began; None in the first event of an outage
    repeated: bool = False  # the outage and its cause are known


class DevicesFound(Event):
    """Devices of this machine and their problems. `lent_bytes` are the bytes that a task may use on
    each device (0: unknown), `host_bytes` the bytes of host memory that it may use in addition,
    `torch` the version of torch that found the devices.
    """

    devices: tuple[Device, ...]
    torch: str = ""
    lent_bytes: dict[str, int] = {}
    host_bytes: int = 0
    problems: dict[str, Words] = {}


def devices_found(
    devices: tuple[Device, ...], lent: dict[str, int], host_bytes: int, torch: str = ""
) -> DevicesFound:
    """Return the event of found devices. Texts in its `problems` can be translated, texts in its
    `devices` are plain English.
    """
    plain = tuple(
        msgspec.structs.replace(device, problem=str(device.problem)) for device in devices
    )
    problems = {device.id: device.problem for device in devices if device.problem}
    return DevicesFound(
        devices=plain, lent_bytes=lent, host_bytes=host_bytes, problems=problems, torch=torch
    )


class Benchmarked(Event):
    benchmark: Benchmark


class StepMeasured(Event):
    """Measured step of a run's real model on this machine."""

    step: ModelStep
    known: bool = False  # measured at an earlier start


class ShortOfMemory(Event):
    """Run whose task did not fit a device's memory; its tasks are not claimed there for now."""

    shortage: Shortage
    known: bool = False  # found at an earlier start


class OwnDataCounted(Event):
    """Data that this machine keeps for runs over members' data."""

    samples: dict[str, int]  # samples of a pass, by run


class BenchmarkProgress(Event):
    stage: str
    done: float  # 0..1
    device: str = ""


class Registering(Event):
    """Progress of a registration's proof of work: the probability of success so far; 1 = found."""

    done: float


class RunsListed(Event):
    runs: tuple[RunInfo, ...]


class Idle(Event):
    """Lack of work, with a readable reason."""

    reason: str
    message: Words
    until: float | None = None
    repeated: bool = False  # only the time of the next try has changed


AUDIT = "audit"  # kind of a task that recomputes another volunteer's


class Claimed(Event):
    task: int
    attempt: int
    run: str
    workload: str
    device: str
    steps: int
    samples: int
    price_micro: int
    finish_by: float
    kind: str = ""  # of the task: train, selfplay, learn, evaluate, audit
    counted: str = ""  # unit of the steps where nothing is learnt: "games"


class Fetching(Event):
    task: int
    what: str  # "weights" or "data"
    done_bytes: int
    total_bytes: int


class Training(Event):
    """Progress of training; sent at most a few times a second."""

    task: int
    run: str
    device: str
    step: int
    steps: int
    samples: int
    loss: float | None
    steps_per_s: float
    tokens_per_s: float
    eta_s: float | None
    version: int
    preview: str = ""
    metrics: dict[str, float] = {}
    items: str = "tokens"  # unit that `tokens_per_s` counts
    counted: str = ""  # unit of steps and samples where nothing is learnt: "games"


class Halved(Event):
    """Micro-batch halved after out-of-memory; batch, samples and price are unchanged."""

    task: int
    device: str
    micro_batch: int


class Trained(Event):
    task: int
    run: str
    steps: int
    samples: int
    loss_first: float | None  # None for work without a loss, such as self-play
    loss_last: float | None
    train_s: float


class Uploading(Event):
    task: int
    done_bytes: int
    total_bytes: int


class Submitted(Event):
    task: int
    contribution: int
    bytes: int
    last: bool = True  # no part of the task remains


class Judged(Event):
    """Verdict of the coordinator: accepted, merged, rejected with its reason."""

    verdict: Verdict


class TaskEnded(Event):
    """End of a task on this machine without a contribution."""

    task: int
    how: str  # "released", "cancelled", "gone", "failed", "saved", "refused"
    message: Words


class RunProgress(Event):
    """New version, or progress to the next merge."""

    beat: RunBeat
    message: Words  # "next version after 2 more contributions or 3:12"


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """A small picture: `pixels` are red, green and blue, row by row from the top."""

    width: int
    height: int
    pixels: bytes


class LossMeasured(Event):
    run: str
    version: int
    loss: float
    mine: int
    measure: Measure = "loss"  # meaning of the loss
    sample: str = ""
    picture: Picture | None = None  # part of the image sample; only some versions have one


class Credits(Event):
    """Account, and its newly counted verdicts."""

    me: Me
    verdicts: tuple[Verdict, ...] = ()


class Paused(Event):
    """Pause of a device; an empty `device` means all. `by` is "you" or a rule of the policy;
    `until` says when it ends.
    """

    device: str
    by: str
    message: Words
    until: Words = ""


class Resumed(Event):
    """Removal of one reason for a pause, or of all reasons if `by` is empty; the message names the
    remaining reasons.
    """

    device: str
    by: str = ""
    message: Words = ""
    by_time: bool = False  # only this pause ended, by its time; the others stay


class Finishing(Event):
    message: Words


class Traffic(Event):
    """Bytes since the start, and the rate of the last large files; 0 = not known yet."""

    sent_bytes: int
    received_bytes: int
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0


class Sensed(Event):
    """Sensor readings of a device, None for a missing sensor; power is the whole device's."""

    device: str
    utilisation: float | None = None  # 0..1
    memory_bytes: int | None = None  # in use
    celsius: float | None = None
    watts: float | None = None


class Notice(Event):
    """Remark for the log; level is "info", "warning" or "error"."""

    level: str
    message: Words


class Announced(Event):
    """All unread announcements of the organiser."""

    announcements: tuple[Announcement, ...]


class Stopped(Event):
    code: int
    message: Words
    tasks: int = 0
    credits_micro: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0


if TYPE_CHECKING:
    AnyEvent: TypeAlias = Event
else:  # all events above, for the decoder, which tells them apart by their tag
    AnyEvent = reduce(or_, Event.__subclasses__())
