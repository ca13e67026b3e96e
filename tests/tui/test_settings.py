"""Settings: help for each, checked while typing, saved, and honest about who else has a say."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from shared.errors import Configuration
from shared.settings import SettingRow
from tests.tui import scenes
from tests.tui.engine import FakeEngine, opened, screen_text
from tests.tui.pages import SETTINGS, SIZES, Snapshot, picture, prepared, settle
from volunteer.control import commands
from volunteer.tui.appearance import Look
from volunteer.tui.screens.settings import about_lines
from volunteer.tui.setting_labels import applies_from, choices, grouped, label, parsed, value_words
from volunteer.tui.widgets.table import Listing

PAGE = Look(page="settings")
WORDS = (
    "priority",
    "language",
)  # names that people would use as well


def named(name: str) -> SettingRow:
    return next(row for row in SETTINGS if row.name == name)


def changes(engine: FakeEngine) -> list[dict[str, object]]:
    return [c.changes for c in engine.asked if isinstance(c, commands.SetSettings)]


def test_picture(engine: FakeEngine, snap_compare: Snapshot) -> None:
    assert picture(engine, snap_compare, "settings", size=SIZES["120x36"])


def test_screen_of_a_slip(engine: FakeEngine, text_compare: Snapshot) -> None:
    assert picture(engine, text_compare, "settings", "enter", *"mon 5")


async def test_a_switch_is_flipped_and_a_choice_turned(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("down", "enter")
        await settle(app, pilot)
        await pilot.press("down", "down", "enter")
        await settle(app, pilot)
    assert changes(engine) == [{"in_use": "gentle"}, {"on_battery": True}]


async def test_a_slip_is_told_while_it_is_typed_and_never_saved(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("enter", *"mon 5")
        await settle(app, pilot)
        assert '"mon 5" is not a time of the week' in screen_text(app)
        await pilot.press("enter")
        await settle(app, pilot)
        assert not changes(engine)
        await pilot.press("backspace", "backspace", "enter")
        await settle(app, pilot)
        assert changes(engine) == [{"schedule": ("mon",)}]


async def test_a_number_is_typed_anew_and_the_footer_names_the_keys_of_the_field(
    engine: FakeEngine,
) -> None:
    rows = [named(name) for name in ("duty_percent", "upload_mbit")]
    engine.answers[commands.GetSettings] = tuple(rows)
    async with opened(engine, scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("enter", *"80")
        await engine.clock.advance(1)
        app.redraw()
        await settle(app, pilot)
        footer = screen_text(app).splitlines()[-1]
        assert "enter ok  esc cancel" in footer
        assert "space" not in footer
        await pilot.press("enter")
        await settle(app, pilot)
    assert changes(engine) == [{"duty_percent": 80}]


async def test_escape_leaves_a_setting_as_it_was(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("enter", "x", "escape", "down", "enter")
        await settle(app, pilot)
    assert changes(engine) == [{"in_use": "gentle"}]


async def test_headings_are_passed_over(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        listing = app.screen.query_one(Listing)
        assert listing.key == "schedule"
        await pilot.press("up", "home")
        assert listing.key == "schedule"
        assert "When to work" in screen_text(app)
        await pilot.press(*["down"] * 6)
        assert listing.key == "device"
        await pilot.press("up")
        assert listing.key == "metered"


async def test_looks_change_at_once(engine: FakeEngine) -> None:
    prepared(engine)
    engine.answers[commands.GetSettings] = (named("ascii"),)
    async with opened(engine, scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("enter")
        await settle(app, pilot)
        assert screen_text(app).isascii()


async def test_the_next_theme_is_seen_at_once_and_kept(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        names = [row.name for _, rows in grouped(SETTINGS) for row in rows]
        await pilot.press(*["down"] * names.index("theme"), "enter")  # headings are passed over
        await settle(app, pilot)
        assert app.theme == "volunteer-light"
        app.action_theme()
        await settle(app, pilot)
        assert app.theme == "volunteer-colour-blind"
    assert changes(engine) == [{"theme": "volunteer-light"}, {"theme": "volunteer-colour-blind"}]


async def test_a_setting_that_somebody_else_sets_says_so(engine: FakeEngine) -> None:
    prepared(engine)
    engine.answers[commands.GetSettings] = (
        replace(named("on_battery"), source="environment"),
        replace(named("duty_percent"), source="config.toml", value=80),
    )
    async with opened(engine, scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("enter")
        await settle(app, pilot)
        assert "saved, but the environment" in screen_text(app)
        await pilot.press("down", "delete")
        await settle(app, pilot)
    assert changes(engine) == [{"on_battery": True}, {"duty_percent": 100}]


async def test_runs_are_chosen_for_the_next_task(engine: FakeEngine) -> None:
    prepared(engine)
    engine.answers[commands.GetSettings] = (named("runs"),)
    async with opened(engine, scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("enter", *"a, b", "enter")
        await settle(app, pilot)
    assert [c.runs for c in engine.asked if isinstance(c, commands.ChooseRuns)] == [("a", "b")]


def test_every_setting_has_a_heading_a_value_and_a_time() -> None:
    headings = grouped(SETTINGS)
    assert [row.name for _, rows in headings for row in rows if _ == "More"] == []
    assert sum(len(rows) for _, rows in headings) == len(SETTINGS)
    for row in SETTINGS:
        assert value_words(row)
        assert applies_from(row)
        assert row.help.endswith(".")
        assert label(row) != row.name or row.name in WORDS
    assert len({label(row) for row in SETTINGS}) == len(SETTINGS)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("on_battery", "yes", True),
        ("duty_percent", "50", 50),
        ("cache_gb", "2.5", 2.5),
        ("cache_gb", "2,5", 2.5),
        ("programs", "obs, steam", ("obs", "steam")),
        ("device_duty", "cpu=50, cuda:0=80", {"cpu": 50, "cuda:0": 80}),
        ("schedule", "", ()),
    ],
)
def test_what_is_typed_is_understood(name: str, text: str, value: object) -> None:
    assert parsed(named(name), text) == value


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("on_battery", "perhaps", "yes or no"),
        ("duty_percent", "2", "at least 5"),
        ("duty_percent", "much", "a whole number"),
        ("metered", "cheap", '\'cheap\' is not one of "pause", "work"'),
    ],
)
def test_what_is_wrong_is_said(name: str, text: str, says: str) -> None:
    with pytest.raises(Configuration, match=says):
        parsed(named(name), text)


def test_choices_are_those_of_the_setting() -> None:
    assert choices(named("in_use")) == ("work", "gentle", "pause")
    assert choices(named("ascii")) == ("yes", "no")
    assert choices(named("threads")) == ()


@pytest.mark.parametrize(
    ("name", "says"),
    [("schedule", "always"), ("threads", "all cores but one"), ("cache_gb", "10 GiB")],
)
def test_a_default_is_told_in_the_words_of_a_value(name: str, says: str) -> None:
    told = ["".join(text for text, _ in line) for line in about_lines(named(name), 60, 20)]
    assert f"default {says}" in told


async def test_changes_are_taken_back_one_after_the_other(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("down", "enter", "down", "down", "enter")
        await settle(app, pilot)
        assert changes(engine) == [{"in_use": "gentle"}, {"on_battery": True}]
        await pilot.press("u", "u", "u")
        await settle(app, pilot)
        assert changes(engine)[2:] == [{"on_battery": False}, {"in_use": "work"}]
        assert "nothing was changed on this page" in screen_text(app)


async def test_a_change_that_cannot_be_saved_is_neither_made_nor_taken_back(
    engine: FakeEngine,
) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("down", "enter")
        await settle(app, pilot)
        engine.refuses = Configuration("the disk is read-only")
        await pilot.press("down", "down", "enter")
        await settle(app, pilot)
        await pilot.press("u")
        await settle(app, pilot)
        assert "the disk is read-only" in screen_text(app)
        assert "taken back" not in screen_text(app)
        engine.refuses = None
        await pilot.press("u")
        await settle(app, pilot)
        assert "taken back: while" in screen_text(app)
    assert changes(engine)[-1] == {"in_use": "work"}


async def test_settings_are_found_by_a_text(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE, size=(120, 36)) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("slash", *"battery", "enter")
        await settle(app, pilot)
        text = screen_text(app)
        assert 'Settings with "battery"' in text
        assert "on battery" in text
        assert "language" not in text
        await pilot.press("slash", "escape")
        await settle(app, pilot)
        assert 'with "battery"' not in screen_text(app)
