"""The curve on the whole screen: cursor, zoom, pan, another run beside, and what the mouse does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from textual.events import MouseScrollUp
from textual.pilot import Pilot

from shared.protocol import endpoints
from shared.protocol.listings import LossPoint
from tests.tui import scenes
from tests.tui.engine import FakeEngine, open_app, opened
from tests.tui.pages import EVERY_SIZE, Snapshot, settle
from tests.tui.test_samples import TEXTS, look, telling
from volunteer.control import events
from volunteer.tui.app import VolunteerApp
from volunteer.tui.screens.chart import CurvePage
from volunteer.tui.text import UNICODE
from volunteer.tui.widgets.plot import Chart, Series, fitted, nearest, plot

LOSSES = tuple(LossPoint(version=n, loss=8.0 / (1 + n), at=scenes.NOW) for n in range(0, 201, 2))


def curved(engine: FakeEngine) -> FakeEngine:
    telling(engine, TEXTS)
    engine.answers[endpoints.LOSS] = LOSSES
    return engine


@pytest.mark.parametrize("size", EVERY_SIZE)
def test_picture(engine: FakeEngine, snap_compare: Snapshot, size: str) -> None:
    curved(engine)

    async def before(pilot: Pilot[Any]) -> None:
        assert isinstance(pilot.app, VolunteerApp)
        await pilot.pause()
        await engine.play(scenes.filled())
        await settle(pilot.app, pilot)
        await look(pilot.app, pilot, "c", "left", "left", "plus", "y")

    assert snap_compare(open_app(engine), terminal_size=EVERY_SIZE[size], run_before=before)


def reading(text: str) -> str:
    """Return the row below the curve."""
    return next(row for row in text.splitlines() if row.startswith(" stdlib-gpt version"))


async def test_the_cursor_reads_version_loss_who_and_mine(engine: FakeEngine) -> None:
    async with opened(curved(engine), scenes.filled(), size=(120, 36)) as (app, pilot):
        text = await look(app, pilot, "c")
        assert "version 200 0.040" in reading(text)
        text = await look(app, pilot, "home", *["right"] * 24)
        assert "version 24 0.320" in reading(text)  # between the points that the page knew
        assert "◆ mine" in reading(text)
        assert "3 contributions" in reading(text)
        await look(app, pilot, "end")
        assert isinstance(app.screen, CurvePage)
        assert app.screen.at is None  # follows what comes
        await look(app, pilot, "escape")
        assert not isinstance(app.screen, CurvePage)


def seen(app: VolunteerApp) -> tuple[tuple[float, float] | None, float | None]:
    """Return the part of the curve that is shown, and the cursor."""
    page = app.screen
    assert isinstance(page, CurvePage)
    return page.span, page.at


async def test_it_zooms_around_the_cursor_and_pans(engine: FakeEngine) -> None:
    async with opened(curved(engine), scenes.filled(), size=(120, 36)) as (app, pilot):
        await look(app, pilot, "c", "plus", "plus")
        assert seen(app) == ((150.0, 200.0), None)
        await look(app, pilot, "shift+left")
        assert seen(app) == ((138.0, 188.0), 188.0)  # stays in sight
        await look(app, pilot, *["minus"] * 3)
        assert seen(app)[0] is None
        await look(app, pilot, *["plus"] * 12)
        span = seen(app)[0]
        assert span is not None
        assert span[1] - span[0] == 4.0
        await look(app, pilot, "0")
        assert seen(app)[0] is None


async def test_another_run_of_the_same_measure_shares_the_scale(engine: FakeEngine) -> None:
    second = replace(scenes.RUN, name="second")
    third = replace(scenes.RUN, name="third", measure="Fréchet distance")
    told = [*scenes.filled(), events.RunsListed(runs=(scenes.RUN, second, third))]
    async with opened(curved(engine), told, size=(120, 36)) as (app, pilot):
        text = await look(app, pilot, "c", "n")
        assert "Loss of stdlib-gpt beside second" in text
        assert "second version 200, 0.040" in text
        assert "scale of its own" not in text
        text = await look(app, pilot, "n")
        assert "third version 200, 0.040 (on a scale of its own)" in text
        assert "beside" not in await look(app, pilot, "n")


async def test_a_click_reads_and_the_wheel_zooms(engine: FakeEngine) -> None:
    async with opened(curved(engine), scenes.filled(), size=(120, 36)) as (app, pilot):
        await look(app, pilot, "c")
        await pilot.click("#curve", offset=(60, 10))
        await settle(app, pilot)
        assert 80 < (seen(app)[1] or 0) < 120
        await pilot._post_mouse_events([MouseScrollUp], "#curve", offset=(60, 10), button=0)
        await settle(app, pilot)
        assert seen(app)[0] is not None


async def test_before_the_first_loss_every_key_is_harmless(engine: FakeEngine) -> None:
    telling(engine, [])
    engine.answers[endpoints.LOSS] = ()
    bare = replace(scenes.RUN, loss=None, loss_first=None)
    begun = [event for event in scenes.started() if not isinstance(event, events.RunsListed)]
    told = [*begun, events.RunsListed(runs=(bare,))]
    async with opened(engine, told, size=(80, 24)) as (app, pilot):
        await look(app, pilot, "c")
        page = app.screen
        assert isinstance(page, CurvePage)
        keys = ("left", "plus", "minus", "shift+left", "home", "0", "y", "n")
        text = await look(app, pilot, *keys)
        assert "the loss of each version appears here" in text


_floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
_curve = st.lists(st.tuples(_floats, _floats), max_size=30).map(sorted)


@given(_curve, _curve, _floats, st.integers(1, 90), st.integers(1, 30))
def test_any_part_of_any_curve_can_be_drawn(
    points: list[tuple[float, float]],
    other: list[tuple[float, float]],
    cursor: float,
    width: int,
    height: int,
) -> None:
    span = (cursor, cursor + 10.0)
    series = (
        Series(points=fitted(other, points), role="mean"),
        Series(points=points, role="model"),
    )
    chart = Chart(series=series, span=span, cursor=cursor)
    lines = plot(chart, width, height, UNICODE)
    assert len(lines) <= height
    assert all(sum(len(text) for text, _ in line) <= width for line in lines)


@given(_curve, _floats)
def test_the_cursor_finds_the_nearest_point(points: list[tuple[float, float]], x: float) -> None:
    found = nearest(points, x)
    if not points:
        assert found is None
    else:
        assert found in points
        assert abs(found[0] - x) == min(abs(p[0] - x) for p in points)
