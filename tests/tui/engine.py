"""Volunteer that only emits the events of a test.

The real `Control` over the real event hub, with a clock that stands; only the execution of commands
is replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeGuard

from textual.app import App
from textual.color import Color
from textual.pilot import Pilot

from shared.errors import VolunteerError
from shared.protocol import endpoints
from shared.protocol.endpoint import Endpoint
from tests.support.virtual_clock import VirtualClock
from volunteer.control import commands, events
from volunteer.control.commands import Command
from volunteer.control.control import Control
from volunteer.control.event_bus import EventBus
from volunteer.control.events import AnyEvent
from volunteer.tui.app import VolunteerApp
from volunteer.tui.appearance import Look


class Paged(NamedTuple):
    """An answer to a query, with the cursor of the next page."""

    rows: Any
    cursor: str


class FakeEngine:
    """`asked` holds every command; `answers` has values by endpoint or command, of the versions
    perhaps a function of the query; `refuses` is raised instead.
    """

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.hub = EventBus(self.clock)
        self.control = Control(self.hub, self._execute)
        self.asked: list[Command[Any]] = []
        self.answers: dict[Any, Any] = {endpoints.VERSIONS: ()}
        self.recalled: list[str] = []  # runs whose past was asked for
        self.refuses: VolunteerError | None = None
        self.refuses_versions: VolunteerError | None = None  # raised to queries of a history

    async def play(self, told: Iterable[AnyEvent]) -> None:
        """Emit events, and let each listener take each one."""
        for event in told:
            self.hub.emit(event)
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _execute(self, command: Command[Any]) -> Any:
        if _is_query(command, endpoints.VERSIONS):  # the program's own wish, not a person's
            self.recalled.append(str(command.args["run"]))
            if self.refuses_versions is not None:
                raise self.refuses_versions
            rows = self.answers[endpoints.VERSIONS]
            return (rows(command.args) if callable(rows) else rows), ""
        self.asked.append(command)
        if self.refuses is not None:
            raise self.refuses
        match command:
            case commands.Pause():
                told: AnyEvent = events.Paused(
                    device=command.device,
                    by=command.by,
                    message=command.message,
                    until=command.until,
                )
            case commands.Resume():
                told = events.Resumed(device=command.device)
            case commands.Finish():
                told = events.Finishing(message="finishing: no new work after the current task")
            case commands.Stop():
                self.hub.close()
                return None
            case commands.Query():
                answer = self.answers.get(commands.query_of(command))
                answer = answer() if callable(answer) else answer
                return answer if isinstance(answer, Paged) else Paged(answer, "")
            case _:
                return self.answers.get(type(command))
        self.hub.emit(told)
        return None


def queries(engine: FakeEngine, endpoint: Endpoint[Any]) -> list[dict[str, str | int]]:
    """Return the arguments of every query of this endpoint, oldest first."""
    return [command.args for command in engine.asked if _is_query(command, endpoint)]


def _is_query(command: Command[Any], endpoint: Endpoint[Any]) -> TypeGuard[commands.Query]:
    return isinstance(command, commands.Query) and command.endpoint == endpoint.path


def open_app(engine: FakeEngine, look: Look | None = None) -> VolunteerApp:
    """Return the program in front of a test's volunteer; it draws on request, not by a timer."""
    return VolunteerApp(engine.control, look=look, clock=engine.clock, tick_s=None)


@asynccontextmanager
async def opened(
    engine: FakeEngine,
    told: Iterable[AnyEvent] = (),
    *,
    size: tuple[int, int] = (80, 24),
    look: Look | None = None,
) -> AsyncIterator[tuple[VolunteerApp, Pilot[int]]]:
    """A running program that has seen these events and drawn them."""
    app = open_app(engine, look)
    async with app.run_test(size=size, notifications=True) as pilot:
        await pilot.pause()
        await engine.play(told)
        app.redraw()
        await pilot.pause()
        yield app, pilot


def screen_text(app: App[int]) -> str:
    """Return the text on the screen, row by row."""
    strips = app.screen._compositor.render_strips()
    filters = app.get_line_filters()
    rows = []
    for strip in strips:
        segments = list(strip)
        for line_filter in filters:
            segments = line_filter.apply(segments, Color(0, 0, 0))
        rows.append("".join(segment.text for segment in segments).rstrip())
    return "\n".join(rows)
