"""Credits: every contribution with its way and its reason, filters, more on demand, and a file for
spreadsheets.
"""

from __future__ import annotations

from msgspec.structs import replace

from shared.protocol import endpoints
from tests.tui import scenes
from tests.tui.engine import FakeEngine, Paged, opened, queries, screen_text
from tests.tui.pages import (
    LEDGER,
    OLDER,
    SIZES,
    Snapshot,
    picture,
    prepared,
    settle,
)
from volunteer.control import events
from volunteer.tui.appearance import Look
from volunteer.tui.widgets.table import Listing

PAGE = Look(page="history")


def test_picture(engine: FakeEngine, snap_compare: Snapshot) -> None:
    assert picture(engine, snap_compare, "history", size=SIZES["120x36"])


async def test_a_rejection_says_which_check_failed(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("w", "w", "w")
        await settle(app, pilot)
        text = screen_text(app)
        assert "✗ rejected" in text
        assert "merged" not in text
        assert "norm 41.2, limit 9.8" in text
        assert "not paid" in text


async def test_what_is_held_is_no_part_of_the_balance(engine: FakeEngine) -> None:
    me = replace(scenes.ME, spent_micro=1_204_500, held_micro=192_000)
    played = [*scenes.filled(), events.Credits(me=me)]
    async with opened(prepared(engine), played, look=PAGE, size=SIZES["120x36"]) as (app, pilot):
        await settle(app, pilot)
        seen = screen_text(app)
        assert "1,239.10" in seen  # 1,240.5 earned, 1.2045 spent, 0.192 held
        assert "held     0.192000" in seen


async def test_games_that_the_ledger_has_paid_wait_no_longer(engine: FakeEngine) -> None:
    prepared(engine)
    games = replace(
        OLDER[0], contribution=904, state="accepted", version=None, message="16 games, all valid"
    )
    waits = replace(games, contribution=905, task=4901, message="")
    engine.answers[endpoints.CONTRIBUTIONS] = Paged((games, waits), "")
    row = replace(LEDGER[0], contribution=904, kind="earned")
    pending = replace(row, id=901, contribution=905, kind="pending")
    engine.answers[endpoints.LEDGER] = (row, pending)
    async with opened(engine, scenes.started(), look=PAGE, size=(120, 36)) as (app, pilot):
        await settle(app, pilot)
        text = screen_text(app)
        assert "✓ paid" in text
        assert "waiting for the merge" in text
        await pilot.press("w")  # waiting
        await settle(app, pilot)
        text = screen_text(app)
        assert "games, all valid" not in text
        assert "waiting for the merge" in text
        await pilot.press("w")  # paid
        await settle(app, pilot)
        text = screen_text(app)
        assert "games, all valid" in text
        assert "waiting for the merge" not in text
        assert "pending → checked → paid" in text


async def test_pay_that_was_taken_back_is_no_longer_listed_as_paid(engine: FakeEngine) -> None:
    paid = replace(OLDER[0], contribution=905, message="merged into version 30")
    engine.answers = dict(prepared(engine).answers)
    engine.answers[endpoints.CONTRIBUTIONS] = Paged((replace(paid, credits_micro=0),), "")
    earned = replace(LEDGER[0], contribution=905, kind="earned")
    reverse = replace(
        earned, id=901, kind="reversed", amount_micro=-50_000_000, memo="copies of others"
    )
    engine.answers[endpoints.LEDGER] = (reverse, earned)
    me = replace(scenes.ME, today_micro=-50_000_000)
    played = [*scenes.started(), events.Judged(verdict=paid), events.Credits(me=me)]
    async with opened(engine, played, look=PAGE, size=SIZES["120x36"]) as (app, pilot):
        await settle(app, pilot)
        text = screen_text(app)
        row = next(line for line in text.splitlines() if str(paid.task) in line)
        assert "✗ taken back" in row
        assert "50.00" not in row.partition("││")[0]
        assert "not paid" in text
        assert "copies of others" in text
        assert "+-" not in text
        assert "today    -50.00" in text
        await pilot.press("w", "w")  # paid
        await settle(app, pilot)
        assert "taken back" not in screen_text(app)


async def test_only_what_holds_the_text_is_shown_until_escape(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("slash", *"norm")
        await settle(app, pilot)
        assert 'Contributions with "norm"' in screen_text(app)
        assert "1 of 27" in screen_text(app)
        await pilot.press("enter")
        await pilot.press("slash", "escape")
        await settle(app, pilot)
        assert "of 27" not in screen_text(app)


async def test_at_the_end_of_the_list_more_is_asked_for(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        older = tuple(replace(v, contribution=v.contribution - 100) for v in OLDER)
        engine.answers[endpoints.CONTRIBUTIONS] = Paged(older, "")
        await pilot.press("end")
        await settle(app, pilot)
        await pilot.press("end")
        await settle(app, pilot)
        cursors = [args.get("cursor") for args in queries(engine, endpoints.CONTRIBUTIONS)]
        assert cursors == [None, "780"]
        assert str(older[-1].task) in screen_text(app)


async def test_the_newest_is_looked_at_until_somebody_moves(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.started(), look=PAGE) as (app, pilot):
        await settle(app, pilot)  # what was long ago is there first
        await engine.play(scenes.history())
        await settle(app, pilot)
        listing = app.screen.query_one(Listing)
        assert listing.key == listing.rows[0].key
        await pilot.press("down")
        key = listing.key
        late = replace(OLDER[0], contribution=990, at=scenes.NOW)
        await engine.play([events.Judged(verdict=late)])
        await settle(app, pilot)
        assert listing.key == key == listing.rows[2].key
