"""The dashboard: what is seen in which room and state.

Texts and pictures of screens lie in `__snapshots__`; look at them before renewing one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
from msgspec.structs import replace
from textual.pilot import Pilot

from shared.protocol import endpoints
from shared.protocol.contributions import Verdict
from shared.protocol.versions import VersionInfo
from tests.tui import scenes
from tests.tui.engine import FakeEngine, open_app, opened, screen_text
from volunteer.control import events
from volunteer.control.events import AnyEvent
from volunteer.tui.app import VolunteerApp
from volunteer.tui.appearance import Look
from volunteer.tui.widgets.cards import CreditsCard, RunCard
from volunteer.tui.widgets.loss_plots import ModelPlot

Snapshot = Callable[..., bool]

SIZES = {"80x24": (80, 24), "120x36": (120, 36)}


def play(
    engine: FakeEngine, told: Iterable[AnyEvent], *keys: str
) -> Callable[[Pilot[Any]], Awaitable[None]]:
    """Tell the events to the program that a picture is taken of."""

    async def before(pilot: Pilot[Any]) -> None:
        await pilot.pause()
        await engine.play(told)
        await pilot.press(*keys)
        app = pilot.app
        assert isinstance(app, VolunteerApp)
        app.redraw()
        await pilot.pause()

    return before


def test_screen_of_a_small_terminal(engine: FakeEngine, text_compare: Snapshot) -> None:
    run = play(engine, scenes.empty())
    assert text_compare(open_app(engine), terminal_size=(60, 16), run_before=run)


@pytest.mark.parametrize("scene", ["filled", "error", "paused"])
def test_picture(engine: FakeEngine, snap_compare: Snapshot, scene: str) -> None:
    told = scenes.SCENES[scene]()
    assert snap_compare(open_app(engine), terminal_size=(120, 36), run_before=play(engine, told))


def test_picture_without_colours(
    engine: FakeEngine, snap_compare: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    run = play(engine, scenes.paused())
    assert snap_compare(open_app(engine), terminal_size=(80, 24), run_before=run)


@pytest.mark.parametrize("theme", ["high-contrast", "colour-blind", "light"])
def test_picture_of_a_theme(engine: FakeEngine, snap_compare: Snapshot, theme: str) -> None:
    run = play(engine, scenes.filled())
    look = Look(theme=f"volunteer-{theme}")
    assert snap_compare(open_app(engine, look), terminal_size=(80, 24), run_before=run)


@pytest.mark.parametrize("key", ["q", "question_mark"], ids=["quit", "help"])
def test_screen_of_a_dialog(engine: FakeEngine, text_compare: Snapshot, key: str) -> None:
    run = play(engine, scenes.filled(), key)
    assert text_compare(open_app(engine), terminal_size=(80, 24), run_before=run)


async def test_no_size_breaks_it(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled(), size=(120, 36)) as (app, pilot):
        for width, height in [
            (1, 1), (2, 1), (1, 5), (10, 3), (20, 5), (29, 6), (40, 14), (59, 40), (60, 14),
            (79, 21), (80, 22), (115, 33), (116, 34), (240, 70),
        ]:  # fmt: skip
            await pilot.resize_terminal(width, height)
            app.redraw()
            await pilot.pause()
            text = screen_text(app)
            assert "●" in text
            assert all(len(row) <= width for row in text.splitlines())


async def test_nothing_is_cut_off_at_the_usual_sizes(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled(), size=(80, 24)) as (app, pilot):
        for size in SIZES.values():
            await pilot.resize_terminal(*size)
            app.redraw()
            await pilot.pause()
            text = screen_text(app)
            for said in ("step 34 of 50", "loss 3.3", "reserved for 8:42", "pays 50.00 credits",
                         "q quit",
                         "next version in 2 contributions or 3:12", "1 Home", "7 Log",
                         "total    1,240.50" if size == (80, 24) else "24 merged, 1 "
                                                                      "rejected"):  # fmt: skip
                assert said in text


async def test_v_goes_through_the_cards_where_there_is_no_room_for_all(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled(), size=(60, 16)) as (app, pilot):
        titles = []
        for _ in range(8):
            rows = screen_text(app).splitlines()
            titles.append(next(row for row in rows[3:] if row.startswith("╭"))[3:12])
            await pilot.press("v")
            await pilot.pause()
        assert len(set(titles)) >= 6
        assert titles[0] == titles[7]
        assert "v view" in screen_text(app)
        await pilot.resize_terminal(120, 36)
        await pilot.pause()
        assert "v view" not in screen_text(app)


async def test_a_paused_task_says_why_and_what_ends_it(engine: FakeEngine) -> None:
    async with opened(engine, scenes.paused()) as (app, _):
        text = screen_text(app)
        assert text.count("on battery (64 %), until it is plugged in") == 2  # state and task
        assert "‖ train" in text


async def test_an_idle_machine_says_the_servers_reason(engine: FakeEngine) -> None:
    async with opened(engine, scenes.empty()) as (app, _):
        assert "all tasks of stdlib-gpt are being done by others (0:12)" in screen_text(app)
        await engine.clock.advance(5)
        app.redraw()
        assert "(0:07)" in screen_text(app)


async def test_offline_the_training_goes_on_and_results_wait(engine: FakeEngine) -> None:
    async with opened(engine, scenes.offline(), size=(120, 36)) as (app, _):
        text = screen_text(app)
        for said in ("○ offline", "next try in 42 s", "2 results queued", "training goes on",
                     "2 waiting to be sent", "step 34 of 50"):  # fmt: skip
            assert said in text


async def test_what_was_known_before_the_coordinator_went_away_is_dim_and_has_its_age(
    engine: FakeEngine,
) -> None:
    async with opened(engine, scenes.filled(), size=(120, 36)) as (app, pilot):
        cards = [app.screen.query_one(CreditsCard), app.screen.query_one(RunCard)]
        before = screen_text(app)
        assert "as of" not in before
        await engine.play([events.Connection(online=False, message="connection refused")])
        await engine.clock.advance(180)
        app.redraw()
        await pilot.pause()
        assert screen_text(app).count("as of 3 min ago") == 2
        for card in cards:
            roles = {role for line in card.lines(app.scene(), 36, 9) for text, role in line if text}
            assert roles == {"dim"}
        await engine.play([events.Connection(online=True)])
        app.redraw()
        await pilot.pause()
        assert "as of" not in screen_text(app)


async def test_the_curve_goes_back_to_before_the_program_was_started(engine: FakeEngine) -> None:
    past = VersionInfo(
        version=7,
        kind="merge",
        created_at=scenes.NOW - 900,
        contributions=2,
        global_step=70,
        tokens=0,
        published_sha256="",
        loss=4.5,
        mine=1,
    )
    engine.answers[endpoints.VERSIONS] = (past,)
    async with opened(engine, scenes.started(), size=(120, 36)) as (app, pilot):
        await pilot.pause()
        app.redraw()
        curve = app.view.models["stdlib-gpt"]
        assert (7.0, 4.5) in curve.points
        assert 7 in curve.mine
        assert engine.recalled == ["stdlib-gpt"]


async def test_every_phase_of_a_task_has_its_numbers(engine: FakeEngine) -> None:
    async with opened(engine, [*scenes.started(), *scenes.claimed()]) as (app, _):

        async def told(*new: AnyEvent) -> str:
            await engine.play(new)
            app.redraw()
            return screen_text(app)

        assert "● claim" in await told()
        text = await told(
            events.Fetching(task=4711, what="weights", done_bytes=5_000_000, total_bytes=20_000_000)
        )
        assert "● download" in text
        assert "25 %  weights 5 MB of 20 MB" in text
        here = events.Fetching(task=4711, what="data", done_bytes=9_000_000, total_bytes=9_000_000)
        text = await told(here)
        assert "● starting" in text
        assert "● train" in text
        assert "0 %  step 0 of 50" in text
        assert "step 34 of 50" in await told(*scenes.training())
        text = await told(events.Uploading(task=4711, done_bytes=1_000_000, total_bytes=2_000_000))
        assert "● upload" in text
        assert "50 %  1 MB of 2 MB" in text
        text = await told(events.Submitted(task=4711, contribution=5, bytes=2_000_000))
        assert "● check" in text
        assert "being checked by the coordinator" in text
        paid = Verdict(
            contribution=5, task=4711, run="stdlib-gpt", state="merged", version=42,
            credits_micro=50_000_000, at=scenes.NOW,
        )  # fmt: skip
        text = await told(events.Judged(verdict=paid))
        assert "#4711  ✓ merged     +50.00" in text
        assert "Task 4711" not in text


async def test_the_curve_of_the_last_task_stays_until_the_next_one_trains(
    engine: FakeEngine,
) -> None:
    async with opened(engine, scenes.filled()) as (app, _):
        assert "Loss of this task ─" in screen_text(app)  # its value is in the card of the task
        await engine.play([events.TaskEnded(task=4711, how="gone", message="taken by another")])
        await engine.play(scenes.claimed(4712))
        app.redraw()
        assert "Loss of task 4711 3.3" in screen_text(app)


async def test_a_loss_that_is_still_to_come_is_not_said_to_be_none(engine: FakeEngine) -> None:
    first = next(event for event in scenes.training(1) if isinstance(event, events.Training))
    begun = [*scenes.started(), *scenes.claimed(), replace(first, step=0, loss=None)]
    async with opened(engine, begun, size=(120, 36)) as (app, _):
        assert "its loss appears here" in screen_text(app)
        await engine.play([replace(first, step=3, loss=None)])
        app.redraw()
        assert "this task measures no loss" in screen_text(app)


async def test_after_a_restart_the_next_loss_is_awaited_not_the_first(engine: FakeEngine) -> None:
    async with opened(engine, scenes.started(), size=(120, 36)) as (app, _):
        assert "the loss of your first task" in screen_text(app)
        await engine.play([events.Credits(me=scenes.ME)])
        app.redraw()
        text = screen_text(app)
        assert "the loss of your next task" in text
        assert "first task" not in text


def solving() -> list[AnyEvent]:
    """A volunteer of a run that problems teach: from 20 to 60 percent solved."""
    run = replace(scenes.RUN, workload="rollouts", measure="share solved", loss=0.4, loss_first=0.8)
    beginning = [event for event in scenes.started() if not isinstance(event, events.RunsListed)]
    versions = [
        events.LossMeasured(
            run=run.name, version=version, loss=0.8 - version / 100, mine=0, measure="share solved"
        )
        for version in range(41)
    ]
    return [*beginning, events.RunsListed(runs=(run,)), *versions]


async def test_a_run_of_problems_draws_how_many_percent_are_solved(engine: FakeEngine) -> None:
    async with opened(engine, solving(), size=(120, 36)) as (app, _):
        text = screen_text(app)
        assert "Solved of the model 60 %" in text
        (chart,) = (plot.chart(app.scene()) for plot in app.screen.query(ModelPlot))
        assert [round(y) for _, y in chart.series[0].points[::20]] == [20, 40, 60]
        assert "the answers of your next task" in text
        assert "Loss" not in text
        assert "loss" not in text


async def test_tasks_of_several_devices_can_be_looked_at(engine: FakeEngine) -> None:
    both = [
        *scenes.started(),
        events.DevicesFound(devices=(scenes.CPU, scenes.GPU)),
        *scenes.training(10, 4711, "cpu"),
        *scenes.training(20, 4712, "cuda:0"),
    ]
    async with opened(engine, both) as (app, pilot):
        assert "Task 4711" in screen_text(app)
        assert "cpu (1 of 2)" in screen_text(app)
        await pilot.press("d", "d")
        await pilot.pause()
        assert "Task 4712" in screen_text(app)
        assert "step 20 of 50" in screen_text(app)
        await pilot.press("d")
        await pilot.pause()
        assert "Task 4711" in screen_text(app)
