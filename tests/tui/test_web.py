"""The key that opens the public page of a run."""

from __future__ import annotations

import asyncio

import pytest

from tests.tui import scenes
from tests.tui.engine import FakeEngine, opened, screen_text
from tests.tui.pages import prepared, settle
from volunteer.control import events
from volunteer.tui.appearance import Look


@pytest.mark.parametrize("page", ["dashboard", "runs"])
async def test_o_opens_the_page_and_says_how_to_be_left_out_of_it(
    engine: FakeEngine, page: str
) -> None:
    prepared(engine)
    opens: list[str] = []

    async def opener(address: str) -> bool:
        opens.append(address)
        return True

    async with opened(engine, scenes.filled(), size=(120, 36), look=Look(page=page)) as (
        app,
        pilot,
    ):
        app.opener = opener
        await engine.play([events.Credits(me=scenes.ME)])
        await settle(app, pilot)
        await pilot.press("o")
        await settle(app, pilot)
        assert len(opens) == 1
        assert opens[0].startswith("http")
        assert "/runs/" in opens[0]
        assert opens[0] in screen_text(app).replace("\n", "") or "opening" in screen_text(app)
        assert "hides it" in screen_text(app)


async def test_without_a_browser_the_address_is_shown(engine: FakeEngine) -> None:
    prepared(engine)

    async def none(address: str) -> bool:
        return False

    async with opened(engine, scenes.filled(), size=(120, 36)) as (app, pilot):
        app.opener = none
        await settle(app, pilot)
        await pilot.press("o")
        await settle(app, pilot)
        assert "/runs/" in screen_text(app)
        assert "Open this address" in screen_text(app)


async def test_the_keys_work_while_a_browser_starts(engine: FakeEngine) -> None:
    prepared(engine)
    started = asyncio.Event()

    async def slow(address: str) -> bool:
        await started.wait()
        return True

    async with opened(engine, scenes.filled()) as (app, pilot):
        app.opener = slow
        await settle(app, pilot)
        async with asyncio.timeout(20):
            await pilot.press("o")
            await pilot.press("2")
        assert app.current_mode == "runs"
        started.set()
