"""The dashboard: what is seen in which room and state. Pictures lie in `__snapshots__`; look at them before renewing one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from textual.pilot import Pilot

from shared.protocol import Verdict, VersionInfo
from tests.tui import scenes
from tests.tui.engine import FakeEngine, open_app, opened, screen_text
from volunteer import commands, events
from volunteer.events import AnyEvent
from volunteer.status import Status
from volunteer.tui.app import Look, VolunteerApp
from volunteer.tui.screens.dashboard import NARROW, SHORT, Dashboard, arrange
from volunteer.tui.view import AgentView
from volunteer.tui.widgets.brief import brief
from volunteer.tui.widgets.cards import CreditsCard, RunCard
from volunteer.tui.widgets.panel import Scene
from volunteer.tui.widgets.records import sample_lines

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


# ------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scene", scenes.SCENES)
def test_picture(engine: FakeEngine, snap_compare: Snapshot, scene: str, size: str) -> None:
    told = scenes.SCENES[scene]()
    assert snap_compare(open_app(engine), terminal_size=SIZES[size], run_before=play(engine, told))


@pytest.mark.parametrize("scene", ["filled", "empty"])
def test_picture_of_a_small_terminal(
    engine: FakeEngine, snap_compare: Snapshot, scene: str
) -> None:
    told = scenes.SCENES[scene]()
    assert snap_compare(open_app(engine), terminal_size=(60, 16), run_before=play(engine, told))


def test_picture_without_colours(
    engine: FakeEngine, snap_compare: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    run = play(engine, scenes.paused())
    assert snap_compare(open_app(engine), terminal_size=(80, 24), run_before=run)


@pytest.mark.parametrize(
    "look",
    [
        Look(ascii=True),
        Look(theme="volunteer-high-contrast"),
        Look(theme="volunteer-colour-blind"),
        Look(theme="volunteer-light"),
    ],
    ids=["ascii", "high-contrast", "colour-blind", "light"],
)
def test_picture_of_a_look(engine: FakeEngine, snap_compare: Snapshot, look: Look) -> None:
    run = play(engine, scenes.filled())
    assert snap_compare(open_app(engine, look), terminal_size=(80, 24), run_before=run)


@pytest.mark.parametrize("key", ["q", "question_mark"], ids=["quit", "help"])
def test_picture_of_a_dialog(engine: FakeEngine, snap_compare: Snapshot, key: str) -> None:
    run = play(engine, scenes.filled(), key)
    assert snap_compare(open_app(engine), terminal_size=(80, 24), run_before=run)


# ---------------------------------------------------------------------------------------- rooms


@given(st.integers(0, 400), st.integers(0, 120), st.integers(0, 50))
def test_every_room_shows_the_state_of_the_task(width: int, height: int, turn: int) -> None:
    found = arrange(width, height, turn)
    assert found.cards & {"task", "brief"}
    assert found.turns >= 1
    if width >= NARROW and height >= SHORT:
        assert "task" in found.cards


@given(st.integers(20, 200), st.integers(8, 60))
def test_every_card_can_be_reached_with_v(width: int, height: int) -> None:
    first = arrange(width, height, 0)
    seen = {
        card.removeprefix("low-")
        for turn in range(first.turns)
        for card in arrange(width, height, turn).cards
    }
    if height >= SHORT:
        everything = {"task-curve", "model-curve", "contributions", "credits", "sample", "device"}
        assert everything | {"run"} <= seen


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
            for said in ("step 34 of 50", "loss 3.3", "lease 8:42 left", "worth 50.00", "q quit",
                         "merging after 2 more contributions or 3:12", "1 Home", "7 Log",
                         "total    1,240.50" if size == (80, 24) else "24 merged, 1 rejected"):  # fmt: skip
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


# --------------------------------------------------------------------------------------- states


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
        for said in ("○ offline", "next try in 0:42", "2 results queued", "training goes on",
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
    engine.answers[commands.GetVersions] = (past,)
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
        assert "the coordinator checks it" in text
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
        value = "Loss of this task 3.3"
        assert value in screen_text(app)
        await engine.play([events.TaskEnded(task=4711, how="gone", message="taken by another")])
        await engine.play(scenes.claimed(4712))
        app.redraw()
        assert value in screen_text(app)


async def test_a_loss_that_is_still_to_come_is_not_said_to_be_none(engine: FakeEngine) -> None:
    first = next(event for event in scenes.training(1) if isinstance(event, events.Training))
    begun = [*scenes.started(), *scenes.claimed(), replace(first, step=0, loss=None)]
    async with opened(engine, begun, size=(120, 36)) as (app, _):
        assert "its loss appears here" in screen_text(app)
        await engine.play([replace(first, step=3, loss=None)])
        app.redraw()
        assert "no loss is measured in this task" in screen_text(app)


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


async def test_curves_can_be_logarithmic_and_cut_to_their_newest_part(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled()) as (app, pilot):
        await pilot.press("y", "w")
        await pilot.pause()
        assert screen_text(app).count("log last 500") == 2
        await pilot.press("y", "w")
        await pilot.pause()
        assert "log last" not in screen_text(app)
        assert isinstance(app.screen, Dashboard)


# ---------------------------------------------------------------------------------------- cards


def scene_of(told: Iterable[AnyEvent]) -> Scene:
    from volunteer.tui.view import reduce

    view = AgentView()
    for event in told:
        view = reduce(view, event)
    return Scene(view=view, now=scenes.NOW)


def text_of(lines: Iterable[Iterable[tuple[str, str]]]) -> str:
    return "\n".join("".join(text for text, _ in line) for line in lines)


def test_the_sample_shows_the_first_and_the_newest_version() -> None:
    text = text_of(sample_lines(scene_of(scenes.filled()), 60, 8))
    assert text.index("version 0") < text.index("the the import") < text.index("version 41")
    assert "argparse.ArgumentParser" in text


def test_a_board_is_shown_as_it_is_with_its_numbers() -> None:
    board = ". . .\n. x o\n. . ."
    told = [
        *scenes.claimed(),
        events.Training(
            task=4711, run="g", device="cpu", step=1, steps=2, samples=1, loss=1.0, steps_per_s=1.0,
            tokens_per_s=0.0, eta_s=None, version=1, preview=board, metrics={"games": 12.0},
        ),
    ]  # fmt: skip
    quiet = events.Training(
        task=4711, run="g", device="cpu", step=2, steps=2, samples=2, loss=None, steps_per_s=1.0,
        tokens_per_s=0.0, eta_s=None, version=1,
    )  # fmt: skip
    text = text_of(sample_lines(scene_of([*told, quiet]), 60, 8))
    assert [row[:5] for row in text.splitlines()] == [". . .", ". x o", ". . ."]
    assert "games" in text
    assert "12" in text
    assert text_of(sample_lines(scene_of(told), 6, 8)).splitlines()[1] == ". x o"


async def test_figures_are_called_what_the_workload_calls_them(engine: FakeEngine) -> None:
    run = replace(scenes.RUN, items="images", measure="Fréchet distance", dataset="")
    step = events.Training(
        task=4711, run=run.name, device="cpu", step=1, steps=2, samples=1, loss=1.0,
        steps_per_s=1.0, tokens_per_s=64.0, eta_s=None, version=1, items="images",
    )  # fmt: skip
    told = [*scenes.started(), events.RunsListed(runs=(run,)), *scenes.claimed(), step]
    async with opened(engine, told, size=(120, 36)) as (app, pilot):
        text = screen_text(app)
        assert "64 images/s" in text
        assert "Fréchet distance" in text
        await pilot.press("2")
        await pilot.pause()
        text = screen_text(app)
        assert f"Fréchet distance of {run.name}" in text
        assert "none: it makes its own" in text


async def test_work_without_a_loss_shows_its_board_instead(engine: FakeEngine) -> None:
    board = "\n".join(["1 . X .", "2 O x .", "3 . . ."])
    move = events.Training(
        task=4711, run="stdlib-gpt", device="cpu", step=1, steps=2, samples=1, loss=None,
        steps_per_s=1.0, tokens_per_s=0.0, eta_s=None, version=1, preview=board,
        metrics={"games_per_hour": 1320.0}, counted="games",
    )  # fmt: skip
    told = [*scenes.started(), *scenes.claimed(), move]
    async with opened(engine, told, size=(120, 36)) as (app, _):
        text = screen_text(app)
        assert "This task now" in text
        assert "2 O x ." in text
        assert "1.32 k games per hour" in text  # in the place of the loss
        assert "1 of 50 games" in text
        assert "steps/s" not in text
        assert "tokens/s" not in text


def test_drawn_samples_stand_side_by_side_where_there_is_room() -> None:
    told = [
        *scenes.started(),
        events.LossMeasured(run="stdlib-gpt", version=0, loss=9.0, mine=0, sample="ab\ncd\nef"),
        events.LossMeasured(run="stdlib-gpt", version=7, loss=1.0, mine=0, sample="gh\nij\nkl"),
    ]
    wide = text_of(sample_lines(scene_of(told), 40, 8)).splitlines()
    assert wide[0].split() == ["version", "0", "version", "7"]
    assert wide[1].split() == ["ab", "gh"]
    assert text_of(sample_lines(scene_of(told), 6, 8)).splitlines()[1:] == ["gh", "ij", "kl"]


@given(st.integers(1, 80), st.integers(1, 20))
def test_the_shortest_form_fits_and_never_loses_the_sign(width: int, height: int) -> None:
    lines = brief(scene_of(scenes.filled()), width, height)
    assert len(lines) <= height
    rows = text_of(lines).splitlines()
    assert rows[0].startswith("●")
    assert all(len(row) <= width for row in rows)


def test_a_view_of_nothing_can_be_drawn() -> None:
    assert brief(Scene(view=AgentView(status=Status())), 40, 5)
