"""Small cards of facts: the device, the credits, the run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from typing_extensions import override

from shared.protocol.accounts import Benchmark, Device, Me, RunInfo
from shared.text import duration
from volunteer.control.event_sentences import escrow_words
from volunteer.control.events import Sensed
from volunteer.i18n.catalogue import _, ngettext, pgettext, translated
from volunteer.i18n.formats import credit, size
from volunteer.text import loss, measure_word
from volunteer.tui import run_estimate
from volunteer.tui.agent_view import AgentView, ModelView
from volunteer.tui.status_line import activity, next_merge, traffic
from volunteer.tui.text import (
    Glyphs,
    Line,
    Span,
    ago,
    bar,
    big_digits,
    centred,
    fit,
    flops,
    gain,
    gain_role,
    left,
    paragraph,
    percent,
    rate,
    short_number,
    shown_name,
    spark,
    wrap,
)
from volunteer.tui.widgets.panel import Panel, Scene, age, aged

NAME_CELLS = 9


def fact(name: str, *spans: Span) -> Line:
    """Return a line with a name in `NAME_CELLS` and the spans of its value."""
    return ((left(name, NAME_CELLS), "dim"), *spans)


class DeviceCard(Panel):
    """Card of the shown device: state, speed, memory, heat, power."""

    @override
    def heading(self, scene: Scene) -> tuple[str, str]:
        device = device_of(scene)
        return _("Device"), device.id if device else ""

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        return device_lines(scene, width, height)


def device_of(scene: Scene) -> Device | None:
    """Return the device to show: the chosen device, else the working device, else a usable GPU,
    else the CPU; None before the devices are known.
    """
    task = scene.view.task(scene.device)
    device_id = scene.device or (task.device if task else "")
    devices = scene.view.status.devices
    usable = [d for d in devices if d.usable] or list(devices)
    named = [d for d in devices if d.id == device_id]
    return next(iter(named or sorted(usable, key=lambda d: d.kind == "cpu")), None)


def device_lines(scene: Scene, cells: int, height: int) -> list[Line]:
    """Return name, state, speed, memory and sensor readings of the shown device."""
    device = device_of(scene)
    if device is None:
        return centred(_("looking at this machine"), cells, height)
    glyphs = scene.glyphs
    name = device.name or device.id
    lines: list[Line] = [((fit(name, cells, glyphs.ellipsis), "value"),)]
    if not device.usable:
        rows = wrap(
            translated(scene.view.status.problem(device)) or _("cannot be used"), cells, height - 1
        )
        return lines + [((text, "bad"),) for text in rows]
    state = activity(scene.view, scene.now, glyphs, device.id)
    lines.append(fact(_("state"), (f"{state.sign} {state.word}", state.role)))
    speed = next((b for b in scene.view.status.benchmarks if b.device == device.id), None)
    lines.append(fact(_("speed"), *_speed(speed, cells)))
    lines += pace_lines(scene, device.id, cells)
    lines.append(fact(_("memory"), *memory_spans(scene, device, cells)))
    lines += sensed_lines(scene, device, cells)
    return lines[:height]


def _speed(benchmark: Benchmark | None, cells: int) -> list[Span]:
    if benchmark is None:
        return [(_("not measured yet"), "dim")]
    return [(flops(benchmark.step_flops), "text"), (" " + _("in training"), "dim")][
        : 2 if cells > 30 else 1
    ]


def memory_spans(scene: Scene, device: Device, cells: int) -> Line:
    """Return the memory of a device and, where known, the part in use."""
    sensed = scene.view.sensors.get(device.id)
    whole = size(device.memory_bytes)
    if sensed is None or sensed.memory_bytes is None or device.memory_bytes <= 0:
        return ((whole, "text"),)
    tail = " " + _("{used} of {whole}", used=size(sensed.memory_bytes), whole=whole)
    share = sensed.memory_bytes / device.memory_bytes
    return (*bar(share, cells - NAME_CELLS - len(tail), scene.glyphs), (tail, "text"))


def pace_lines(scene: Scene, device: str, cells: int) -> list[Line]:
    """Return the line with the recent speeds of a device, in steps a second; [] before the
    first.
    """
    speeds = scene.view.speeds.get(device, ())
    if not speeds:
        return []
    tail = f" {rate(speeds[-1])}/s"
    drawn = spark(speeds, cells - NAME_CELLS - len(tail), scene.glyphs)
    return [fact(_("pace"), (drawn, "raw"), (tail, "text"))]


def sensed_lines(scene: Scene, device: Device, cells: int) -> list[Line]:
    """Return the readings of the sensors."""
    sensed = scene.view.sensors.get(device.id) or Sensed(device=device.id)
    lines = []
    if sensed.utilisation is not None:
        tail = f" {percent(sensed.utilisation)}"
        room = cells - NAME_CELLS - len(tail)
        lines.append(fact(_("load"), *bar(sensed.utilisation, room, scene.glyphs), (tail, "text")))
    if sensed.celsius is not None:
        lines.append(fact(_("heat"), (f"{sensed.celsius:.0f} °C", "text")))
    return [*lines, fact(_("power"), power_span(sensed))]


def power_span(sensed: Sensed) -> Span:
    """Return the power of a device, where its driver measures it."""
    if sensed.watts is None:
        return _("not measured"), "dim"
    return f"{sensed.watts:.0f} W", "text"


class CreditsCard(Panel):
    """Card of the account: balance, today's and pending credits, rank."""

    @override
    def heading(self, scene: Scene) -> tuple[str, str]:
        status = scene.view.status
        account = (
            _("account {number}", number=status.me.volunteer_id[:8])
            if status.me
            else _("my account")
        )
        name = shown_name(status.nickname, account, scene.glyphs)
        suffix = f" {scene.glyphs.dot} {name}" if name else ""
        age_words = age(scene) if status.me is not None else ""
        return f"{_('Credits')}{suffix}", age_words or _("answers for credits")

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        return aged(credit_lines(scene, width, height), scene)


def credit_lines(scene: Scene, cells: int, height: int) -> list[Line]:
    """Return the balance, in big digits if there is room, then today's pay, rank and work."""
    me = scene.view.status.me
    if me is None:
        text = _("credits appear here when your first contribution has been checked")
        return centred(text, cells, height)
    total = credit(me.balance_micro)
    large = big_digits(total) if scene.glyphs.curve == "braille" and height >= 7 else None
    lines: list[Line] = []
    if large is not None and len(large[0]) <= cells:
        lines += [((row, "big"),) for row in large]
    else:
        lines.append(fact(_("total"), (total, "value")))
    pending = [(credit(me.pending_micro), "warn" if me.pending_micro else "text")]
    if me.pending_micro and cells >= 31:
        pending.append((" " + _("in checking"), "dim"))
    today = [(gain(me.today_micro), gain_role(me.today_micro))]
    if (speed := run_estimate.pace(scene.view.status)) and cells >= 31:
        hourly = short_number(speed.credits_per_hour)
        today.append((" " + _("{credits} an hour now", credits=hourly), "dim"))
    lines.append(fact(_("today"), *today))
    lines.append(fact(_("pending"), *pending))
    if me.escrow_micro:
        lines.append(fact(_("at stake"), (credit(me.escrow_micro), "warn")))
    if me.debt_micro:
        lines.append(fact(_("owed"), (credit(me.debt_micro), "bad")))
    rank = f"{me.rank}" if me.rank is not None else "-"
    lines.append(fact(_("rank"), (rank, "text")))
    lines.append(fact(_("work"), *_work(me, cells - NAME_CELLS, scene.glyphs)))
    if wait := escrow_words(me):
        lines += paragraph(wait, cells, max(1, height - len(lines)), "dim")
    return lines[:height]


def _work(me: Me, cells: int, glyphs: Glyphs) -> list[Span]:
    """Return the counts of merged and of rejected contributions; if none is rejected, of merged and
    of accepted contributions.
    """
    merged = _("{merged} merged", merged=me.merged)
    if me.rejected:
        rejected = _("{rejected} rejected", rejected=me.rejected)
        if cell_len(f"{merged}, {rejected}") > cells:
            rejected = f"{me.rejected} {glyphs.cross}"
        return [(merged, "text"), (", ", "dim"), (rejected, "bad")]
    of = " " + _("of {accepted} accepted", accepted=me.accepted)
    return [(merged, "text"), (of if len(merged + of) <= cells else "", "dim")]


class RunCard(Panel):
    """Card of this machine's run: version, loss, progress, next merge, helpers."""

    @override
    def heading(self, scene: Scene) -> tuple[str, str]:
        run = scene.view.run()
        info = scene.view.info(run)
        return (run or _("Run")), (age(scene) or info.workload) if info else ""

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        return aged(run_lines(scene, width, height), scene)


def run_lines(scene: Scene, cells: int, height: int) -> list[Line]:
    """Return the facts of this machine's run, the most important first, then the session's."""
    view = scene.view
    run = view.run()
    info, beat, model = view.info(run), view.beat(run), view.models.get(run)
    if info is None and beat is None:
        return centred(_("the run that you help appears here"), cells, height)
    versions = [task.version for task in view.status.tasks if task.run == run]
    workers = beat.workers if beat else (info.workers if info else 0)
    workers = max(workers, 1 if versions else 0)  # a machine that has just begun is not counted yet
    merge = next_merge(view, run, scene.now)
    rows = wrap(merge, cells - NAME_CELLS, 2 if merge else 0, scene.glyphs.ellipsis)
    lines: list[Line] = [
        fact(_("version"), (str(_newest_version(view, run, versions)), "value")),
        *_loss_of(info, model, scene.glyphs),
        *_progress_of(info, cells, scene),
        *(
            fact(pgettext("version", "next") if row == 0 else "", (text, "text"))
            for row, text in enumerate(rows)
        ),
        fact(_("helpers"), (str(workers), "text"), (" " + _("online"), "dim")),
    ]
    if model is not None and model.mine:
        mark = (f"{scene.glyphs.mark} ", "mark")
        lines.append(fact(_("my part"), mark, (_mine(len(model.mine)), "text")))
    if info is not None and info.parameters:
        weights = _("{weights} weights", weights=short_number(info.parameters))
        lines.append(fact(_("model"), (weights, "text")))
    if info is not None and info.licence:
        lines.append(fact(_("licence"), (fit(info.licence, cells - NAME_CELLS), "text")))
    lines.append(fact(_("traffic"), (traffic(view, scene.glyphs), "text")))
    lines.append(fact(_("session"), *_session(scene)))
    return lines[:height]


def _newest_version(view: AgentView, run: str, versions: Sequence[int]) -> int:
    """Return the newest version of all sources; a verdict may arrive before the listing."""
    info, beat, model = view.info(run), view.beat(run), view.models.get(run)
    newest_versions = (beat.version if beat else 0, info.version if info else 0)
    return max(*newest_versions, *versions, *(model.mine if model else ()))


def _loss_of(info: RunInfo | None, model: ModelView | None, glyphs: Glyphs) -> list[Line]:
    """Return the row of the run's measure: its first and newest value; [] without values."""
    points = model.points if model else ()
    newest = points[-1][1] if points else (info.loss if info else None)
    first = points[0][1] if points else (info.loss_first if info else None)
    if newest is None:
        return []
    better = first is not None and newest < first
    measure = info.measure if info else "loss"
    label = fit(measure_word(measure), NAME_CELLS - 1)
    arrow = f"{loss(first, measure)} {glyphs.right} " if first not in (None, newest) else ""
    return [fact(label, (arrow, "dim"), (loss(newest, measure), "good" if better else "value"))]


def _progress_of(info: RunInfo | None, cells: int, scene: Scene) -> list[Line]:
    """Return the bar of a run's progress and, if known, the estimated time to its end; [] if the
    progress is unknown.
    """
    if info is None or info.progress is None:
        return []
    tail = f" {percent(info.progress)}"
    room = cells - NAME_CELLS - len(tail)
    drawn = [fact(_("progress"), *bar(info.progress, room, scene.glyphs), (tail, "text"))]
    if info.ends_at is not None:
        time = ago(max(2.0, info.ends_at - scene.now))
        drawn.append(fact("", (_("done in about {time}", time=time), "dim")))
    return drawn


def _mine(versions: int) -> str:
    return ngettext("in {n} version", "in {n} versions", versions)


def _session(scene: Scene) -> list[Span]:
    status = scene.view.status
    since = duration(scene.now - status.since) if status.since else "-"
    return [
        (ngettext("{n} task", "{n} tasks", status.done), "text"),
        (" " + _("in {time}", time=since), "dim"),
    ]
