"""`volunteer --plain`: the volunteer by questions and answers, one column of plain sentences.

Nothing is drawn and nothing moves: what happens is told when it is asked for, so that a screen
reader or a Braille line reads each sentence once. Only failures, and the end, speak for themselves.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TextIO

from shared.errors import VolunteerError
from shared.nearest import nearest
from shared.text import printable
from volunteer.control import events
from volunteer.control.control import Control
from volunteer.control.event_sentences import words
from volunteer.control.events import AnyEvent
from volunteer.headless import status_lines
from volunteer.i18n.catalogue import N_, _, ngettext, number, shown
from volunteer.i18n.formats import size

NEWS_MAX = 50  # sentences that are kept until they are asked for
LINE_MAX = 1000  # characters of a line that is typed
HELP = (
    ("enter", N_("what is new since you last asked")),
    ("status", N_("what this machine does now, and its credits")),
    ("devices", N_("the devices of this machine, their load, heat and energy")),
    ("runs", N_("the runs that can be helped")),
    ("pause", N_("free the devices and keep the task; pause cpu pauses one device")),
    ("resume", N_("go on with the same task")),
    ("finish", N_("complete the task in hand and take no more")),
    ("read", N_("hide the announcements: they are read")),
    ("help", N_("these commands")),
    ("quit", N_("end; a task in hand is kept for the next start")),
)


class Plain:
    """Answers typed lines about a volunteer, and gives it commands."""

    def __init__(self, control: Control, out: TextIO, lines: AsyncIterator[str]) -> None:
        self._control = control
        self._out = out
        self._lines = lines
        self._news: deque[str] = deque(maxlen=NEWS_MAX)
        self._sensed: dict[str, events.Sensed] = {}
        self._does: dict[str, Callable[[Sequence[str]], Awaitable[None]]] = {
            "": self._enter,
            "status": self._status,
            "devices": self._devices,
            "runs": self._runs,
            "pause": self._pause,
            "resume": self._resume,
            "finish": self._finish,
            "read": self._read,
            "help": self._help,
        }

    async def run(self) -> None:
        """Until `quit`, the end of the input, or the end of the volunteer."""
        self._say(_("volunteer, in plain sentences. Type help and enter for the commands."))
        hearing = asyncio.ensure_future(self._hear())
        asking = asyncio.ensure_future(self._ask())
        try:
            await asyncio.wait({hearing, asking}, return_when=asyncio.FIRST_COMPLETED)
            for done in (asking, hearing):
                if done.done():
                    done.result()
        finally:
            hearing.cancel()
            asking.cancel()
            await asyncio.gather(hearing, asking, return_exceptions=True)

    def _say(self, text: str) -> None:
        self._out.write(printable(text, 2000) + "\n")
        self._out.flush()

    # What happens.

    async def _hear(self) -> None:
        with self._control.subscribe() as new:
            async for event in new:
                self._take(event)

    def _take(self, event: AnyEvent) -> None:
        if isinstance(event, events.Sensed):
            self._sensed[event.device] = event
        if isinstance(event, events.Training | events.Sensed | events.Traffic):
            return  # moves all the time
        said = words(event)
        if said is None:
            return
        failed = isinstance(event, events.Notice) and event.level == "error"
        if failed or isinstance(event, events.Alerted | events.Stopped):
            self._say(said)
        else:
            self._news.append(said)

    # What is typed.

    async def _ask(self) -> None:
        async for line in self._lines:
            verb, *more = line.split() or [""]
            if verb in ("quit", "exit", "q"):
                if not self._control.remote:
                    await self._control.stop("save")
                    self._say(_("ending; the task in hand is kept for the next start"))
                return
            does = self._does.get(verb)
            if does is None:
                near = nearest(verb, self._does)
                hint = (
                    _("did you mean {name}?", name=near)
                    if near
                    else _("type help for the commands")
                )
                self._say(_("there is no command {verb}: {hint}", verb=verb[:40], hint=hint))
                continue
            try:
                await does(more)
            except VolunteerError as error:
                self._say(shown(error.message))
        if not self._control.remote:  # the input has ended: nobody is there to ask
            await self._control.stop("save")

    async def _enter(self, more: Sequence[str]) -> None:
        if not self._news:
            self._say(_("nothing new"))
        while self._news:
            self._say(self._news.popleft())

    async def _status(self, more: Sequence[str]) -> None:
        for line in status_lines(self._control.status):
            self._say(line)

    async def _devices(self, more: Sequence[str]) -> None:
        await self._control.look_at_devices()
        for device in self._control.status.devices:
            said = [device.name or device.id, size(device.memory_bytes)]
            if not device.usable:
                said.append(
                    _("cannot be used: {problem}", problem=self._control.status.problem(device))
                )
            told = self._sensed.get(device.id)
            said += _sensed_words(told) if told is not None else []
            self._say(f"{device.id}: {', '.join(said)}")
        if not self._control.status.devices:
            self._say(_("the devices are not known yet"))

    async def _runs(self, more: Sequence[str]) -> None:
        for info in self._control.status.runs:
            helpers = ngettext("{n} helper", "{n} helpers", info.workers)
            version = f"{_('version {version}', version=info.version)}, {helpers}"
            self._say(
                f"{info.name}, {info.workload}, {_(info.state)}, {version}. {info.description}"
            )
        if not self._control.status.runs:
            self._say(_("the coordinator has no run yet"))

    async def _pause(self, more: Sequence[str]) -> None:
        await self._control.pause(more[0] if more else "")
        self._say(_("paused; resume goes on"))

    async def _resume(self, more: Sequence[str]) -> None:
        await self._control.resume(more[0] if more else "")
        self._say(_("going on"))

    async def _finish(self, more: Sequence[str]) -> None:
        await self._control.finish()
        self._say(_("the task in hand is completed, then no more is taken; resume goes on"))

    async def _read(self, more: Sequence[str]) -> None:
        await self._control.read_announcements()
        self._say(_("the announcements are hidden"))

    async def _help(self, more: Sequence[str]) -> None:
        for verb, what in HELP:
            self._say(f"{verb}: {_(what)}")


def _sensed_words(sensed: events.Sensed) -> list[str]:
    """Return the readings of a device in words."""
    said = []
    if sensed.utilisation is not None:
        said.append(_("load {percent} percent", percent=number(100 * sensed.utilisation, ".0f")))
    if sensed.celsius is not None:
        said.append(_("{n} degrees", n=number(sensed.celsius, ".0f")))
    guess = _(", an estimate") if sensed.estimated else ""
    if sensed.watts is not None:
        said.append(_("{n} watts", n=number(sensed.watts, ".0f")) + guess)
    if sensed.joules is not None:
        used = number(sensed.joules / 3_600_000, ".3f")
        said.append(_("{kwh} kilowatt-hours today", kwh=used) + guess)
    return said


async def typed_lines(file: TextIO) -> AsyncIterator[str]:
    """Yield each line that is typed, until the end of the input.

    A thread of its own reads them, past Python's buffers, whose lock would hold up the end of the
    program.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[str | None](64)
    room = threading.Semaphore(32)

    def put(line: str | None) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, line)

    def read() -> None:
        rest = b""
        try:
            while chunk := os.read(file.fileno(), 4096):
                *whole, rest = (rest + chunk).split(b"\n")
                rest = rest[-LINE_MAX:]
                for line in whole:
                    room.acquire()
                    put(line[:LINE_MAX].decode(errors="replace").strip().lower())
            put(None)
        except (OSError, RuntimeError):
            return  # the terminal is gone, or the program has ended

    threading.Thread(target=read, name="lines", daemon=True).start()
    while (line := await queue.get()) is not None:
        room.release()
        yield line
