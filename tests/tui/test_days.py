"""Calendar of the days worked, and marks that are told quietly."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.pilot import Pilot

from tests.tui import scenes
from tests.tui.engine import FakeEngine, open_app, opened, screen_text
from tests.tui.pages import EVERY_SIZE, Snapshot, prepared, settle
from tests.tui.test_samples import look
from volunteer.control import events
from volunteer.tui.app import VolunteerApp
from volunteer.tui.look import Look
from volunteer.tui.screens.days import Days
from volunteer.tui.text import ASCII
from volunteer.tui.widgets.calendar import calendar_lines, rank_line, summary_lines
from volunteer.tui.widgets.panel import Scene

PAGE = Look(page="leaderboard")
TODAY = date(2023, 11, 14)


@pytest.mark.parametrize("size", EVERY_SIZE)
def test_picture(engine: FakeEngine, snap_compare: Snapshot, size: str) -> None:
    prepared(engine)

    async def before(pilot: Pilot[Any]) -> None:
        assert isinstance(pilot.app, VolunteerApp)
        await pilot.pause()
        await engine.play(scenes.filled())
        await settle(pilot.app, pilot)
        await look(pilot.app, pilot, "d")

    assert snap_compare(open_app(engine, PAGE), terminal_size=EVERY_SIZE[size], run_before=before)


async def test_it_opens_from_the_ranks_and_closes(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        text = await look(app, pilot, "d")
        assert "Credits by day" in text
        assert "this week" in text
        assert "last week" in text
        assert "3rd now, 14th on 2 May" in text
        await look(app, pilot, "d")
        assert not isinstance(app.screen, Days)


async def test_the_keys_of_a_page_can_be_clicked_in_the_footer(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), size=(120, 36), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        row = screen_text(app).splitlines()[35]
        await pilot.click(offset=(row.index("calendar"), 35))
        await settle(app, pilot)
        assert "Credits by day" in screen_text(app)


async def test_a_mark_is_a_line_and_never_a_question(engine: FakeEngine) -> None:
    mark = events.Celebrated(at=scenes.NOW, message="100 contributions merged")
    async with opened(prepared(engine), scenes.filled(), size=(120, 36)) as (app, pilot):
        await engine.play([mark])
        await pilot.pause()
        assert "◆ 100 contributions merged" in screen_text(app)
        assert len(app.screen_stack) == 1
    quiet = Look(marks="off")
    async with opened(FakeEngine(), scenes.filled(), size=(120, 36), look=quiet) as (app, pilot):
        await pilot.pause()
        assert "100 contributions" not in screen_text(app)


_days = st.dictionaries(
    st.integers(0, 800).map(lambda n: TODAY - timedelta(days=n)), st.integers(0, 10**12)
)


@given(_days, st.integers(1, 220))
def test_any_days_fit_into_any_width(days: dict[date, int], cells: int) -> None:
    scene = Scene(now=scenes.NOW, glyphs=ASCII)
    lines = calendar_lines(days, TODAY, scene, cells)
    assert len(lines) == 8
    ranked = [(day, 1 + n) for n, day in enumerate(sorted(days))]
    for line in (*lines, *summary_lines(days, TODAY, scene, cells)):
        assert "".join(text for text, _ in line).isprintable()
    assert rank_line(ranked, scene, cells)
    if cells >= 10:
        assert all(sum(len(text) for text, _ in line) <= cells for line in lines)
