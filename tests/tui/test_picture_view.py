"""A picture by the terminal's own protocol where it has one, in half blocks elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from textual.app import ComposeResult
from textual.screen import Screen

from shared.errors import BadRequest
from shared.workloads.data.image_files import write_png
from tests.support.sources import ROOT
from tests.tui.engine import screen_text
from tests.tui.terminal import Terminal
from volunteer.tui.app import VolunteerApp
from volunteer.tui.look import Look
from volunteer.tui.terminal.graphics import Protocol, protocol
from volunteer.tui.widgets.picture_view import PictureView
from volunteer.tui.widgets.pictures import SIDE_MAX, UPPER, decoded, png_of

ASKS = "from volunteer.tui.terminal.graphics import protocol; print('it is', protocol({}))"
SHOWS = """
import sys
from pathlib import Path
from tests.tui.test_picture_view import Shown
from volunteer.tui.terminal.graphics import protocol
Shown(protocol(sys.argv[1]), Path(sys.argv[2]).read_bytes()).run()
"""
SEEN_BY_THEM = ("SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY", "TERM_PROGRAM")


class OnePicture(Screen[None]):
    """A screen with nothing but a picture."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data

    def compose(self) -> ComposeResult:
        yield PictureView()

    def on_mount(self) -> None:
        self.run_worker(self.query_one(PictureView).show(self.data))


class Shown(VolunteerApp):
    """A program that shows one picture."""

    CSS_PATH = str(ROOT / "volunteer/tui/app.tcss")

    def __init__(self, how: Protocol, data: bytes) -> None:
        super().__init__(look=Look(pictures=how), tick_s=None)
        self.data = data

    def on_mount(self) -> None:
        self.push_screen(OnePicture(self.data))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SEEN_BY_THEM:
        monkeypatch.delenv(name, raising=False)


def png(width: int = 8, height: int = 8) -> bytes:
    return write_png(np.full((height, width, 3), (250, 10, 20), np.uint8))


def test_a_large_picture_is_made_smaller_and_stays_in_shape() -> None:
    found = decoded(png(2 * SIDE_MAX, SIDE_MAX))
    assert (found.width, found.height) == (SIDE_MAX, SIDE_MAX // 2)
    assert decoded(png_of(found)) == found
    with pytest.raises(BadRequest):
        decoded(b"\x1b[2J no picture")


async def test_half_blocks_where_the_terminal_draws_no_pictures() -> None:
    app = Shown("blocks", png())
    async with app.run_test(size=(20, 6)) as pilot:
        await pilot.pause()
        await app.workers.wait_for_complete()
        await pilot.pause()
        view = app.screen.query_one(PictureView)
        assert UPPER * 12 in screen_text(app)
        with pytest.raises(BadRequest):
            await view.show(b"nothing")
        await view.show(None)
        await pilot.pause()
        assert UPPER not in screen_text(app)


def test_the_terminal_is_asked_where_its_name_promises_a_reply() -> None:
    for told, reply, expected in (
        ("foot", "\x1b[?62;4c", "sixel"),
        ("foot", "\x1b[?62;22c", "blocks"),
        ("xterm-256color", "", "blocks"),  # not asked: it may never answer
    ):
        program = ASKS.format("'auto'")
        with Terminal([sys.executable, "-c", program], TERM=told, PYTHONPATH=str(ROOT)) as terminal:
            terminal.press(reply)
            terminal.see(f"it is {expected}")
            assert terminal.ended() == 0


def test_nobody_is_asked_over_ssh_or_without_a_terminal() -> None:
    program = ASKS.format("'auto'")
    remote = {"TERM": "foot", "SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22", "PYTHONPATH": str(ROOT)}
    with Terminal([sys.executable, "-c", program], **remote) as terminal:
        terminal.see("it is blocks")
        assert terminal.ended() == 0
    assert protocol("kitty") == "blocks"


@pytest.mark.parametrize(("how", "code"), [("kitty", "_Gi="), ("sixel", "\x1bP0;0;0q")])
def test_a_protocol_of_the_terminal_draws_and_is_cleared(
    tmp_path: Path, how: Protocol, code: str
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png(64, 64))
    command = [sys.executable, "-c", SHOWS, how, str(path)]
    with Terminal(command, PYTHONPATH=str(ROOT)) as terminal:
        terminal.see(code)
        terminal.press("\x11")
        if how == "kitty":
            terminal.see("_Ga=d")  # the terminal may forget it
        assert terminal.ended() == 0
