"""Walking through the first start, step by step, and what each step looks like."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from textual.pilot import Pilot
from textual.widgets import Input

from tests.tui import scenes
from tests.tui.engine import FakeEngine, open_app, opened
from tests.tui.pages import LINK, SIZES, Snapshot, prepared, settle
from volunteer.control import events
from volunteer.control.events import AnyEvent
from volunteer.tui.app import VolunteerApp
from volunteer.tui.appearance import Look

PAGE = Look(page="onboarding")

MET = (
    *scenes.started(),
    events.Paused(device="", by="you", message="press space to start", until="you start"),
)

STEPS = ("join", "found", "name", "limits", "measuring", "measured", "run", "ready")


async def tell(app: VolunteerApp, pilot: Pilot[Any], engine: FakeEngine, link: str) -> None:
    """Type a link and wait until the coordinator was probed."""
    app.screen.query_one("#link", Input).value = link
    await pilot.pause()
    await engine.clock.advance(1)
    await settle(app, pilot)


async def onward(
    app: VolunteerApp,
    pilot: Pilot[Any],
    engine: FakeEngine,
    step: str,
    met: Iterable[AnyEvent] = MET,
) -> None:
    """Go from the step before to this one; `met` is what a coordinator tells who has joined it."""
    match step:
        case "found":
            await tell(app, pilot, engine, LINK)
        case "name":
            await pilot.press("enter")
        case "limits":
            await pilot.press(*"ada", "enter")
        case "measuring":
            await pilot.press("enter")
            await settle(app, pilot)
            await engine.play([*met, events.BenchmarkProgress(stage="step", done=0.6)])
        case "measured":
            await engine.play([events.Benchmarked(benchmark=scenes.BENCHMARK)])
        case "run" | "ready":
            await pilot.press("enter")
    await settle(app, pilot)


async def walk(
    app: VolunteerApp,
    pilot: Pilot[Any],
    engine: FakeEngine,
    to: str,
    met: Iterable[AnyEvent] = MET,
) -> None:
    """Go through the steps up to one of them."""
    for step in STEPS[: STEPS.index(to) + 1]:
        await onward(app, pilot, engine, step, met)


@asynccontextmanager
async def at(
    engine: FakeEngine, step: str, told: Iterable[AnyEvent] = ()
) -> AsyncIterator[tuple[VolunteerApp, Pilot[int]]]:
    async with opened(prepared(engine), told, look=PAGE) as (app, pilot):
        await walk(app, pilot, engine, step)
        yield app, pilot


def drawn(
    engine: FakeEngine,
    compare: Snapshot,
    step: str,
    *,
    size: tuple[int, int] = SIZES["80x24"],
    look: Look = PAGE,
    then: str = "",
) -> bool:
    """Return True if a step looks as in its snapshot; `then` is a link that is typed at its end."""

    async def before(pilot: Pilot[Any]) -> None:
        assert isinstance(pilot.app, VolunteerApp)
        await walk(pilot.app, pilot, engine, step)
        if then:
            await tell(pilot.app, pilot, engine, then)

    return compare(open_app(engine, look), terminal_size=size, run_before=before)
