"""Notifications of failures that need a person: the bell, or the desktop.

`AlertRules` decides from the events alone. One kind of trouble is reported at most once an hour.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from shared.sentences import Sentence
from shared.text import duration, printable
from volunteer.control import events
from volunteer.control.event_bus import EventBus, Subscription
from volunteer.control.events import AnyEvent
from volunteer.i18n.catalogue import shown
from volunteer.i18n.coordinator import judged
from volunteer.settings.display import Display

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

REJECTED_TOLD = 3  # results in a row
AWAY_TOLD_S = 1800.0  # without an answer of the coordinator
QUIET_S = 3600.0  # between two alerts of one kind
TELL_S = 10.0  # for one way of telling, and at the end for all that are under way
CHARS_MAX = 300
TITLE = "volunteer"


class OwnerAlert(msgspec.Struct, frozen=True, kw_only=True):
    """Alert to the owner: trouble that needs a person."""

    kind: str  # "ended", "failing", "rejected", "away"
    message: str


Run: TypeAlias = Callable[[Sequence[str], Mapping[str, str]], str]  # what went wrong, or ""


class AlertRules:
    """Chooses the events that are worth an alert. Pure but for its memory."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}  # kind -> when
        self._rejected = 0
        self._away_since: float | None = None

    def hear(self, event: AnyEvent) -> OwnerAlert | None:
        """Return the alert of an event, if it is one and was not sent recently."""
        alert = self._of(event)
        if alert is None:
            return None
        last = self._told.get(alert.kind)
        if last is not None and event.at - last < QUIET_S:
            return None
        self._told[alert.kind] = event.at
        return alert

    def _of(self, event: AnyEvent) -> OwnerAlert | None:
        match event:
            case events.Stopped(code=code, message=message) if code != 0:
                return OwnerAlert(
                    kind="ended",
                    message=Sentence("the volunteer has ended: {message}", message=message),
                )
            case events.Notice(level="error", message=message):
                return OwnerAlert(kind="failing", message=message)
            case events.Judged(verdict=verdict):
                return self._judged(verdict.state, judged(verdict))
            case events.Connection():
                return self._connection(event)
            case _:
                return None

    def _judged(self, state: str, why: str) -> OwnerAlert | None:
        if state in ("accepted", "merged", "superseded"):
            self._rejected = 0
        if state != "rejected":
            return None
        self._rejected += 1
        if self._rejected < REJECTED_TOLD:
            return None
        said = Sentence("{n} results in a row were rejected", n=self._rejected)
        return OwnerAlert(
            kind="rejected", message=Sentence("{said}: {why}", said=said, why=why) if why else said
        )

    def _connection(self, event: events.Connection) -> OwnerAlert | None:
        if event.online:
            self._away_since = None
            return None
        if self._away_since is None:
            self._away_since = event.at
        away_s = event.at - self._away_since
        if away_s < AWAY_TOLD_S:
            return None
        said = Sentence(
            "the coordinator has not answered for {time}: {message}",
            time=duration(away_s),
            message=event.message,
        )
        return OwnerAlert(kind="away", message=said)


class OwnerAlerts:
    """Follows the events of one volunteer and notifies its owner.

    `display` returns the settings in force, `run` runs the system's program that notifies.
    """

    def __init__(
        self,
        hub: EventBus,
        display: Callable[[], Display],
        run: Run,
        system: str = sys.platform,
    ) -> None:
        self._hub = hub
        self._display = display
        self._run = run
        self._system = system
        self._watch = AlertRules()
        self._under_way: set[asyncio.Task[None]] = set()
        self._complained: set[str] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Listen until the block ends, and a moment longer for notifications under way."""
        with self._hub.subscribe() as new:
            listening = asyncio.create_task(self._listen(new))
            try:
                yield
            finally:
                new.close()
                await listening
                if self._under_way:
                    await asyncio.wait(self._under_way, timeout=TELL_S)
                for task in self._under_way:
                    task.cancel()

    async def _listen(self, new: Subscription) -> None:
        async for event in new:
            alert = self._watch.hear(event)
            if alert is not None:
                self.tell(alert)

    def tell(self, alert: OwnerAlert) -> None:
        """Start telling, by all the ways that were chosen."""
        display = self._display()
        said = printable(alert.message, CHARS_MAX)
        if display.alerts:
            self._hub.emit(events.Alerted(message=said, bell="bell" in display.alerts))
        message = printable(shown(said), CHARS_MAX)  # what leaves the program
        if "desktop" in display.alerts:
            self._start(self._desktop(message))

    def _start(self, work: Awaitable[str]) -> None:
        async def telling() -> None:
            trouble = await work
            if trouble and trouble not in self._complained:  # once is enough
                self._complained.add(trouble)
                self._hub.notice(trouble, "warning")

        task = asyncio.create_task(telling())
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _desktop(self, message: str) -> str:
        command, environment = notification(self._system, message)
        trouble = await asyncio.to_thread(self._run, command, environment)
        return (
            Sentence("the desktop notification failed: {trouble}", trouble=trouble)
            if trouble
            else ""
        )


# Notification programs of the systems. The message is an argument or a variable, never part of a
# script.
_MAC = (
    "on run argv",
    "display notification (item 2 of argv) with title (item 1 of argv)",
    "end run",
)
_WINDOWS = (
    "Add-Type -AssemblyName System.Windows.Forms,System.Drawing; "
    "$n = New-Object System.Windows.Forms.NotifyIcon; "
    "$n.Icon = [System.Drawing.SystemIcons]::Warning; $n.Visible = $true; "
    "$n.ShowBalloonTip(8000, $env:VOLUNTEER_ALERT_TITLE, $env:VOLUNTEER_ALERT, 'Warning'); "
    "Start-Sleep -Seconds 8; $n.Dispose()"
)


def notification(system: str, message: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command that shows a message on the desktop, and the variables it needs."""
    if system == "darwin":
        script = tuple(part for line in _MAC for part in ("-e", line))
        return ("osascript", *script, TITLE, message), {}
    if system == "win32":
        command = ("powershell", "-NoProfile", "-NonInteractive", "-Command", _WINDOWS)
        return command, {"VOLUNTEER_ALERT_TITLE": TITLE, "VOLUNTEER_ALERT": message}
    plain = message.replace("&", "&amp;").replace("<", "&lt;")  # a notification may hold markup
    return ("notify-send", f"--app-name={TITLE}", "--", TITLE, plain), {}


def run_quietly(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a small program of the system. Returns the failure, or ""."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | environment,
            timeout=TELL_S,
            check=False,
        )
    except FileNotFoundError:
        return Sentence("the program {command} is not installed", command=command[0])
    except (OSError, subprocess.SubprocessError) as error:
        return Sentence("{command} cannot be run: {error}", command=command[0], error=error)
    if done.returncode == 0:
        return ""
    said = printable(done.stderr.decode(errors="replace").strip(), CHARS_MAX)
    return Sentence(
        "{command} failed: {why}", command=command[0], why=said or f"status {done.returncode}"
    )
