"""Viewer of samples: text, pictures and boards of every version, one beside another."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion
from textual.pilot import Pilot
from typing_extensions import override

from shared.protocol import endpoints
from shared.protocol.versions import BlobRef, VersionInfo
from shared.workloads.data.image_files import write_png
from tests.tui import scenes
from tests.tui.engine import FakeEngine, open_app, opened, queries, screen_text
from tests.tui.pages import EVERY_SIZE, REFUSED, Snapshot, prepared, settle, shows
from volunteer.control import commands, events
from volunteer.control.commands import Command
from volunteer.tui.app import VolunteerApp
from volunteer.tui.appearance import Look
from volunteer.tui.sample_history import SampleHistory
from volunteer.tui.screens.version_samples import SamplesPage
from volunteer.tui.widgets.sample import text_rows

PAGE_ROWS = 100  # of a coordinator of this test
BOARD = "1. b6 b2\nO wins\n\n 2 X · O\n 1 · O ·\n   a b c"


def version(number: int, sample: str = "", **more: Any) -> VersionInfo:
    return VersionInfo(
        version=number,
        kind="merge",
        created_at=scenes.NOW - 3600 + number,
        contributions=3,
        global_step=number,
        tokens=0,
        published_sha256="",
        loss=8.0 / (1 + number) if sample else None,
        evaluation="done" if sample else "skipped",
        sample=sample,
        mine=number % 2,
        **more,
    )


def telling(engine: FakeEngine, rows: Sequence[VersionInfo]) -> FakeEngine:
    """Let the coordinator tell this history, page by page."""

    def page(args: Mapping[str, Any]) -> tuple[VersionInfo, ...]:
        after = int(args.get("cursor") or -1)
        return tuple(row for row in rows if row.version > after)[:PAGE_ROWS]

    prepared(engine)
    engine.answers[endpoints.VERSIONS] = page
    return engine


TEXTS = [version(n, f"def sample_{n}():\n    return {n}" if n % 3 == 0 else "") for n in range(43)]


async def look(app: VolunteerApp, pilot: Pilot[Any], *keys: str) -> str:
    """Press keys and return what is on the screen then."""
    for key in keys:
        await pilot.press(key)
        await settle(app, pilot)
    return screen_text(app)


async def test_screen(engine: FakeEngine, stored: SnapshotAssertion) -> None:
    telling(engine, TEXTS)
    async with opened(engine, scenes.filled()) as (app, pilot):
        await look(app, pilot, "m", "left_square_bracket")
        await shows(app, pilot, stored, "texts", EVERY_SIZE)


def test_picture(engine: FakeEngine, snap_compare: Snapshot) -> None:
    telling(engine, TEXTS)

    async def before(pilot: Pilot[Any]) -> None:
        assert isinstance(pilot.app, VolunteerApp)
        await pilot.pause()
        await engine.play(scenes.filled())
        await look(pilot.app, pilot, "m", "left_square_bracket")

    assert snap_compare(open_app(engine), terminal_size=(120, 36), run_before=before)


@pytest.mark.parametrize("page", ["dashboard", "runs"])
async def test_it_opens_from_home_and_runs_and_closes_again(engine: FakeEngine, page: str) -> None:
    telling(engine, TEXTS)
    async with opened(engine, scenes.filled(), size=(120, 36), look=Look(page=page)) as (
        app,
        pilot,
    ):
        await settle(app, pilot)
        assert "m samples" in screen_text(app)
        text = await look(app, pilot, "m")
        assert "version 42 of 42" in text
        assert "def sample_0" in text
        assert "    return 42" in text  # indented as it was
        assert isinstance(app.screen, SamplesPage)
        await look(app, pilot, "escape")
        assert app.current_mode == page
        assert not isinstance(app.screen, SamplesPage)


async def test_the_slider_stops_at_versions_with_a_sample(engine: FakeEngine) -> None:
    telling(engine, TEXTS)
    async with opened(engine, scenes.filled(), size=(120, 36)) as (app, pilot):
        text = await look(app, pilot, "m", "left_square_bracket")
        assert "version 39 of 42" in text
        assert "loss 0.200, 3 contributions, 1 of them yours" in text
        assert "version 42 of" in await look(app, pilot, "right_square_bracket")
        assert "version 30 of" in await look(app, pilot, "left_curly_bracket")
        assert "version 0 of" in await look(app, pilot, "home", "left_square_bracket")
        assert "version 42 of" in await look(app, pilot, "end", "right_square_bracket")


async def test_any_version_can_be_compared_with_another(engine: FakeEngine) -> None:
    telling(engine, TEXTS)
    async with opened(engine, scenes.filled(), size=(120, 36)) as (app, pilot):
        text = await look(app, pilot, "m", "left_square_bracket", "full_stop", "end")
        assert "sample_39" in text
        assert "sample_42" in text
        assert "sample_39" not in await look(app, pilot, "b")


async def test_a_version_that_comes_while_the_newest_is_shown_is_shown(engine: FakeEngine) -> None:
    telling(engine, TEXTS[:40])
    async with opened(engine, scenes.filled(), size=(120, 36)) as (app, pilot):
        assert "version 39 of" in await look(app, pilot, "m")
        telling(engine, TEXTS)
        await engine.clock.advance(5)
        await settle(app, pilot)
        assert "version 42 of" in screen_text(app)
        text = await look(app, pilot, "left_square_bracket")
        telling(engine, [*TEXTS, version(43, "newest of all")])
        await engine.clock.advance(5)
        await settle(app, pilot)
        assert "version 39 of" in text  # who looks at an older one is left alone
        assert "version 39 of" in screen_text(app)


async def test_a_picture_is_fetched_and_drawn_as_large_as_there_is_room(engine: FakeEngine) -> None:
    drawn = [version(n, "⣿⣿\n⣿⣿\n⣿⣿", picture=BlobRef(sha256="", size=9)) for n in range(3)]
    telling(engine, drawn)
    engine.answers[commands.GetPicture] = write_png(np.full((64, 64), 200, np.uint8))
    async with opened(engine, scenes.filled(), size=(120, 36)) as (app, pilot):
        text = await look(app, pilot, "m")
        assert text.count("▀" * 50) >= 20
        assert "⣿" not in text
    asked = {c.version for c in engine.asked if isinstance(c, commands.GetPicture)}
    assert asked == {0, 2}


async def test_plain_characters_draw_a_picture_in_shades(engine: FakeEngine) -> None:
    drawn = [version(n, "⣿⣿\n⣿⣿\n⣿⣿", picture=BlobRef(sha256="", size=9)) for n in range(3)]
    telling(engine, drawn)
    engine.answers[commands.GetPicture] = write_png(np.full((64, 64), 255, np.uint8))
    plain = Look(ascii=True)
    async with opened(engine, scenes.filled(), size=(120, 36), look=plain) as (app, pilot):
        text = await look(app, pilot, "m")
        assert text.isascii()
        assert "@" * 50 in text


async def test_what_is_no_picture_leaves_the_dots_of_the_sample(engine: FakeEngine) -> None:
    telling(engine, [version(0, "⣿⣿\n⣿⣿\n⣿⣿", picture=BlobRef(sha256="", size=9))])
    engine.answers[commands.GetPicture] = b"\x1b]0;no picture"
    async with opened(engine, scenes.filled(), size=(80, 24)) as (app, pilot):
        assert "⣿⣿" in await look(app, pilot, "m")


class SlowPictures(FakeEngine):
    """Engine whose pictures arrive once `arrive` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.arrive = asyncio.Event()

    @override
    async def _execute(self, command: Command[Any]) -> Any:
        if isinstance(command, commands.GetPicture):
            await self.arrive.wait()
        return await super()._execute(command)


@pytest.mark.parametrize("plain", [False, True])
async def test_a_late_picture_is_not_drawn_for_another_version(plain: bool) -> None:
    engine = SlowPictures()
    drawing = version(1, "⣿⣿\n⣿⣿\n⣿⣿", picture=BlobRef(sha256="", size=9))
    telling(engine, [version(0, "words of a text"), drawing])
    engine.answers[commands.GetPicture] = write_png(np.full((64, 64), 255, np.uint8))
    async with opened(engine, scenes.filled(), size=(60, 24), look=Look(ascii=plain)) as (
        app,
        pilot,
    ):
        assert "version 1 of" in await look(app, pilot, "m")
        assert "words of a text" in await look(app, pilot, "left_square_bracket")
        engine.arrive.set()
        await settle(app, pilot)
        assert "words of a text" in screen_text(app)


async def test_a_board_is_drawn_as_it_is(engine: FakeEngine) -> None:
    telling(engine, [version(0, BOARD), version(1, BOARD.replace("O wins", "X wins"))])
    async with opened(engine, scenes.filled(), size=(80, 24)) as (app, pilot):
        text = await look(app, pilot, "m")
        assert text.count(" 2 X · O") == 2
        assert "X wins" in text


async def test_without_a_coordinator_it_says_so_and_asks_again(engine: FakeEngine) -> None:
    telling(engine, TEXTS)
    async with opened(engine, scenes.filled(), size=(120, 36)) as (app, pilot):
        engine.refuses_versions = REFUSED
        assert "did not answer in time" in await look(app, pilot, "m")
        engine.refuses_versions = None
        await engine.clock.advance(5)
        await settle(app, pilot)
        assert "version 42 of 42" in screen_text(app)


async def test_the_digit_of_a_page_closes_it(engine: FakeEngine) -> None:
    telling(engine, TEXTS)
    async with opened(engine, scenes.filled(), size=(120, 36)) as (app, pilot):
        await look(app, pilot, "m", "2")
        assert app.current_mode == "runs"
        assert "Loss of this task" in await look(app, pilot, "1")


async def test_a_long_history_is_read_in_pages(engine: FakeEngine) -> None:
    rows = [version(n, f"s{n}" if n % 400 == 0 else "") for n in range(1200)]
    telling(engine, rows)
    history = SampleHistory("r")
    await history.begin(engine.control, 1199)
    assert (history.first(), history.last(), history.head) == (0, 0, 1199)
    assert await history.step(engine.control, 1199, -1) == 800
    assert await history.step(engine.control, 800, -1) == 400
    assert await history.step(engine.control, 400, 1) == 800
    assert await history.step(engine.control, 800, 1) is None
    assert await history.step(engine.control, 0, -1) is None
    assert len(engine.recalled) < 40
    assert not queries(engine, endpoints.LOSS)


async def test_thousands_of_samples_are_walked_through(engine: FakeEngine) -> None:
    telling(engine, [version(n, f"s{n}") for n in range(4000)])
    history = SampleHistory("r")
    await history.begin(engine.control, 3999)
    at: int | None = 3999
    for place in range(3989, 900, -10):
        assert at is not None
        at = await history.step(engine.control, at, -10)
        assert at == place
    assert len(history.rows) <= 2000
    assert (history.first(), history.last()) == (0, 3999)
    assert await history.step(engine.control, 0, 10) == 10


async def test_the_shown_version_stays_while_a_newer_one_is_looked_for(engine: FakeEngine) -> None:
    rows = [version(n, f"s{n}" if n < 50 else "") for n in range(3000)]
    telling(engine, rows)
    history = SampleHistory("r")
    await history.begin(engine.control, 2999)
    assert await history.step(engine.control, 49, 1) is None
    assert 49 in history.rows  # which the screen goes on showing


@given(st.text(max_size=300), st.integers(1, 60))
def test_a_text_of_others_never_leaves_its_rows(text: str, cells: int) -> None:
    for row in text_rows(text, cells):
        assert "\x1b" not in row
        assert "\n" not in row


def test_a_hostile_sample_is_bounded() -> None:
    assert len(text_rows("x\n" * 100_000, 80)) <= 400


async def test_a_sample_without_a_run_opens_nothing(engine: FakeEngine) -> None:
    async with opened(engine, [events.Connection(online=True)], size=(80, 24)) as (app, pilot):
        await look(app, pilot, "m", "p")
        assert app.screen is app.screen_stack[0]
