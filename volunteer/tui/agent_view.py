"""View model of the screens: the volunteer's `Status`, and the curves, samples and log lines that
`reduce` builds up from its events.

`reduce` is pure: the same events make the same view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import msgspec

from shared.protocol.accounts import RunInfo
from shared.protocol.contributions import Verdict
from shared.protocol.heartbeat import RunBeat
from shared.protocol.listings import LossPoint
from shared.protocol.versions import VersionInfo
from volunteer.control import events
from volunteer.control.events import AnyEvent
from volunteer.control.status import Status, TaskStatus

POINTS_MAX = 2000  # points of one curve; a longer curve is thinned, extremes kept
CURVES_MAX = 8
RUNS_MAX = 64
ENTRIES_MAX = 1000  # events of the log
SPEEDS_MAX = 120

Point: TypeAlias = tuple[float, float]
replace = msgspec.structs.replace

Content = TypeVar("Content")


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Loss of one task on this machine, by local step."""

    task: int
    run: str
    device: str
    steps: int
    points: tuple[Point, ...] = ()
    second: tuple[Point, ...] = ()  # another loss of the same work, e.g. the discriminator's
    preview: str = ""  # newest preview of the work
    metrics: dict[str, float] = {}  # newest metrics of the work


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """Loss of a run's global model by version, and the versions with this volunteer's work."""

    run: str
    points: tuple[Point, ...] = ()
    mine: frozenset[int] = frozenset()
    first_sample: tuple[int, str] | None = None  # version, text
    last_sample: tuple[int, str] | None = None
    first_picture: tuple[int, events.Picture] | None = None
    last_picture: tuple[int, events.Picture] | None = None


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Event of the log with its number."""

    id: int
    event: AnyEvent


class AgentView(msgspec.Struct, frozen=True, kw_only=True):
    """Content of all screens: the status, and the data that `reduce` builds up from events."""

    status: Status = Status()
    curves: tuple[Curve, ...] = ()  # newest task last
    models: dict[str, ModelView] = {}
    beats_at: dict[str, float] = {}  # when each run's last countdown arrived
    entries: tuple[LogEntry, ...] = ()  # oldest first
    benchmark: events.BenchmarkProgress | None = None  # running benchmark
    registering: float | None = None  # running proof of work, 0..1
    sensors: dict[str, events.Sensed] = {}  # by device
    speeds: dict[str, tuple[float, ...]] = {}  # steps a second by device, oldest first
    ended: events.Stopped | None = None

    def task(self, device: str = "") -> TaskStatus | None:
        """Return the most advanced task of a device, or of all devices for "": training first, then
        uploading; None without a task.
        """
        tasks = [t for t in self.status.tasks if device in ("", t.device)]
        return min(tasks, key=lambda t: (_ORDER[t.phase], t.task), default=None)

    def curve(self, task: int | None) -> Curve | None:
        """Return the curve of a task, or the newest curve for None; None if there is no such
        curve.
        """
        for curve in reversed(self.curves):
            if task is None or curve.task == task:
                return curve
        return None

    def run(self) -> str:
        """Return the run of this machine's present task, else of its last task, else of the newest
        verdict, else the first listed run; "" if there is no run.
        """
        task = self.task()
        if task is not None:
            return task.run
        if self.curves:
            return self.curves[-1].run
        if self.status.verdicts:  # from before a restart
            return self.status.verdicts[-1].run
        return self.status.runs[0].name if self.status.runs else ""

    def info(self, run: str) -> RunInfo | None:
        return next((info for info in self.status.runs if info.name == run), None)

    def beat(self, run: str) -> RunBeat | None:
        return next((beat for beat in self.status.beats if beat.run == run), None)

    def devices(self) -> tuple[str, ...]:
        """Return the devices that have a task, in the order of their tasks."""
        return tuple(dict.fromkeys(task.device for task in self.status.tasks))


_ORDER = {"train": 0, "upload": 1, "fetch": 2, "claimed": 3, "checking": 4}
# Frequent events that are not logged.
_UNLOGGED = (
    events.Training,
    events.Fetching,
    events.Uploading,
    events.BenchmarkProgress,
    events.Registering,
    events.Sensed,
    events.Traffic,
    events.Credits,
    events.RunsListed,
    events.RunProgress,
)


def initial_view(status: Status) -> AgentView:
    """Return the view of a client that attaches now, built from the snapshot alone."""
    models = {
        info.name: ModelView(run=info.name, points=_end_points(info))
        for info in status.runs[:RUNS_MAX]
    }
    view = AgentView(status=status, models=models)
    for beat in status.beats:
        view = replace(view, beats_at={**view.beats_at, beat.run: status.at})
    past: list[events.Judged | events.Notice] = [
        *(events.Judged(at=v.at, verdict=v) for v in status.verdicts),
        *status.notices,
    ]
    for event in sorted(past, key=lambda e: e.at):
        view = _log(_apply(view, event), event)
    return view


def reduce(view: AgentView, event: AnyEvent, status: Status) -> AgentView:
    """Return the view after an event; `status` already includes the event."""
    after = _apply(replace(view, status=status), event)
    again = isinstance(event, events.Connection | events.Idle) and event.repeated
    return after if again or isinstance(event, _UNLOGGED) else _log(after, event)


def add_past_loss(view: AgentView, event: events.LossMeasured) -> AgentView:
    """Return the view with a loss measured before the program started; it is not logged."""
    return _apply(view, event)


def add_past_losses(view: AgentView, run: str, losses: Sequence[LossPoint]) -> AgentView:
    """Return the view with losses of a run that were measured before the program started."""
    model = _model(view, run)
    past_losses = {float(point.version): point.loss for point in losses}
    points = tuple(sorted((past_losses | dict(model.points)).items()))
    while len(points) > POINTS_MAX:
        points = thin(points)
    return _with_model(view, replace(model, points=points))


def _log(view: AgentView, event: AnyEvent) -> AgentView:
    last = view.entries[-1].id if view.entries else 0
    return replace(view, entries=(*view.entries, LogEntry(id=last + 1, event=event))[-ENTRIES_MAX:])


def _apply(view: AgentView, event: AnyEvent) -> AgentView:
    match event:
        case events.Training():
            return _add_training(view, event)
        case events.LossMeasured():
            return _add_loss(view, event)
        case events.Judged():
            return _add_verdict(view, event.verdict)
        case events.Credits():
            for verdict in event.verdicts:
                view = _add_verdict(view, verdict)
            return view
        case events.RunsListed():
            return _add_runs(view, event)
        case events.RunProgress(beat=beat):
            return replace(
                view,
                beats_at={**view.beats_at, beat.run: event.at},
            )
        case events.Sensed():
            return replace(view, sensors={**view.sensors, event.device: event})
        case events.BenchmarkProgress():
            return replace(view, benchmark=event if event.done < 1 else None)
        case events.Registering(done=done):
            return replace(view, registering=done if done < 1 else None)
        case events.Benchmarked():
            return replace(view, benchmark=None)
        case events.Started():
            return replace(view, ended=None)
        case events.Stopped():
            return replace(view, ended=event)
        case _:
            return view


# --------------------------------------------------------------------------------------- curves


def _add_training(view: AgentView, event: events.Training) -> AgentView:
    """Return the view with a training step: its loss on the task's curve, and its speed."""
    if event.steps_per_s > 0:  # a task has no rate before its first step
        speeds = (*view.speeds.get(event.device, ()), event.steps_per_s)[-SPEEDS_MAX:]
        view = replace(view, speeds={**view.speeds, event.device: speeds})
    old = next((curve for curve in view.curves if curve.task == event.task), None)
    curve = old or Curve(task=event.task, run=event.run, device=event.device, steps=event.steps)
    first, second = _losses(event)
    step = float(event.step)
    curve = replace(
        curve,
        points=curve.points if first is None else append_point(curve.points, (step, first)),
        second=curve.second if second is None else append_point(curve.second, (step, second)),
        preview=event.preview or curve.preview,  # only some events have a preview
        metrics=event.metrics or curve.metrics,
    )
    if old is None:
        return replace(view, curves=(*view.curves, curve)[-CURVES_MAX:])
    return replace(view, curves=tuple(curve if c is old else c for c in view.curves))


def _losses(event: events.Training) -> tuple[float | None, float | None]:
    """Return a generator's and its critic's losses; for other training the loss, and None."""
    generator, critic = event.metrics.get("loss_g"), event.metrics.get("loss_d")
    if generator is not None and critic is not None:
        return generator, critic
    return event.loss, None


def append_point(points: tuple[Point, ...], point: Point) -> tuple[Point, ...]:
    """Return a curve that ends with `point`, without earlier points at or after its step (a task
    that began again); thinned if too long.
    """
    if points and point[0] <= points[-1][0]:
        points = tuple(p for p in points if p[0] < point[0])
    points = (*points, point)
    return points if len(points) <= POINTS_MAX else thin(points)


def thin(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Return about half of the points: the lowest and highest of every four points, and the last
    point.
    """
    thinned: list[Point] = []
    for start in range(0, len(points) - 1, 4):
        group = points[start : min(start + 4, len(points) - 1)]
        finite = [p for p in group if abs(p[1]) < float("inf")]  # false for NaN too
        if finite:
            ends = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])}
            thinned += sorted(ends)
    return (*thinned, points[-1])


def _end_points(info: RunInfo) -> tuple[Point, ...]:
    """Return a run's first and newest loss from a listing, as points of its curve."""
    ends: list[Point] = []
    if info.loss_first is not None:
        ends.append((0.0, info.loss_first))
    if info.loss is not None and info.version > 0:
        ends.append((float(info.version), info.loss))
    return tuple(ends)


def _model(view: AgentView, run: str) -> ModelView:
    return view.models.get(run) or ModelView(run=run)


def _with_model(view: AgentView, model: ModelView) -> AgentView:
    models = {**view.models, model.run: model}
    while len(models) > RUNS_MAX:
        models.pop(next(iter(models)))
    return replace(view, models=models)


def _add_loss(view: AgentView, event: events.LossMeasured) -> AgentView:
    """Return the view with an evaluated version: its loss, sample and picture."""
    model = _model(view, event.run)
    points = insert_point(model.points, (float(event.version), event.loss))
    changes: dict[str, object] = {"points": points}
    if event.sample:
        ends = _outer(model.first_sample, model.last_sample, (event.version, event.sample))
        changes |= zip(("first_sample", "last_sample"), ends, strict=True)
    if event.picture is not None:
        outermost = _outer(model.first_picture, model.last_picture, (event.version, event.picture))
        changes |= zip(("first_picture", "last_picture"), outermost, strict=True)
    if event.mine:
        changes["mine"] = model.mine | {event.version}
    return _with_model(view, replace(model, **changes))


def _outer(
    first: tuple[int, Content] | None,
    last: tuple[int, Content] | None,
    sample: tuple[int, Content],
) -> tuple[tuple[int, Content], tuple[int, Content]]:
    """Return the samples of the oldest and the newest version among the three; `sample` is a new
    one, of any version.
    """
    return (
        sample if first is None or sample[0] <= first[0] else first,
        sample if last is None or sample[0] >= last[0] else last,
    )


def loss_event(run: str, row: VersionInfo) -> events.LossMeasured:
    """Return the event for a version of the coordinator's history; its loss is NaN if unknown."""
    loss = float("nan") if row.loss is None else row.loss
    return events.LossMeasured(
        at=row.created_at, run=run, version=row.version, loss=loss, mine=row.mine, sample=row.sample
    )


def insert_point(points: tuple[Point, ...], point: Point) -> tuple[Point, ...]:
    """Return a curve with a point inserted at its place; a point with the same x is replaced."""
    if not points or point[0] > points[-1][0]:
        return append_point(points, point)
    other_points = tuple(p for p in points if p[0] != point[0])
    joined = tuple(sorted((*other_points, point), key=lambda p: p[0]))
    return joined if len(joined) <= POINTS_MAX else thin(joined)


def _add_verdict(view: AgentView, verdict: Verdict) -> AgentView:
    """Return the view with the version that merged work of this volunteer marked as such."""
    if verdict.state != "merged" or verdict.version is None:
        return view
    model = _model(view, verdict.run)
    return _with_model(view, replace(model, mine=model.mine | {verdict.version}))


def _add_runs(view: AgentView, event: events.RunsListed) -> AgentView:
    for info in event.runs[:RUNS_MAX]:
        model = _model(view, info.name)
        points = model.points
        for point in _end_points(info):
            if all(point_before[0] != point[0] for point_before in points):
                points = insert_point(points, point)
        view = _with_model(view, replace(model, points=points))
    return view
