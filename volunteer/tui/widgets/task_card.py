"""Card of the running task: stage, progress, time left, pay; or the reason why no task runs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from typing_extensions import override

from volunteer.control.event_sentences import YOU
from volunteer.control.events import AUDIT
from volunteer.control.status import TaskStatus
from volunteer.i18n.catalogue import N_, _, translated
from volunteer.i18n.formats import credit, size
from volunteer.text import loss
from volunteer.tui.status_line import activity, fetched, why_paused
from volunteer.tui.text import (
    Line,
    Span,
    bar,
    countdown,
    fit,
    left,
    paragraph,
    percent,
    rate,
    right,
    short_number,
    width,
)
from volunteer.tui.widgets.panel import Panel, Scene

STAGES = (N_("claim"), N_("download"), N_("train"), N_("upload"), N_("check"), N_("credit"))
BY_THEMSELVES = ("temperature", "disk")  # causes of pauses that end by themselves
_LATE = N_("(accepted until another worker has it)")
_AT = {"claimed": 0, "fetch": 1, "train": 2, "upload": 3, "checking": 4}


class TaskCard(Panel):
    """Card of the shown device's task."""

    @override
    def heading(self, scene: Scene) -> tuple[str, str]:
        task = scene.view.task(scene.device)
        if task is None:
            return _("Task"), ""
        devices = scene.view.devices()
        of = (
            " "
            + _(
                "({index} of {devices})", index=devices.index(task.device) + 1, devices=len(devices)
            )
            if len(devices) > 1
            else ""
        )
        audit, number = task.kind == AUDIT, task.task
        named = _("Audit {number}", number=number) if audit else _("Task {number}", number=number)
        title = f"{named} {scene.glyphs.dot} {task.run}"
        return title, f"{task.device}{of}"

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        task = scene.view.task(scene.device)
        if task is None:
            return no_task_lines(scene, width, height)
        return task_lines(scene, task, width, height)


def task_lines(scene: Scene, task: TaskStatus, cells: int, height: int) -> list[Line]:
    """Return lines about a task; if room is short, only the most important."""
    numbers = _numbers(scene, task, cells)
    lines = [stages_line(scene, task, cells), progress_line(scene, task, cells), *numbers]
    if height < 4:
        lines = [
            progress_line(scene, task, cells),
            numbers[0],
            stages_line(scene, task, cells),
            *numbers[1:],
        ]
    if height > len(lines):
        lines.insert(1, ())
    if height > len(lines):
        lines.insert(3, ())
    return lines[:height]


def stages_line(scene: Scene, task: TaskStatus, cells: int) -> Line:
    """Return the stages of a task with the present stage marked; only the present and the next
    stage if room is short.
    """
    glyphs = scene.glyphs
    at = _AT["train" if fetched(task) else task.phase]
    paused = scene.view.status.paused(task.device) is not None
    spans: list[Span] = []
    for place, name in enumerate(STAGES):
        if place:
            spans.append((f" {glyphs.empty} ", "track"))
        if place < at:
            spans += [(f"{glyphs.check} ", "good"), (_(name), "dim")]
        elif place == at and paused:
            spans.append((f"{glyphs.paused} {_(name)}", "warn"))
        elif place == at:
            spans.append((f"{glyphs.on} {_(name)}", "info"))
        else:
            spans.append((f"{glyphs.off} {_(name)}", "faint"))
    if width(spans) <= cells:
        return tuple(spans)
    sign, role = (glyphs.paused, "warn") if paused else (glyphs.on, "info")
    following = f"  {glyphs.right} {_(STAGES[at + 1])}" if at + 1 < len(STAGES) else ""
    return ((f"{sign} {_(STAGES[at])}", role), (following, "faint"), (f"  {at + 1}/6", "dim"))


def stage_share(task: TaskStatus) -> float:
    """Return the finished share, 0 to 1, of a task's present stage."""
    if task.phase in ("fetch", "upload") and not fetched(task):
        return task.done_bytes / task.total_bytes if task.total_bytes > 0 else 0.0
    if task.phase == "checking":
        return 1.0
    return task.step / task.steps if task.steps > 0 else 0.0


def progress_line(scene: Scene, task: TaskStatus, cells: int) -> Line:
    """Return a bar of the present stage, its per cent, and its steps or bytes."""
    if task.phase in ("fetch", "upload") and task.total_bytes > 0 and not fetched(task):
        done = _(
            "{done} of {all}",
            done=size(task.done_bytes),
            all=size(task.total_bytes),
        )
        if task.phase == "fetch" and task.what:
            done = f"{task.what} {done}"
    elif task.phase == "checking":
        done = _("being checked by the coordinator")
    elif things := task.counted:
        done = _("{step} of {steps} {things}", step=task.step, steps=task.steps, things=_(things))
    elif task.phase == "claimed":
        done = _(
            "{steps} steps, {samples} samples", steps=task.steps, samples=short_number(task.samples)
        )
    else:
        done = _("step {step} of {steps}", step=task.step, steps=task.steps)
    tail = f"  {right(percent(stage_share(task)), 5)}  {done}"
    if cell_len(tail) > cells - 8:
        tail = f" {right(percent(stage_share(task)), 5)}"
    drawn = bar(stage_share(task), cells - cell_len(tail), scene.glyphs)
    if scene.view.status.paused(task.device):
        drawn = tuple((text, "warn" if role == "fill" else role) for text, role in drawn)
    return (*drawn, (tail, "text"))


def _numbers(scene: Scene, task: TaskStatus, cells: int) -> list[Line]:
    """Return two rows of numbers with their names; during a pause its reason is the first row."""
    left_s = task.finish_by - scene.now
    eta = "-" if task.eta_s is None or task.phase != "train" else countdown(task.eta_s)
    if pause := scene.view.status.paused(task.device):
        first: Line = ((fit(why_paused(pause), cells, scene.glyphs.ellipsis), "warn"),)
    else:
        curve = scene.view.curve(task.task)
        metrics = list(curve.metrics.items())[:1] if curve and task.loss is None else []
        facts = [
            *(("", short_number(value), name.replace("_", " ")) for name, value in metrics),
            *([] if metrics else [(_("loss"), loss(task.loss), "")]),
            (_("left"), eta, ""),
            ("", rate(task.steps_per_s), f"{_(task.counted) or _('steps')}/s"),
        ]
        if task.tokens_per_s > 0 and not task.counted:
            facts.append(("", rate(task.tokens_per_s), f"{_(task.items)}/s"))
        first = _row(facts, cells)
    lease = countdown(left_s)
    second = [
        (_("reserved for"), lease, "") if left_s > 0 else ("", _("lease over"), _(_LATE)),
        (_("pays"), credit(task.price_micro), _("credits")),
        (_("version"), str(task.version) if task.version or task.phase == "train" else "-", ""),
        ("", short_number(task.samples), _(task.counted) or _("samples")),
    ]
    return [first, _row(second, cells)]


def _row(facts: Sequence[tuple[str, str, str]], cells: int) -> Line:
    """Return a row of `facts` (name, value, unit), in columns; facts without room are left out."""
    spans: list[Span] = []
    used = 0
    wide = cells // 4 if cells >= 68 else 0
    for name, value, unit in facts:
        parts = [
            (f"{name} " if name else "", "dim"),
            (value, "value"),
            (f" {unit}" if unit else "", "dim"),
        ]
        need = width(parts)
        pad = 0 if not used else wide - used % wide if wide else 2
        if used and used + pad + need > cells:
            break
        spans += [(" " * pad, "text"), *parts]
        used += pad + need
    return tuple(span for span in spans if span[0])


def no_task_lines(scene: Scene, cells: int, height: int) -> list[Line]:
    """Return the reason for having no task, and its end or the key that starts work."""
    state = activity(scene.view, scene.now, scene.glyphs, scene.device)
    status = scene.view.status
    sentence = state.sentence
    if pause := status.paused(scene.device):
        no_hint = pause.by == YOU or pause.by in BY_THEMSELVES
        hint = "" if no_hint else _("press space to resume")
    elif status.finishing:
        hint = _("press f to keep going, q to quit")
    elif not status.online and status.connection:
        sentence = translated(status.connection)
        hint = _("press r to try now")
    else:
        hint = ""
    rows = paragraph(sentence, cells, max(1, height - 2))
    lines: list[Line] = [((f"{state.sign} {state.word}", state.role),), *rows]
    if hint:
        lines.append((("", "text"), (left(hint, cells), "accent")))
    spare = height - len(lines)
    if spare >= 2 and hint:
        lines.insert(len(lines) - 1, ())
        spare -= 1
    return [*([()] * (spare // 2)), *lines][:height]
