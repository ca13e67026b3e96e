"""A picture in half blocks, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from textual.app import ComposeResult
from textual.screen import Screen
from typing_extensions import override

from shared.errors import BadRequest
from shared.workloads.data.image_files import write_png
from tests.support.sources import ROOT
from tests.tui.engine import screen_text
from volunteer.tui.app import VolunteerApp
from volunteer.tui.widgets.pictures import SIDE_MAX, UPPER, decoded, png_of
from volunteer.tui.widgets.sample import PictureView


class OnePicture(Screen[None]):
    """A screen with nothing but a picture."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data

    @override
    def compose(self) -> ComposeResult:
        yield PictureView()

    def on_mount(self) -> None:
        self.run_worker(self.query_one(PictureView).show_png(self.data))


class Shown(VolunteerApp):
    """A program that shows one picture."""

    CSS_PATH = str(ROOT / "volunteer/tui/app.tcss")

    def __init__(self, data: bytes) -> None:
        super().__init__(tick_s=None)
        self.data = data

    @override
    def on_mount(self) -> None:
        self.push_screen(OnePicture(self.data))


def png(width: int = 8, height: int = 8) -> bytes:
    return write_png(np.full((height, width, 3), (250, 10, 20), np.uint8))


def test_a_large_picture_is_made_smaller_and_stays_in_shape() -> None:
    found = decoded(png(2 * SIDE_MAX, SIDE_MAX))
    assert (found.width, found.height) == (SIDE_MAX, SIDE_MAX // 2)
    assert decoded(png_of(found)) == found
    with pytest.raises(BadRequest):
        decoded(b"\x1b[2J no picture")


async def test_a_picture_is_drawn_in_half_blocks() -> None:
    app = Shown(png())
    async with app.run_test(size=(20, 6)) as pilot:
        await pilot.pause()
        await app.workers.wait_for_complete()
        await pilot.pause()
        view = app.screen.query_one(PictureView)
        assert UPPER * 12 in screen_text(app)
        with pytest.raises(BadRequest):
            await view.show_png(b"nothing")
        await view.show_png(None)
        await pilot.pause()
        assert UPPER not in screen_text(app)
