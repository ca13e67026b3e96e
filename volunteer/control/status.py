"""State of a volunteer as one frozen snapshot, folded from its events for any client."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from shared.protocol.accounts import Benchmark, Device, Me, RunInfo
from shared.protocol.base import Cause, Standstill
from shared.protocol.contributions import Verdict
from shared.protocol.heartbeat import Announcement, RunBeat
from shared.sentences import Words
from volunteer.control import events
from volunteer.control.events import AnyEvent
from volunteer.control.model_step import ModelStep, newest
from volunteer.control.shortage import Shortage, with_shortage

VERDICTS_MAX = 50
NOTICES_MAX = 50
WORK_MAX = 100
GAMES = ("selfplay", "evaluate")  # kinds of tasks whose steps are games


Phase: TypeAlias = Literal["claimed", "fetch", "train", "upload", "checking"]


_STATES = ("received", "checking", "accepted", "merged", "superseded", "rejected")


def is_news(verdict: Verdict, previous: Verdict | None) -> bool:
    """Return True if a verdict is newer than the known one of the same contribution.

    The coordinator repeats recent verdicts, so an "accepted" may arrive again after the "merged"
    that followed it.
    """
    if previous is None:
        return True
    return (verdict.at, _STATES.index(verdict.state)) > (previous.at, _STATES.index(previous.state))


class TaskStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Running task of this machine."""

    task: int
    run: str
    workload: str
    device: str
    phase: Phase
    steps: int
    samples: int
    price_micro: int
    finish_by: float
    what: str = ""  # file being fetched
    done_bytes: int = 0
    total_bytes: int = 0
    step: int = 0
    loss: float | None = None
    steps_per_s: float = 0.0
    tokens_per_s: float = 0.0
    eta_s: float | None = None
    version: int = 0
    items: str = "tokens"  # unit that `tokens_per_s` counts
    counted: str = ""  # unit of steps and samples where nothing is learnt: "games"
    kind: str = ""  # train, selfplay, learn, evaluate, audit


class WorkDone(msgspec.Struct, frozen=True, kw_only=True):
    """Finished task, with the figures that forecasts need."""

    task: int = 0
    run: str
    device: str
    steps: int
    price_micro: int
    train_s: float
    seconds: float  # since the end of the previous task on this device, waits included
    at: float
    kind: str = ""  # train, selfplay, learn, evaluate, audit
    priced: bool = True  # False: games whose pay is not known yet


class PauseStatus(msgspec.Struct, frozen=True, kw_only=True):
    device: str  # "" = all devices
    by: str
    message: Words
    until: Words


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Complete state for the first frame of a screen."""

    at: float = 0.0
    since: float = 0.0
    profile: str = ""
    pid: int = 0
    coordinator: str = ""
    server: str = ""
    nickname: str = ""
    fingerprint: str = ""
    volunteer_id: str = ""
    worker_id: str = ""
    joined: bool = False  # whether an account exists
    online: bool = False
    away_since: float | None = None  # start of the coordinator's outage
    connection: Words = ""
    retry_at: float | None = None
    queued: int = 0
    finishing: bool = False
    stopped: bool = False
    idle: str = ""  # reason code while no task runs
    idle_message: Words = ""
    idle_until: float | None = None
    pauses: tuple[PauseStatus, ...] = ()
    devices: tuple[Device, ...] = ()
    lent_bytes: dict[str, int] = {}  # memory that a task may use, by device; 0 = unknown
    host_bytes: int = 0  # memory of the host that a task may use beside a device's own
    problems: dict[str, Words] = {}  # problems of unusable devices, by device
    benchmarks: tuple[Benchmark, ...] = ()
    steps: tuple[ModelStep, ...] = ()  # measured steps of the runs' own models
    shortages: tuple[Shortage, ...] = ()  # memory shortages of runs
    own_samples: dict[str, int] = {}  # samples of own data, by run over members' data
    tasks: tuple[TaskStatus, ...] = ()
    runs: tuple[RunInfo, ...] = ()
    beats: tuple[RunBeat, ...] = ()
    me: Me | None = None
    verdicts: tuple[Verdict, ...] = ()  # newest last
    notices: tuple[events.Notice, ...] = ()
    announcements: tuple[Announcement, ...] = ()  # unread announcements of the organiser
    work: tuple[WorkDone, ...] = ()  # newest last
    broken_at: float = 0.0  # last start or end of a pause; the time of a task counts from there
    done: int = 0  # tasks submitted since the start
    sent_bytes: int = 0
    received_bytes: int = 0
    up_bytes_per_s: float = 0.0  # rate of the last large upload
    down_bytes_per_s: float = 0.0

    def problem(self, device: Device) -> str:
        """Return why a device cannot be used."""
        return self.problems.get(device.id, device.problem)

    def paused(self, device: str = "") -> PauseStatus | None:
        """Return the pause of a device; None if it is not paused.

        Without a name: return a pause if all devices are paused, together or one by one.
        """
        for pause in self.pauses:
            if pause.device in ("", device):
                return pause
        pauses = [] if device else [self.paused(one) for one in self.lent_bytes]
        return pauses[0] if pauses and all(pauses) else None


def lasting_standstill(
    standstill: Standstill | None, run: str, status: Status
) -> Standstill | None:
    """Return a run's standstill. Return None if no machine, or no machine with data, worked for the
    run, and this machine does: it is not paused, and has data.
    """
    if standstill is None or any(not pause.device for pause in status.pauses):
        return standstill
    ended = standstill.cause == Cause.NOBODY or (
        standstill.cause == Cause.NO_DATA and run in status.own_samples
    )
    return None if ended else standstill


def fold(status: Status, event: AnyEvent) -> Status:
    """Return the status after an event."""
    status = replace(status, at=max(status.at, event.at))  # historical events arrive late
    for part in (_fold_program, _fold_coordinator, _fold_machine, _fold_task):
        status = part(status, event)
    return status


def _fold_program(status: Status, event: AnyEvent) -> Status:
    """Return the status after an event about the program or its connection."""
    match event:
        case events.Started():
            fields = _common_fields(event, Status)
            return replace(status, since=event.at, joined=True, stopped=False, **fields)
        case events.Connection():
            return replace(
                status,
                online=event.online,
                away_since=None if event.online else status.away_since or event.at,
                connection=event.message,
                retry_at=event.retry_at,
                queued=event.queued,
            )
        case events.Idle():
            return replace(
                status, idle=event.reason, idle_message=event.message, idle_until=event.until
            )
        case events.Finishing():
            return replace(status, finishing=True)
        case events.Traffic():
            return replace(
                status,
                sent_bytes=event.sent_bytes,
                received_bytes=event.received_bytes,
                up_bytes_per_s=event.up_bytes_per_s or status.up_bytes_per_s,
                down_bytes_per_s=event.down_bytes_per_s or status.down_bytes_per_s,
            )
        case events.Notice():
            return replace(status, notices=(*status.notices, event)[-NOTICES_MAX:])
        case events.Stopped():
            return replace(status, stopped=True, online=False, tasks=())
        case _:
            return status


def _fold_coordinator(status: Status, event: AnyEvent) -> Status:
    """Return the status after an event from the coordinator: account, runs, verdicts."""
    match event:
        case events.Credits():
            for verdict in event.verdicts:
                status = _apply_verdict(status, verdict)
            return replace(status, me=_later_account(status.me, event.me))
        case events.Announced():
            return replace(status, announcements=event.announcements)
        case events.RunsListed():
            beats = tuple(_update_beat(beat, event.runs) for beat in status.beats)
            return replace(status, runs=event.runs, beats=beats)
        case events.RunProgress(beat=new_beat):
            beats = tuple(b for b in status.beats if b.run != new_beat.run)
            return replace(status, beats=(*beats, new_beat))
        case events.Judged(verdict=verdict):
            return _apply_verdict(status, verdict)
        case _:
            return status


def _fold_machine(status: Status, event: AnyEvent) -> Status:
    """Return the status after an event about devices: found, measured, paused."""
    match event:
        case events.DevicesFound():
            return replace(status, **_common_fields(event, Status))
        case events.Benchmarked(benchmark=new):
            rest = tuple(b for b in status.benchmarks if b.device != new.device)
            return replace(status, benchmarks=(*rest, new))
        case events.StepMeasured(step=step):
            return replace(status, steps=newest((*status.steps, step), event.at))
        case events.ShortOfMemory(shortage=short):
            return replace(status, shortages=with_shortage(status.shortages, short))
        case events.OwnDataCounted(samples=samples):
            return replace(status, own_samples=samples)
        case events.Paused() | events.Resumed():
            return _pauses(status, event)
        case _:
            return status


def _fold_task(status: Status, event: AnyEvent) -> Status:
    """Return the status after an event of a task, from claim to end."""
    match event:
        case events.Claimed():
            return _add_task(status, event)
        case events.Fetching(task=task):
            return _change(status, task, phase="fetch", **_common_fields(event, TaskStatus))
        case events.Training(task=task):
            fields = _common_fields(event, TaskStatus)
            del fields["steps"], fields["samples"]  # the totals of the claim stay
            return _change(status, task, phase="train", **fields)
        case events.Uploading(task=task):
            return _change(status, task, phase="upload", **_common_fields(event, TaskStatus))
        case events.Trained(task=task):
            done = {"step": event.steps, "loss": event.loss_last}
            return _change(_add_work(status, event), task, phase="upload", **done)
        case events.Submitted(task=task):
            queued = max(0, status.queued - 1)
            checking = _change(status, task, phase="checking")
            return replace(checking, done=status.done + event.last, queued=queued)
        case events.TaskEnded(task=task):
            return _remove_task(status, task)
        case _:
            return status


def _update_beat(beat: RunBeat, runs: tuple[RunInfo, ...]) -> RunBeat:
    """Return a run's state, updated from a newer list: heartbeats report open runs only."""
    for run in runs:
        if run.name == beat.run and run.version > beat.version:
            return replace(beat, version=run.version, loss=run.loss, state=run.state)
    return beat


def _later_account(previous: Me | None, current: Me) -> Me:
    """Return the later of two states of an account: replies may arrive out of order."""
    if previous is None or previous.volunteer_id != current.volunteer_id:
        return current
    return max(current, previous, key=_asked_at)


def _add_work(status: Status, event: events.Trained) -> Status:
    task = next((task for task in status.tasks if task.task == event.task), None)
    if task is None:
        return status
    before = next((w for w in reversed(status.work) if w.device == task.device), None)
    whole = before is not None and before.at >= status.broken_at
    since_s = event.at - before.at if before is not None and whole else 0.0
    work = WorkDone(
        task=event.task,
        run=event.run,
        device=task.device,
        steps=event.steps,
        price_micro=task.price_micro,
        train_s=event.train_s,
        at=event.at,
        seconds=max(event.train_s, since_s),
        priced=task.kind not in GAMES,
        kind=task.kind,
    )
    return replace(status, work=(*status.work, work)[-WORK_MAX:])


def _asked_at(me: Me) -> float:
    return me.at


def _apply_verdict(status: Status, verdict: Verdict) -> Status:
    previous = next((v for v in status.verdicts if v.contribution == verdict.contribution), None)
    if previous is not None and is_news(previous, verdict):
        return status  # a credits event brought a newer verdict
    older = tuple(v for v in status.verdicts if v.contribution != verdict.contribution)
    judged = replace(
        status,
        verdicts=(*older, verdict)[-VERDICTS_MAX:],
        work=tuple(_with_pay(done, verdict) for done in status.work),
    )
    final = verdict.state not in ("received", "checking")
    return _remove_task(judged, verdict.task) if final else judged


def _with_pay(done: WorkDone, verdict: Verdict) -> WorkDone:
    """Return finished work with the pay of its verdict: pay for games is unknown at the claim."""
    played = done.kind in GAMES and verdict.state in ("accepted", "merged")
    if not played or done.task != verdict.task or not verdict.credits_micro:
        return done
    return replace(done, price_micro=verdict.credits_micro, priced=True)


def _pauses(status: Status, event: events.Paused | events.Resumed) -> Status:
    status = replace(status, broken_at=event.at)
    if isinstance(event, events.Resumed) and event.by_time:
        over = (event.device, event.by)
        return replace(status, pauses=tuple(p for p in status.pauses if (p.device, p.by) != over))
    if isinstance(event, events.Resumed):
        pauses = tuple(
            p
            for p in status.pauses
            if event.device not in ("", p.device) or event.by not in ("", p.by)
        )
        finishing = status.finishing and event.by not in ("", "you")
        return replace(status, pauses=pauses, finishing=finishing)
    pause = PauseStatus(**_common_fields(event, PauseStatus))
    rest = tuple(p for p in status.pauses if (p.device, p.by) != (pause.device, pause.by))
    return replace(status, pauses=(*rest, pause))


def _add_task(status: Status, event: events.Claimed) -> Status:
    task = TaskStatus(phase="claimed", **_common_fields(event, TaskStatus))
    rest = _remove_task(status, event.task).tasks
    return replace(status, tasks=(*rest, task), idle="", idle_message="", idle_until=None)


def _common_fields(event: AnyEvent, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields of an event that a state has under the same names."""
    names = set(event.__struct_fields__) & set(kind.__struct_fields__) - {"at"}
    return {name: getattr(event, name) for name in names}


def _change(status: Status, task: int, /, **changes: object) -> Status:
    tasks = tuple(replace(t, **changes) if t.task == task else t for t in status.tasks)
    return replace(status, tasks=tasks)


def _remove_task(status: Status, task: int) -> Status:
    return replace(status, tasks=tuple(t for t in status.tasks if t.task != task))
