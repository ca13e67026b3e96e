"""Ranks: my own place always in sight, old data told as such."""

from __future__ import annotations

from msgspec.structs import replace

from shared.protocol import endpoints
from tests.tui import scenes
from tests.tui.engine import FakeEngine, opened, queries, screen_text
from tests.tui.pages import LEADERS, SIZES, Snapshot, picture, prepared, settle
from volunteer.control import commands, events
from volunteer.tui.appearance import Look


def test_picture(engine: FakeEngine, snap_compare: Snapshot) -> None:
    assert picture(engine, snap_compare, "leaderboard", size=SIZES["120x36"])


async def test_another_span_of_time_is_asked_for(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=Look(page="leaderboard")) as (
        app,
        pilot,
    ):
        await settle(app, pilot)
        await pilot.press("w")
        await settle(app, pilot)
        await pilot.press("w")
        await settle(app, pilot)
    asked = [args.get("days") for args in queries(engine, endpoints.LEADERBOARD)]
    assert asked == [7, 30, 0]


async def test_my_own_place_is_seen_wherever_the_list_stands(engine: FakeEngine) -> None:
    prepared(engine)
    many = tuple(
        replace(LEADERS[0], rank=n, nickname=f"volunteer-{n}", earned_micro=10**9 - n * 10**6)
        for n in range(1, 60)
    )
    mine = replace(many[-1], rank=60, nickname="ada", earned_micro=900_000_000, me=True)
    engine.answers[endpoints.LEADERBOARD] = (*many, mine)
    async with opened(engine, scenes.filled(), look=Look(page="leaderboard")) as (app, pilot):
        await settle(app, pilot)
        text = screen_text(app)
        assert "volunteer-1 " in text
        assert "60th of 60, 900.00 credits, 41.00 to the next place" in text
        await pilot.press("end")
        await settle(app, pilot)
        assert "ada (you)" in screen_text(app)


async def test_who_hides_the_name_is_told_so(engine: FakeEngine) -> None:
    prepared(engine)
    engine.answers[endpoints.LEADERBOARD] = LEADERS[:2]
    async with opened(engine, scenes.filled(), look=Look(page="leaderboard")) as (app, pilot):
        await settle(app, pilot)
        assert "you are not in this list yet" in screen_text(app)


async def test_the_name_is_hidden_and_shown_again_with_one_key(engine: FakeEngine) -> None:
    prepared(engine)
    async with opened(engine, scenes.filled(), size=(120, 36), look=Look(page="leaderboard")) as (
        app,
        pilot,
    ):
        await settle(app, pilot)
        await pilot.press("h")
        await settle(app, pilot)
        await engine.play([events.Credits(me=replace(scenes.ME, public=False))])
        await settle(app, pilot)
        assert "hidden from others" in screen_text(app)
        await pilot.press("h")
        await settle(app, pilot)
    changes = [c.changes for c in engine.asked if isinstance(c, commands.SetSettings)]
    assert changes == [{"public": False}, {"public": True}]


async def test_before_the_account_is_known_there_is_no_name_to_hide(engine: FakeEngine) -> None:
    prepared(engine)
    async with opened(engine, scenes.started(), look=Look(page="leaderboard")) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("h")
        await settle(app, pilot)
        assert "your account is not known before" in screen_text(app)
    assert not [c for c in engine.asked if isinstance(c, commands.SetSettings)]
