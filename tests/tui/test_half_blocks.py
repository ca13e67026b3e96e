"""Pictures of versions in the app: fetched, made small, shown in two colours a cell."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from shared.errors import BadRequest
from shared.workloads.data.image_files import write_png
from tests.tui import scenes
from tests.tui.engine import FakeEngine, opened, screen_text
from volunteer.agent.run_watcher import SIDE, thumbnail
from volunteer.control import events
from volunteer.control.events import Picture
from volunteer.tui.agent_view import AgentView, reduce
from volunteer.tui.appearance import Look
from volunteer.tui.widgets.pictures import before_and_after, half_blocks


def plain(width: int, height: int, colour: tuple[int, int, int]) -> Picture:
    return Picture(width=width, height=height, pixels=bytes(colour) * (width * height))


def measured(version: int, picture: Picture | None) -> events.LossMeasured:
    return events.LossMeasured(
        run=scenes.RUN.name, version=version, loss=3.0, mine=0, sample="⣿", picture=picture
    )


def test_a_thumbnail_is_the_corner_small(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    pixels = np.zeros((400, 200, 3), np.uint8)
    pixels[:200, :100] = (10, 20, 30)
    path.write_bytes(write_png(pixels))
    found = thumbnail(path)
    assert found == plain(SIDE // 2, SIDE, (10, 20, 30))
    path.write_bytes(write_png(np.full((8, 8), 7, np.uint8)))
    assert thumbnail(path) == plain(4, 4, (7, 7, 7))
    path.write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    with pytest.raises(BadRequest):
        thumbnail(path)


def test_two_pixels_share_a_cell() -> None:
    two = Picture(width=1, height=2, pixels=bytes((255, 0, 0, 0, 0, 255)))
    assert half_blocks(two, 1, 1) == ((("▀", "#ff0000/#0000ff"),),)
    mean = Picture(width=2, height=2, pixels=bytes((0, 0, 0, 100, 100, 100) * 2))
    assert half_blocks(mean, 1, 1) == ((("▀", "#323232/#323232"),),)


@given(
    st.integers(1, 30), st.integers(1, 30), st.integers(1, 80), st.integers(1, 20), st.booleans()
)
def test_it_fits_into_any_room(width: int, height: int, cells: int, rows: int, both: bool) -> None:
    picture = plain(width, height, (1, 2, 3))
    first = (0, picture) if both else None
    lines = before_and_after(first, (9, picture), cells, rows)
    assert 1 <= len(lines) <= rows
    assert {sum(cell_len(text) for text, _ in line) for line in lines} <= set(range(cells + 1))


def test_the_view_keeps_the_oldest_and_the_newest_picture() -> None:
    view = AgentView()
    for version, picture in ((5, plain(1, 1, (5, 5, 5))), (0, plain(1, 1, (0, 0, 0))), (7, None)):
        view = reduce(view, measured(version, picture), view.status)
    model = view.models[scenes.RUN.name]
    assert (model.first_picture, model.last_picture) == (
        (0, plain(1, 1, (0, 0, 0))),
        (5, plain(1, 1, (5, 5, 5))),
    )
    assert model.last_sample == (7, "⣿")


@pytest.mark.parametrize("seven_bits", [False, True])
async def test_the_dashboard_shows_both(engine: FakeEngine, seven_bits: bool) -> None:
    told = [
        *scenes.filled(),
        measured(0, plain(8, 8, (10, 10, 10))),
        measured(99, plain(8, 8, (200, 90, 10))),
    ]
    async with opened(engine, told, size=(120, 36), look=Look(ascii=seven_bits)) as (app, pilot):
        shown = screen_text(app)
        assert "version 0" in shown
        assert "version 99" in shown
        assert ("▀▀▀▀" in shown) != seven_bits
        for size in ((80, 24), (60, 16)):
            await pilot.resize_terminal(*size)
            app.redraw()
            assert not seven_bits or screen_text(app).isascii()
