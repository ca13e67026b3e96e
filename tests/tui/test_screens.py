"""Every page in every state and size, as text; what one of them must say is asserted in its own file.

Texts lie in `__snapshots__`; look at them before renewing one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from textual.pilot import Pilot

from tests.tui import scenes
from tests.tui.engine import FakeEngine, opened
from tests.tui.pages import REFUSED, SIZES, prepared, settle, shows
from volunteer.control import events
from volunteer.tui import keys
from volunteer.tui.app import VolunteerApp
from volunteer.tui.appearance import Look
from volunteer.tui.widgets.table import Listing

PAGES = [page.name for page in keys.PAGES]
OF_DEVICES = ["dashboard", "device"]  # which show more than one


async def visit(app: VolunteerApp, pilot: Pilot[Any]) -> None:
    """Open every page, which asks for what it shows."""
    for page in PAGES:
        app.action_page(page)
        await settle(app, pilot)


async def walk(
    app: VolunteerApp,
    pilot: Pilot[Any],
    stored: SnapshotAssertion,
    pages: Sequence[str],
    sizes: Iterable[str],
) -> None:
    """Compare these pages at these sizes with what is stored."""
    for page in pages:
        app.action_page(page)
        await settle(app, pilot)
        await shows(app, pilot, stored, page, sizes)


@pytest.mark.parametrize("state", ["filled", "empty", "paused"])
async def test_screen(engine: FakeEngine, stored: SnapshotAssertion, state: str) -> None:
    async with opened(prepared(engine, state), scenes.SCENES[state]()) as (app, pilot):
        await walk(app, pilot, stored, PAGES, SIZES)


async def test_screen_of_trouble(engine: FakeEngine, stored: SnapshotAssertion) -> None:
    """The queries fail, and then the volunteer."""
    async with opened(prepared(engine, "error")) as (app, pilot):
        await visit(app, pilot)
        await engine.play(scenes.error())
        await settle(app, pilot)
        app.clear_notifications()  # which would go away some time
        await walk(app, pilot, stored, PAGES, SIZES)


async def test_screen_offline(engine: FakeEngine, stored: SnapshotAssertion) -> None:
    """Answers of before stay on the screen, and grow old."""
    async with opened(prepared(engine), scenes.filled()) as (app, pilot):
        await visit(app, pilot)
        engine.refuses = REFUSED
        await engine.clock.advance(130)
        away = events.Connection(
            online=False,
            message="Little Lab does not answer: connection refused",
            retry_at=engine.clock.now() + 42,
            queued=2,
        )
        await engine.play([away])
        await walk(app, pilot, stored, PAGES, SIZES)


async def test_screen_of_other_terminals(engine: FakeEngine, stored: SnapshotAssertion) -> None:
    async with opened(prepared(engine), scenes.filled()) as (app, pilot):
        await walk(app, pilot, stored, PAGES, ["60x16"])
        await walk(app, pilot, stored, ["device", "settings", "log"], ["200x60"])


@pytest.mark.parametrize("state", ["two devices", "measuring", "live"])
async def test_screen_of_devices(engine: FakeEngine, stored: SnapshotAssertion, state: str) -> None:
    async with opened(prepared(engine), scenes.SCENES[state]()) as (app, pilot):
        sizes = [*SIZES] if state != "live" else ["60x16", "80x24", "120x36", "200x60"]
        await walk(app, pilot, stored, OF_DEVICES, sizes)


async def test_screen_in_seven_bits(engine: FakeEngine, stored: SnapshotAssertion) -> None:
    async with opened(prepared(engine), scenes.filled(), look=Look(ascii=True)) as (app, pilot):
        await walk(app, pilot, stored, PAGES, ["80x24"])


@pytest.mark.parametrize("size", [(40, 8), (40, 12), (80, 12), (120, 13)])
async def test_a_low_terminal_shows_the_list_of_each_page(
    engine: FakeEngine, size: tuple[int, int]
) -> None:
    async with opened(prepared(engine), scenes.filled(), size=size) as (app, pilot):
        for page in PAGES:
            app.action_page(page)
            await settle(app, pilot)
            for listing in app.screen.query(Listing):
                # the titles of the columns, and a row
                assert listing.content_size.height >= 2, page
