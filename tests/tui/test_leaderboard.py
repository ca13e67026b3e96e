"""Ranks: my week and my milestones first, my own place always in sight, old data told as such."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from shared.protocol import endpoints
from shared.protocol.listings import LedgerRow
from tests.tui import scenes
from tests.tui.engine import FakeEngine, opened, queries, screen_text
from tests.tui.pages import LEADERS, SIZES, SMALL, STATES, Snapshot, picture, prepared, settle
from volunteer.control import commands, events
from volunteer.stats.milestones import milestones, week
from volunteer.tui.look import Look
from volunteer.tui.screens.ranks import day_letters, goal_lines
from volunteer.tui.text import UNICODE
from volunteer.tui.view import AgentView
from volunteer.tui.widgets.panel import Scene

DAY = 86_400


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("state", STATES)
def test_picture(engine: FakeEngine, snap_compare: Snapshot, state: str, size: str) -> None:
    assert picture(engine, snap_compare, "leaderboard", state=state, size=SIZES[size])


def test_picture_of_a_small_terminal(engine: FakeEngine, snap_compare: Snapshot) -> None:
    assert picture(engine, snap_compare, "leaderboard", size=SMALL)


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


async def test_what_is_earned_while_the_page_asks_is_in_all_of_it(engine: FakeEngine) -> None:
    earned = replace(scenes.ME, earned_micro=4_321_000_000)
    accounts = iter([scenes.ME, earned, earned])
    mine = replace(LEADERS[0], nickname="ada", earned_micro=4_321_000_000, me=True)
    lists = iter([LEADERS, (mine,)])
    prepared(engine)
    engine.answers[endpoints.ME] = lambda: next(accounts)
    engine.answers[endpoints.LEADERBOARD] = lambda: next(lists)
    async with opened(engine, scenes.filled(), size=(120, 36), look=Look(page="leaderboard")) as (
        app,
        pilot,
    ):
        await settle(app, pilot)
        assert "1st of 1, 4,321.00 credits" in screen_text(app)
        assert "credits earned 4,321 of 5,000" in screen_text(app)


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


def test_days_have_their_letters() -> None:
    assert day_letters(scenes.NOW) == " W  T  F  S  S  M  T "  # a Tuesday evening


def earned(day: int, micro: int, contribution: int) -> LedgerRow:
    return LedgerRow(
        id=contribution,
        at=scenes.NOW - day * DAY,
        run="r",
        kind="earned",
        amount_micro=micro,
        contribution=contribution,
        memo="",
    )


def test_a_week_in_numbers() -> None:
    rows = [earned(0, 5, 1), earned(1, 7, 2), earned(1, 1, 3), earned(3, 2, 4), earned(8, 10, 5)]
    pending = replace(rows[0], kind="pending", amount_micro=1000)
    found = week([*rows, pending], scenes.NOW)
    assert found.credits_micro == (0, 0, 0, 2, 0, 8, 5)
    assert (found.contributions, found.active, found.streak) == (4, 3, 2)
    assert found.before_micro == 10


def test_a_streak_lives_until_the_day_is_over() -> None:
    assert week([earned(1, 1, 1), earned(2, 1, 2)], scenes.NOW).streak == 2
    assert week([earned(2, 1, 1)], scenes.NOW).streak == 0


def test_milestones_only_grow_and_name_the_next() -> None:
    merged, hours, money = milestones(replace(scenes.ME, merged=24, device_s=0.0))
    assert (merged.last, merged.next) == (10, 50)
    assert merged.share == pytest.approx(24 / 50)
    assert (hours.last, hours.next, hours.share) == (0, 1, 0.0)
    assert money.next == 2500
    beyond = milestones(replace(scenes.ME, merged=2_000_000))[0]
    assert (beyond.next, beyond.share) == (None, 1.0)


def test_a_mark_that_was_passed_is_told_beside_the_next() -> None:
    scene = Scene(view=AgentView(), now=scenes.NOW, glyphs=UNICODE)
    told = goal_lines(milestones(replace(scenes.ME, merged=24, device_s=0.0)), scene, 40, 9)
    text = ["".join(part for part, _ in line) for line in told]
    assert text[0] == "✓ 10   contributions merged     24 of 50"
    assert text[3] == "◌      hours of work given        0 of 1"


def test_a_mark_that_is_not_passed_yet_is_not_told_as_reached() -> None:
    scene = Scene(view=AgentView(), now=scenes.NOW, glyphs=UNICODE)
    me = replace(scenes.ME, merged=24, earned_micro=99_600_000)
    text = ["".join(part for part, _ in line) for line in goal_lines(milestones(me), scene, 60, 9)]
    assert any("99 of 100" in line for line in text)
