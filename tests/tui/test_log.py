"""The log: filtered, searched, followed; and diagnostics without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.protocol.accounts import Hardware
from tests.tui import scenes
from tests.tui.engine import FakeEngine, opened, screen_text
from tests.tui.pages import SETTINGS, SIZES, Snapshot, picture, prepared, settle
from volunteer.control import events
from volunteer.control.diagnostics import diagnostics, harmless
from volunteer.control.status import Status
from volunteer.tui.appearance import Look
from volunteer.tui.screens.event_log import level_of

PAGE = Look(page="log")


def test_picture(engine: FakeEngine, snap_compare: Snapshot) -> None:
    assert picture(engine, snap_compare, "log", size=SIZES["120x36"])


async def test_only_warnings_or_errors(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.paused(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        assert "on held-out data" in screen_text(app)
        await pilot.press("w")
        await settle(app, pilot)
        text = screen_text(app)
        assert "▲ warning" in text
        assert "everything paused by battery" in text
        assert "on held-out data" not in text
        await pilot.press("w")
        await settle(app, pilot)
        assert "▲ warning" not in screen_text(app)
        assert "✗ error" in screen_text(app)


async def test_ones_own_pause_is_no_warning(engine: FakeEngine) -> None:
    own = [
        events.Paused(device="", by="you", message="press space to start", until="you start"),
        events.Paused(device="cpu", by="you", message="paused", until="you resume"),
    ]
    async with opened(prepared(engine), own, look=PAGE) as (app, pilot):
        await settle(app, pilot)
        rows = screen_text(app).splitlines()
        assert any("info" in row and "paused: `volunteer resume` starts it" in row for row in rows)
        assert "cpu paused by you" in screen_text(app)
        assert "▲" not in screen_text(app)


async def test_it_follows_until_somebody_looks_at_older_lines(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await engine.play([events.Notice(level="info", message="number one")])
        await settle(app, pilot)
        assert "following" in screen_text(app)
        assert "number one" in screen_text(app)
        await pilot.press("home")
        await engine.play([events.Notice(level="info", message="number two")])
        await settle(app, pilot)
        assert "number two" not in screen_text(app)
        assert "end: follow" in screen_text(app)
        await pilot.press("end")
        await settle(app, pilot)
        assert "number two" in screen_text(app)


async def test_search_finds_and_says_what_for(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("slash", *"rejected", "enter")
        await settle(app, pilot)
        assert 'Log with "rejected"' in screen_text(app)
        assert "1 line" in screen_text(app)


async def test_diagnostics_go_into_a_file(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("c")
        await settle(app, pilot)
    text = (tmp_path / "volunteer" / "volunteer-diagnostics.txt").read_text()
    assert "coordinator: Little Lab" in text
    assert "setting duty_percent = 80 (environment)" in text
    assert "task 4701 of stdlib-gpt rejected" in text


def test_diagnostics_hold_no_secret() -> None:
    secret = "ab" * 32
    told = [
        events.Notice(level="error", message=f"https://h/join#key=AB+code=geheim token={secret}"),
        events.Notice(level="error", message="/home/ada/volunteer cannot be read"),
    ]
    rows = [row for row in SETTINGS if row.name == "language"]
    text = diagnostics(
        Status(server="Lab"), Hardware(), version="1", sandbox=("free",), settings=rows, events=told
    )
    for word in ("geheim", secret, "ada"):
        assert word not in text
    assert harmless("C:\\Users\\ada\\x") == "C:\\Users\\***\\x"


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (events.Notice(level="warning", message=""), "warning"),
        (events.TaskEnded(task=1, how="failed", message=""), "error"),
        (events.TaskEnded(task=1, how="released", message=""), "info"),
        (events.Connection(online=False), "warning"),
        (events.Connection(online=True), "info"),
    ],
)
def test_levels(event: events.AnyEvent, level: str) -> None:
    assert level_of(event) == level
