"""Every page without colours, in seven bits, in high contrast and at every size: state is told by
signs and words, never by colour alone, and no terminal is too small.
"""

from __future__ import annotations

import pytest

from tests.tui import scenes
from tests.tui.engine import FakeEngine, opened, screen_text
from tests.tui.pages import Snapshot, picture, prepared, settle
from volunteer.tui.look import Look

PAGES = ("runs", "device", "history", "leaderboard", "settings", "log")
EDGES = [
    (1, 1),
    (2, 1),
    (1, 5),
    (10, 3),
    (29, 6),
    (40, 14),
    (59, 40),
    (60, 16),
    (79, 21),
    (240, 70),
]


async def test_without_colours_every_page_says_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[str]] = []
    for colours in (True, False):
        if not colours:
            monkeypatch.setenv("NO_COLOR", "1")
        async with opened(prepared(FakeEngine()), scenes.filled(), size=(120, 36)) as (
            app,
            pilot,
        ):
            seen.append([])
            for page in PAGES:
                app.action_page(page)
                await pilot.pause()
                await settle(app, pilot)
                seen[-1].append(screen_text(app))
    assert seen[0] == seen[1]


def test_picture_without_colours(
    engine: FakeEngine, snap_compare: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colours come from the theme alone, so one page stands for all."""
    monkeypatch.setenv("NO_COLOR", "1")
    assert picture(engine, snap_compare, "history")


@pytest.mark.parametrize("page", PAGES)
def test_picture_in_seven_bits(engine: FakeEngine, snap_compare: Snapshot, page: str) -> None:
    assert picture(engine, snap_compare, page, look=Look(ascii=True))


def test_picture_in_high_contrast(engine: FakeEngine, snap_compare: Snapshot) -> None:
    assert picture(engine, snap_compare, "history", look=Look(theme="volunteer-high-contrast"))


@pytest.mark.parametrize("page", [*PAGES, "onboarding"])
@pytest.mark.parametrize("told", ["filled", "empty"])
async def test_no_size_breaks_a_page(engine: FakeEngine, page: str, told: str) -> None:
    events = scenes.SCENES[told]()
    async with opened(prepared(engine, told), events, look=Look(page=page), size=(80, 24)) as (
        app,
        pilot,
    ):
        await settle(app, pilot)
        for width, height in EDGES:
            await pilot.resize_terminal(width, height)
            app.redraw()
            await pilot.pause()
            assert all(len(row) <= width for row in screen_text(app).splitlines())


@pytest.mark.parametrize("key", ["q", "question_mark", "ctrl+p"])
async def test_no_size_breaks_a_dialog(engine: FakeEngine, key: str) -> None:
    async with opened(engine, scenes.filled()) as (app, pilot):
        await pilot.press(key)
        for width, height in EDGES:
            await pilot.resize_terminal(width, height)
            await pilot.pause()
            assert all(len(row) <= width for row in screen_text(app).splitlines())
