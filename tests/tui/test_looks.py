"""Every page without colours, in seven bits, in high contrast and at every size: state is told by
signs and words, never by colour alone, and no terminal is too small.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rich.color import ColorSystem
from textual.color import Color
from textual.pilot import Pilot

from tests.tui import scenes
from tests.tui.engine import FakeEngine, open_app, opened, screen_text
from tests.tui.pages import Snapshot, picture, prepared, settle
from volunteer.settings.display import Display
from volunteer.tui import themes
from volunteer.tui.app import VolunteerApp
from volunteer.tui.appearance import Look, look_of
from volunteer.tui.text import ROLES

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


async def test_no_colour_at_all_reaches_a_terminal_that_wants_none(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither ink nor ground: a light terminal stays light. Signs tell what colours told."""
    monkeypatch.setenv("NO_COLOR", "1")
    async with opened(prepared(engine), scenes.filled(), look=Look(page="settings")) as (
        app,
        pilot,
    ):
        await settle(app, pilot)
        await pilot.press("down")
        await settle(app, pilot)
        styles = []
        for strip in app.screen._compositor.render_strips():
            segments = list(strip)
            for line_filter in app.get_line_filters():
                segments = line_filter.apply(segments, app.screen.background_colors[1])
            styles += [segment.style for segment in segments if segment.style and segment.text]
        assert all(style.color is None and style.bgcolor is None for style in styles)
        for told in ("reverse", "bold", "dim"):
            assert any(getattr(style, told) for style in styles), told


@pytest.mark.parametrize("theme", [theme.name for theme in themes.THEMES])
def test_every_role_can_be_read_in_sixteen_colours(theme: str) -> None:
    """A terminal of sixteen colours shows text in another of them than its ground."""
    app = open_app(FakeEngine(), Look(theme=theme))
    app.theme = theme
    colours = app.theme_variables

    def sixteen(name: str) -> int | None:
        named = Color.parse(colours[name]).rich_color
        return named.downgrade(ColorSystem.STANDARD).number

    for role, look in ROLES.items():
        papers = [look.paper] if look.paper else ["background", "surface"]
        if role not in ("track", "faint"):
            assert all(sixteen(look.ink) != sixteen(paper) for paper in papers), role


@pytest.mark.parametrize("page", ["device", "settings", "log"])
def test_picture_on_a_light_terminal(engine: FakeEngine, snap_compare: Snapshot, page: str) -> None:
    assert picture(engine, snap_compare, page, look=Look(theme="volunteer-light"))


@pytest.mark.parametrize("terminal", ["linux", "xterm-256color"])
def test_a_text_console_gets_plain_characters(terminal: str) -> None:
    look = look_of(Display(), {"TERM": terminal}, "dashboard")
    assert look.ascii == (terminal == "linux")
    assert look_of(Display(ascii=True), {"TERM": terminal}, "dashboard").ascii


def test_picture_in_high_contrast(engine: FakeEngine, snap_compare: Snapshot) -> None:
    assert picture(engine, snap_compare, "history", look=Look(theme="volunteer-high-contrast"))


@pytest.mark.parametrize("told", ["filled", "empty"])
async def test_no_size_breaks_a_page(engine: FakeEngine, told: str) -> None:
    async with opened(prepared(engine, told), scenes.SCENES[told]()) as (app, pilot):
        for page in (*PAGES, "onboarding"):
            app.action_page(page)
            await settle(app, pilot)
            await fits(app, pilot, EDGES if told == "filled" else EDGES[::3])


async def test_no_size_breaks_a_dialog(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled()) as (app, pilot):
        for key in ("q", "question_mark", "ctrl+p"):
            await pilot.press(key)
            await pilot.pause()
            assert len(app.screen_stack) > 1
            await fits(app, pilot, EDGES)
            await pilot.press("escape")


async def fits(app: VolunteerApp, pilot: Pilot[int], sizes: Sequence[tuple[int, int]]) -> None:
    """Check that no row is longer than the terminal, whatever its size."""
    for width, height in sizes:
        await pilot.resize_terminal(width, height)
        app.redraw()
        await pilot.pause()
        assert all(len(row) <= width for row in screen_text(app).splitlines())
