"""State of the machine as a sign, a word, and a sentence with its cause and its end."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from rich.cells import cell_len

from shared.protocol.heartbeat import RunBeat
from shared.text import printable, whole_percent
from volunteer.control.commands import How
from volunteer.control.event_sentences import OPEN_ENDED, START, YOU
from volunteer.control.events import BenchmarkProgress
from volunteer.control.status import PauseStatus, TaskStatus, lasting_standstill
from volunteer.i18n.catalogue import ENGLISH, N_, _, current, ngettext, translated
from volunteer.i18n.coordinator import standstill_sentence
from volunteer.i18n.formats import size
from volunteer.tui.agent_view import AgentView
from volunteer.tui.run_estimate import STATES
from volunteer.tui.text import UNICODE, Glyphs, countdown, fit, soon

STAGES = {
    "fp32": N_("matrix products in float32"),
    "bf16": N_("matrix products in bfloat16"),
    "step": N_("real training steps"),
}


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """State as a sign and a word, both coloured by `role`, and a sentence."""

    sign: str
    word: str
    role: str
    sentence: str = ""


_PHASES = {
    "claimed": N_("starting"),
    "fetch": N_("downloading"),
    "train": N_("training"),
    "upload": N_("uploading"),
    "checking": N_("being checked"),
}


LEAVING: dict[How, str] = {
    "finish": N_("the task in hand is completed first"),
    "save": N_("the half-done task is kept for the next start"),
    "release": N_("the task is given back"),
}


def activity(view: AgentView, now: float, glyphs: Glyphs, device: str = "") -> Activity:
    """Return the first state that applies to `device`, or to the machine for ""."""
    status_view = StatusView(view=view, now=now, glyphs=glyphs, device=device)
    activities = (
        state(status_view)
        for state in (_ended_state, _paused_state, _benchmark_state, _task_state, _idle_state)
    )
    return next((candidate for candidate in activities if candidate is not None), None) or Activity(
        sign=glyphs.wait, word=_("starting"), role="dim", sentence=_("looking for work")
    )


class StatusView(NamedTuple):
    """View to describe, the present time, the glyphs, and the device ("": the whole machine)."""

    view: AgentView
    now: float
    glyphs: Glyphs
    device: str


def _ended_state(at: StatusView) -> Activity | None:
    end = at.view.ended
    if end is None and not at.view.status.stopped:
        return None
    code, sentence = (end.code, end.message) if end else (0, "")
    sentence = (
        _("the volunteer has ended; q quits") if sentence in ("", "ended") else translated(sentence)
    )
    sign, role = (at.glyphs.cross, "bad") if code else (at.glyphs.off, "dim")
    return Activity(sign=sign, word=_("stopped"), role=role, sentence=sentence)


def _paused_state(at: StatusView) -> Activity | None:
    pause = at.view.status.paused(at.device)
    if pause is None:
        return None
    return Activity(
        sign=at.glyphs.paused, word=_("paused"), role="warn", sentence=why_paused(pause)
    )


def _benchmark_state(at: StatusView) -> Activity | None:
    benchmark = at.view.benchmark
    if benchmark is None or at.device not in ("", benchmark.device):
        return None
    sentence = stage_words(benchmark)
    return Activity(sign=at.glyphs.run, word=_("measuring"), role="info", sentence=sentence)


def _task_state(at: StatusView) -> Activity | None:
    status, task = at.view.status, at.view.task(at.device)
    if task is None:
        return None
    sentence = f"{task.run} {at.glyphs.dot} {_('task {number}', number=task.task)}"
    if task.phase == "upload" and not status.online and status.connection:
        return Activity(sign=at.glyphs.wait, word=_("waiting"), role="info", sentence=sentence)
    if task.phase == "claimed" and status.idle:
        return None
    word = _("starting") if fetched(task) else _(_PHASES[task.phase])
    role = "info" if task.phase in ("checking", "claimed") else "good"
    return Activity(
        sign=at.glyphs.on,
        word=_("finishing") if status.finishing else word,
        role=role,
        sentence=sentence,
    )


def _idle_state(at: StatusView) -> Activity | None:
    status, glyphs = at.view.status, at.glyphs
    if status.finishing:
        sentence = _("no more tasks are taken")
        return Activity(sign=glyphs.off, word=_("finished"), role="info", sentence=sentence)
    if not (status.idle or status.idle_message):
        return None
    wait = f" ({countdown(status.idle_until - at.now)})" if status.idle_until else ""
    sentence = f"{translated(status.idle_message)}{wait}"
    return Activity(sign=glyphs.wait, word=_("waiting"), role="info", sentence=sentence)


def window_title(view: AgentView, now: float) -> str:
    """Return the state for a window's title: "volunteer 62 % · training"."""
    task = view.task("")
    done = (
        f" {whole_percent(task.step / task.steps)} %" if task and task.steps and task.step else ""
    )
    return f"volunteer{done} · {activity(view, now, UNICODE).word}"


def stage_words(progress: BenchmarkProgress) -> str:
    """Return the stage of a benchmark in words."""
    return _(STAGES.get(progress.stage, "")) or printable(progress.stage, 40)


def fetched(task: TaskStatus) -> bool:
    """Return True if all downloads of a task are complete and its first step is running."""
    return task.phase == "fetch" and task.done_bytes >= task.total_bytes > 0


def why_paused(pause: PauseStatus) -> str:
    """Return the cause and the end of a pause in one sentence."""
    if pause.by == YOU:
        cause = _(pause.message) if pause.message not in ("", "paused") else _("by you")
        if pause.until not in OPEN_ENDED:
            cause = _("{paused} until {time}", paused=cause, time=_(pause.until))
        return cause if pause.message == START else f"{cause}; {_('press space to resume')}"
    return (
        _("{message}, until {until}", message=pause.message, until=pause.until)
        if pause.until
        else translated(pause.message)
    )


def connection(view: AgentView, now: float, glyphs: Glyphs) -> Activity:
    """Return the state of the connection with the coordinator."""
    status = view.status
    if view.ended is not None or status.stopped:
        return Activity(sign=glyphs.off, word=_("ended"), role="dim", sentence=status.server)
    if status.online:
        return Activity(sign=glyphs.on, word=_("online"), role="good", sentence=status.server)
    if not status.connection and status.retry_at is None:
        return Activity(sign=glyphs.wait, word=_("connecting"), role="dim", sentence=status.server)
    retry = _("next try in {time}", time=soon(status.retry_at - now)) if status.retry_at else ""
    return Activity(sign=glyphs.off, word=_("offline"), role="bad", sentence=retry)


def merge_sentence(view: AgentView, run: str, now: float) -> str:
    """Return when the next version is made: "next version in 2 contributions or 3:12"; or why no
    version is made; "" if unknown.
    """
    beat = view.beat(run)
    if beat is not None and beat.standstill is not None:
        return translated(standstill_sentence(beat.standstill))
    if beat is not None and beat.state != "running":
        return _("the run is {state}", state=_(STATES[beat.state]))
    when = next_merge(view, run, now)
    return _("next version {when}", when=when) if when else ""


def next_merge(view: AgentView, run: str, now: float) -> str:
    """Return when a run is merged next: "in 2 contributions or 3:12"; or why it is not merged; ""
    if unknown.
    """
    beat = view.beat(run)
    if beat is not None and beat.standstill is not None:
        return translated(standstill_sentence(beat.standstill))
    if beat is None:
        info = view.info(run)
        standstill = None if info is None else lasting_standstill(info.standstill, run, view.status)
        if standstill is not None:
            return translated(standstill_sentence(standstill))
        # The coordinator's own words, which are not translated.
        english = info is not None and current().language == ENGLISH
        return info.merging.removeprefix("merging ") if info and english else ""
    if beat.state != "running":
        return _("the run is {state}", state=_(STATES[beat.state]))
    return when_merged(beat, now - view.beats_at.get(run, now))


def when_merged(beat: RunBeat, since_s: float) -> str:
    """Return the condition of the next merge, `since_s` after the heartbeat that reported it."""
    left = None if beat.merge_in_s is None else countdown(beat.merge_in_s - since_s)
    if beat.needs > 0 and left is not None:
        return ngettext(
            "in {n} contribution or {time}",
            "in {n} contributions or {time}",
            beat.needs,
            time=left,
        )
    if beat.needs > 0:
        return ngettext("in {n} contribution", "in {n} contributions", beat.needs)
    return _("now") if left is None else _("in {time}", time=left)


REASON_CELLS = 46  # most cells for the cause of an outage


def outage_line(view: AgentView, now: float, cells: int, ellipsis: str = "…") -> str:
    """Return an outage's cause, the next retry and the running work, cut to `cells`; "" online."""
    status = view.status
    if status.online or not status.connection or status.stopped:
        return ""
    reason = (
        translated(status.connection).removeprefix(status.coordinator).strip()
    )  # the header names the coordinator
    sentence = fit(reason.partition("; ")[0].rstrip("."), min(cells, REASON_CELLS), ellipsis)
    parts = []
    if status.retry_at:
        parts.append(_("next try in {time}", time=soon(status.retry_at - now)))
    if status.queued:
        parts.append(ngettext("{n} result queued", "{n} results queued", status.queued))
    if any(task.phase == "train" for task in status.tasks):
        parts.append(_("training goes on"))
    for part in parts:
        if cell_len(sentence) + 2 + len(part) <= cells:
            sentence = f"{sentence}; {part}"
    return sentence


def traffic(view: AgentView, glyphs: Glyphs) -> str:
    """Return the bytes sent and received since the start."""
    status = view.status
    return f"{glyphs.up} {size(status.sent_bytes)}  {glyphs.down} {size(status.received_bytes)}"
