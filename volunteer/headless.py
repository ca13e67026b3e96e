"""Volunteer without a screen: prints one line per event, for people or (`json`) for programs.

The agent works and reports its events through `control`; this module only prints them.
"""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import TextIO

import msgspec

from shared.sentences import encode_english
from shared.text import ascii_json, duration, printable
from volunteer.control import commands, events
from volunteer.control.control import Control
from volunteer.control.event_sentences import (
    START,
    YOU,
    announcement_words,
    credits_words,
    stake_words,
    words,
)
from volunteer.control.events import AnyEvent
from volunteer.control.status import PauseStatus, Status, TaskStatus
from volunteer.i18n.catalogue import _, ngettext, translated
from volunteer.i18n.coordinator import standstill_sentence
from volunteer.i18n.formats import size
from volunteer.text import loss, measure_name
from volunteer.training.background_thread import BackgroundThread

TRAINING_S = 10.0  # interval of plain lines of progress
TRAINING_JSON_S = 1.0


class Headless:
    """Writes events as lines. When the output is closed, the volunteer stops and releases its
    tasks. A slow reader misses progress but blocks only the writing thread, not the heartbeats.
    """

    def __init__(
        self,
        control: Control,
        out: TextIO,
        *,
        json: bool,
        since: float = 0.0,
    ) -> None:
        self._control = control
        self._out = out
        self._json = json
        self._since = since  # plain lines leave out earlier events
        self._shown: dict[int, float] = {}  # task -> time of its last progress line
        self._online: bool | None = None
        self._account = ""  # account in words, as shown last
        # A contribution, and the line about credits that follows its verdict.
        self._credits_line = (0, "")

    async def run(self) -> None:
        """Print events until the volunteer ends."""
        aside = BackgroundThread("output")
        with self._control.subscribe() as new:
            async for event in new:
                if not await aside.do(partial(self.show, event)):
                    await self._control.do(commands.Stop())
                    return

    def show(self, event: AnyEvent) -> bool:
        """Write an event; return False if that fails."""
        text = self._line(event)
        if text is None:
            return True
        try:
            self._out.write(text + "\n")
            self._out.flush()
        except (OSError, ValueError):
            return False  # closed, or on a full disk
        return True

    def _line(self, event: AnyEvent) -> str | None:
        if isinstance(event, events.Training) and not self._due(event):
            return None
        if self._json:
            return ascii_json(msgspec.json.encode(event, enc_hook=encode_english).decode())
        if event.at < self._since:
            return None
        if isinstance(event, events.Connection):
            if event.online and self._online is not False:
                self._online = event.online
                return None  # being online is news only after an outage
            self._online = event.online
        sentence = words(event)
        if sentence is None or (isinstance(event, events.Credits) and sentence == self._account):
            return None
        line = f"{_time(event.at)}  {printable(sentence)}"
        if isinstance(event, events.Credits):
            self._account = sentence
            if event.verdicts:  # the credits line follows its verdicts
                self._credits_line = (event.verdicts[-1].contribution, line)
                return None
        elif (
            isinstance(event, events.Judged) and event.verdict.contribution == self._credits_line[0]
        ):
            line, self._credits_line = f"{line}\n{self._credits_line[1]}", (0, "")
        return line

    def _due(self, event: events.Training) -> bool:
        gap = TRAINING_JSON_S if self._json else TRAINING_S
        last = self._shown.get(event.task)
        if last is not None and event.at - last < gap:
            return False
        if last is None:
            self._shown.clear()
        self._shown[event.task] = event.at
        return True


def status_lines(status: Status) -> list[str]:
    """Return the lines of `volunteer status`."""
    why = status.connection or _("not connected yet")
    link = _("online") if status.online else _("offline: {why}", why=why)
    tasks = ngettext("{n} task submitted", "{n} tasks submitted", status.done)
    moved = _(
        "{sent} sent, {received} received",
        sent=size(status.sent_bytes),
        received=size(status.received_bytes),
    )
    here = _("profile {profile}, process {process}", profile=status.profile, process=status.pid)
    where = _('"{nickname}" at {server}', nickname=status.nickname, server=status.server)
    lines = [f"{where} ({status.coordinator}), {link}", f"{here}, {tasks}, {moved}"]
    if status.queued:
        lines.append(
            ngettext(
                "{n} result waits to be submitted",
                "{n} results wait to be submitted",
                status.queued,
            )
        )
    lines += [announcement_words(announcement) for announcement in status.announcements]
    lines += [pause_line(pause) for pause in status.pauses]
    if status.finishing:
        lines.append(_("finishing: no new work is taken"))
    lines += [task_line(task) for task in status.tasks]
    paused = any(not pause.device for pause in status.pauses)
    if status.idle and not (status.tasks or paused):  # a paused machine has asked for nothing since
        lines.append(
            _("idle ({reason}): {message}", reason=status.idle, message=status.idle_message)
        )
    if status.me is not None:
        lines.append(credits_words(events.Credits(me=status.me)))
        lines += stake_words(status.me)
    for beat in status.beats:
        version = _("{run} version {version}", run=beat.run, version=beat.version)
        lines.append(f"{version}: {measure_name(beat.measure)} {loss(beat.loss, beat.measure)}")
        if beat.standstill is not None:
            why = translated(standstill_sentence(beat.standstill))
            lines.append(_("{run} does not go on: {why}", run=beat.run, why=why))
    return [printable(line) for line in lines]


def pause_line(pause: PauseStatus) -> str:
    """Return the sentence about a pause: its cause and its end."""
    sentence = words(
        events.Paused(device=pause.device, by=pause.by, message=pause.message, until=pause.until)
    )
    if pause.by != YOU or pause.message == START:  # the latter names the command itself
        return str(sentence)
    return _("{pause}; continue with `volunteer resume`", pause=sentence)


def task_line(task: TaskStatus) -> str:
    """Return the state of a task as a line."""
    left = f", {_('{time} left', time=duration(task.eta_s))}" if task.eta_s is not None else ""
    moved = _("{done} of {all}", done=size(task.done_bytes), all=size(task.total_bytes))
    bytes_ = f" {moved}" if task.total_bytes else ""
    step = _("step {step} of {steps}", step=task.step, steps=task.steps)
    state = {
        "claimed": _("claimed"),
        "fetch": f"{_('download')}{bytes_}",
        "train": f"{step}, {_('loss {loss}', loss=loss(task.loss))}{left}",
        "upload": f"{_('upload')}{bytes_}",
        "checking": _("the coordinator checks it"),
    }[task.phase]
    about = _("task {task} of {run} on {device}", task=task.task, run=task.run, device=task.device)
    return f"{about}: {state}"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")
