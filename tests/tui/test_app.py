"""The program around the pages: keys, commands, leaving, how it looks, and how little it does while
nobody can see it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace
from textual import _time
from textual.timer import Timer
from textual.widgets import Static

from shared.errors import Conflict
from tests.support.sources import ROOT
from tests.tui import scenes
from tests.tui.engine import FakeEngine, open_app, opened, screen_text
from tests.tui.pages import prepared
from volunteer.control import commands, events
from volunteer.control.control import Control
from volunteer.tui import keys, themes
from volunteer.tui.app import BLURRED_TICKS, VolunteerApp
from volunteer.tui.appearance import Look
from volunteer.tui.screens.dashboard import Dashboard
from volunteer.tui.screens.help import Help
from volunteer.tui.widgets.bars import StateBar
from volunteer.tui.widgets.cards import RunCard
from volunteer.tui.widgets.loss_plots import ModelPlot, TaskPlot

# ------------------------------------------------------------------------------------- commands


async def test_a_page_is_drawn_though_the_machine_halts_while_it_opens(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = _time.get_time, Counter[Timer]()

    def halting() -> float:
        """The time, a second later from the second question of a timer on that ends a change."""
        caller = sys._getframe(1).f_locals.get("self")
        if not isinstance(caller, Timer) or caller.name != "delay_update":
            return real()
        asked[caller] += 1
        return real() + (asked[caller] > 1)

    async with opened(engine, scenes.filled()) as (app, pilot):
        monkeypatch.setattr(_time, "get_time", halting)
        await pilot.press("7")
        while not asked or app._batch_count:  # while it counts, nothing is drawn
            await pilot.pause(0.02)


async def test_what_is_told_while_a_page_is_being_made_waits_for_it(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled()) as (app, pilot):
        app.action_page("runs")
        app.redraw()
        await pilot.pause()
        assert "stdlib-gpt" in screen_text(app)


async def test_space_pauses_and_goes_on(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled()) as (app, pilot):
        await pilot.press("space")
        await pilot.pause()
        assert isinstance(engine.asked[-1], commands.Pause)
        assert "‖ paused" in screen_text(app)
        assert "space resume" in screen_text(app)
        await pilot.press("space")
        await pilot.pause()
        assert isinstance(engine.asked[-1], commands.Resume)
        assert "● training" in screen_text(app)


async def test_finish_takes_no_more_tasks_until_asked_again(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled()) as (app, pilot):
        await pilot.press("f")
        await pilot.pause()
        assert isinstance(engine.asked[-1], commands.Finish)
        assert "● finishing" in screen_text(app)
        await pilot.press("f")
        await pilot.pause()
        assert isinstance(engine.asked[-1], commands.Resume)
        assert "● training" in screen_text(app)


async def test_a_refused_command_is_a_sentence_on_the_screen(engine: FakeEngine) -> None:
    engine.refuses = Conflict("this needs a coordinator: join one first")
    async with opened(engine) as (app, pilot):
        await pilot.press("space")
        await pilot.pause()
        await pilot.pause()
        assert "this needs a coordinator" in screen_text(app)


async def test_retry_is_offered_only_while_offline(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled()) as (app, pilot):
        assert "r retry" not in screen_text(app)
        await pilot.press("r")
        assert not engine.asked
        await engine.play(scenes.offline())
        app.redraw()
        await pilot.pause()
        assert "r retry" in screen_text(app)
        await pilot.press("r")
        await pilot.pause()
        assert isinstance(engine.asked[-1], commands.Retry)


async def test_warnings_of_the_volunteer_are_told_at_the_corner(engine: FakeEngine) -> None:
    async with opened(engine) as (app, pilot):
        await engine.play([events.Notice(level="warning", message="[b]the disk is nearly full")])
        await pilot.pause()
        await pilot.pause()
        assert "[b]the disk is nearly full" in screen_text(app)


# ---------------------------------------------------------------------------------------- pages


async def test_every_page_has_a_key_and_every_key_its_own_action() -> None:
    bound = [key for binding in keys.bindings() for key in binding.key.split(",")]
    assert len(set(bound)) == len(bound)
    assert {page.name for page in keys.PAGES} >= {"dashboard", "settings", "log"}


async def test_the_dashboard_is_first_and_its_tab_is_marked(engine: FakeEngine) -> None:
    async with opened(engine) as (app, _):
        assert isinstance(app.screen, Dashboard)
        assert screen_text(app).startswith(" 1 Home  2 Runs  3 Device")


async def test_keys_can_be_clicked(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled()) as (_, pilot):
        await pilot.click("#keys", offset=(3, 0))
        await pilot.pause()
        assert isinstance(engine.asked[-1], commands.Pause)


async def test_help_names_every_action_and_closes(engine: FakeEngine) -> None:
    async with opened(engine, size=(100, 60)) as (app, pilot):
        await pilot.press("question_mark")
        await pilot.pause()
        assert isinstance(app.screen, Help)
        told = "".join(screen_text(app).split())
        for command in (*keys.COMMANDS, *Dashboard.ACTIONS):
            assert "".join(command.help.split())[:20] in told
        await pilot.press("escape")
        assert isinstance(app.screen, Dashboard)


async def test_the_palette_has_every_action_and_every_page(engine: FakeEngine) -> None:
    async with opened(engine) as (app, _):
        offered = {command.title for command in app.get_system_commands(app.screen)}
        wanted = {c.short[:1].upper() + c.short[1:] for c in (*keys.COMMANDS, *Dashboard.ACTIONS)}
        wanted |= {page.title for page in keys.PAGES}
        assert wanted - {"All actions"} <= offered
        assert {"Theme", "Stop", "Screenshot"} <= offered


async def test_an_action_of_the_palette_works(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled()) as (app, pilot):
        await pilot.press("ctrl+p")
        await pilot.pause()
        await pilot.press(*"finish")
        await app.workers.wait_for_complete()
        await pilot.press("enter")
        await pilot.pause()
        await app.workers.wait_for_complete()
        assert any(isinstance(asked, commands.Finish) for asked in engine.asked)


async def test_a_screenshot_lies_beside_the_card_and_its_path_is_told(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    async with opened(engine, scenes.filled()) as (app, pilot):
        await pilot.press("ctrl+p")
        await pilot.pause()
        await pilot.press(*"screenshot")
        await app.workers.wait_for_complete()
        await pilot.press("enter")
        await pilot.pause()
        await pilot.pause()
        (path,) = (tmp_path / "volunteer").iterdir()
        assert path.name == "volunteer-screen-2023-11-14-221320.svg"
        picture = path.read_text()
        assert picture.startswith("<svg")
        assert "stdlib-gpt" in picture
        assert "Search" not in picture  # the palette itself is closed
        await pilot.pause()
        assert "written to" in screen_text(app)


async def test_a_screenshot_that_cannot_be_written_says_why(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    (tmp_path / "nowhere").write_text("a file, no directory")
    async with opened(engine, scenes.filled()) as (app, pilot):
        take = next(c for c in app.get_system_commands(app.screen) if c.title == "Screenshot")
        take.callback()
        await pilot.pause()
        await pilot.pause()
        assert "cannot" in screen_text(app)  # the sentence is wrapped behind its long path


# -------------------------------------------------------------------------------------- drawing


async def test_what_a_person_waits_for_is_drawn_at_once_and_numbers_with_the_next_tick(
    engine: FakeEngine,
) -> None:
    async with opened(engine, scenes.filled()) as (app, pilot):
        before = app.view
        await engine.play([events.Traffic(sent_bytes=5, received_bytes=6)])
        assert app.view is before
        app._tick()
        assert app.view.status.sent_bytes == 5
        await engine.play([events.Connection(online=False, message="connection refused")])
        await pilot.pause()
        assert "○ offline" in screen_text(app)


async def test_curves_are_drawn_at_most_once_a_second(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled()) as (app, _):
        plot, state = app.screen.query_one("#task-curve", TaskPlot), app.screen.query_one(StateBar)
        drawn = plot._drawn_at
        await engine.clock.advance(0.5)
        app.publish()
        assert (plot._drawn_at, state._drawn_at) == (drawn, engine.clock.now())
        await engine.clock.advance(0.5)
        app.publish()
        assert plot._drawn_at == engine.clock.now()


async def test_a_title_never_stands_above_the_curve_of_another_run_or_task(
    engine: FakeEngine,
) -> None:
    """Tasks of two runs in turns, drawn as what a person waits for."""
    async with opened(engine, scenes.filled(), size=(120, 36)) as (app, _):
        plots = app.screen.query_one(ModelPlot), app.screen.query_one(TaskPlot)
        for turn in range(6):
            await engine.clock.advance(0.1)
            run = "sums" if turn % 2 else scenes.RUN.name
            task = [renamed(event, run) for event in scenes.training(3, 5000 + turn)]
            ended = [
                events.TaskEnded(task=shown.task, how="saved", message="")
                for shown in app.latest.status.tasks
            ]
            loss = events.LossMeasured(run=run, version=turn, loss=1.5, mine=0)
            await engine.play([*ended, loss, *task])
            app.view = app.latest
            app._page.show(app.scene(), hurried=True)  # type: ignore[union-attr]
            if turn:  # the one before was of the other run
                assert {plot._drawn_at for plot in plots} == {engine.clock.now()}


def renamed(event: events.AnyEvent, run: str) -> events.AnyEvent:
    """The same event of another run."""
    return replace(event, run=run) if hasattr(event, "run") else event


async def test_a_number_in_the_title_of_a_curve_is_as_new_as_on_a_card(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled(), size=(120, 36)) as (app, pilot):
        await engine.clock.advance(0.5)  # the cards are due, the curves not yet
        newer = events.LossMeasured(run="stdlib-gpt", version=42, loss=2.987, mine=0)
        await engine.play([newer, *list(scenes.training(35))[-1:]])
        app.publish()
        await pilot.pause()
        assert "→ 2.987" in screen_text(app)
        assert "Loss of the model 2.987" in screen_text(app)
        assert "Loss of this task ─" in screen_text(app)  # one reading: that in the card


async def test_a_key_does_not_wait_for_a_curve(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled()) as (app, pilot):
        plot, state = app.screen.query_one("#task-curve", TaskPlot), app.screen.query_one(StateBar)
        drawn = plot._drawn_at
        await engine.clock.advance(0.5)
        await pilot.press("space")
        await pilot.pause()
        assert "‖ paused" in screen_text(app)
        assert (plot._drawn_at, state._drawn_at) == (drawn, engine.clock.now())


async def test_nothing_is_drawn_on_a_page_that_is_hidden(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled()) as (app, pilot):
        state = app.screen.query_one(StateBar)
        await pilot.press("7")
        await pilot.pause()
        drawn = state._drawn_at
        await engine.clock.advance(5)
        app.publish()
        assert state._drawn_at == drawn
        await pilot.press("1")
        await pilot.pause()
        assert state._drawn_at == engine.clock.now()


@pytest.mark.parametrize("key", ["ctrl+p", "question_mark", "q"])
async def test_what_can_be_seen_behind_a_dialog_is_not_out_of_date(
    engine: FakeEngine, key: str
) -> None:
    async with opened(engine, scenes.filled()) as (app, pilot):
        page = app.screen
        await pilot.press(key)
        await pilot.pause()
        assert app.screen is not page
        await engine.play(list(scenes.error())[-1:])
        engine.hub.close()
        await pilot.pause()
        await pilot.pause()
        told = "".join(text for line in page.query_one(StateBar)._lines for text, _ in line)
        assert "stopped" in told


async def test_without_focus_it_draws_less_often(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled()) as (app, _):
        state = app.screen.query_one(StateBar)
        app.app_focus = False
        drawn = set()
        for _tick in range(4 * BLURRED_TICKS):
            await engine.clock.advance(0.5)
            app._tick()
            drawn.add(state._drawn_at)
        assert len(drawn) == 5  # the one before, and each fourth


async def test_only_rows_that_changed_are_painted_again(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled(), size=(120, 36)) as (app, pilot):
        painted: list[int] = []
        card = app.screen.query_one("#run", RunCard)
        await pilot.pause()
        original = card.refresh

        def counting(*regions: object, **options: object) -> RunCard:
            painted.append(len(regions))
            return original(*regions, **options)  # type: ignore[arg-type]

        card.refresh = counting  # type: ignore[method-assign]
        await engine.clock.advance(1)
        app.publish()
        assert painted == [1, 1]  # the countdown to the merge, and how long the session lasts


# ----------------------------------------------------------------------------------------- look


async def test_ascii_uses_only_seven_bits(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled(), look=Look(ascii=True)) as (app, pilot):
        for key in ("", "question_mark"):
            await pilot.press(*filter(None, [key]))
            for size in ((120, 36), (80, 24), (20, 5)):
                await pilot.resize_terminal(*size)
                app.redraw()
                await pilot.pause()
                assert screen_text(app).isascii()


async def test_no_color_leaves_words_and_signs(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with opened(engine, scenes.paused()) as (app, _):
        assert app.no_color
        assert "‖ paused  on battery (64 %), until it is plugged in" in screen_text(app)


@pytest.mark.parametrize("theme", [theme.name for theme in themes.THEMES])
async def test_every_theme_of_ours_can_be_chosen(engine: FakeEngine, theme: str) -> None:
    async with opened(engine, scenes.filled(), look=Look(theme=theme)) as (app, pilot):
        assert app.theme == theme
        assert app.theme_variables["dim"]
        app.theme = "nord"  # and Textual's own have what our styles need
        await pilot.pause()
        assert "● training" in screen_text(app)


def test_an_unknown_theme_gives_ours() -> None:
    assert open_app(FakeEngine(), Look(theme="no such")).theme == themes.DEFAULT


@pytest.mark.parametrize("online", [True, False])
async def test_a_long_name_of_a_coordinator_never_hides_the_connection(
    engine: FakeEngine, online: bool
) -> None:
    told: list[events.AnyEvent] = [
        events.Started(
            coordinator="https://x",
            server="The Coordinator of a Very Long Name Indeed (Lab 4)",
            nickname="ada",
            fingerprint="",
            volunteer_id="v",
        ),
        events.Connection(online=online, message="" if online else "connection refused"),
    ]
    async with opened(engine, told, size=(120, 36)) as (app, pilot):
        for width in (80, 90, 100, 110, 120, 200):
            await pilot.resize_terminal(width, 36)
            app.redraw()
            await pilot.pause()
            header = screen_text(app).splitlines()[0]
            assert header.endswith("● online" if online else "○ offline")
            assert ("The Coord" in header) == (width >= 90)


async def test_a_view_of_another_process_says_so(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled()) as (app, pilot):
        for size in ((120, 36), (80, 24), (60, 16)):
            await pilot.resize_terminal(*size)
            for remote in (False, True):
                engine.control.remote = remote
                app.redraw()
                await pilot.pause()
                row = screen_text(app).splitlines()[1]
                assert ("● training (background)" in row) == remote


async def test_names_of_others_are_no_markup_and_no_control_codes(engine: FakeEngine) -> None:
    bad = events.Started(
        coordinator="https://x",
        server="[red]Lab[/red]\x1b[2J",
        nickname="ada",
        fingerprint="",
        volunteer_id="v",
    )
    async with opened(engine, [bad, events.Connection(online=True)], size=(120, 36)) as (app, _):
        assert "[red]Lab[/red] [2J" in screen_text(app)
        assert "\x1b" not in screen_text(app)


# ------------------------------------------------------------------------------------- start-up


def test_the_first_paint_needs_neither_torch_nor_a_network_library() -> None:
    """In a fresh Python, because here everything is loaded."""
    program = """
import asyncio, json, sys
from shared.clock import SystemClock
from volunteer.control.event_bus import EventBus
from volunteer.control.control import Control
from volunteer.tui.app import VolunteerApp
async def nothing(command): return None
async def main():
    app = VolunteerApp(Control(EventBus(SystemClock()), nothing))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert app.screen.query("#task-curve")
asyncio.run(main())
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"torch", "numpy", "httpx", "sqlalchemy", "tokenizers", "cryptography"}


async def test_the_program_works_before_anything_is_joined() -> None:
    app = VolunteerApp(None, tick_s=None)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("space", "f", "q")
        await pilot.pause()
    assert app.return_value == 0
    assert not app.query(Static)


async def test_the_stream_of_events_is_let_go_at_the_end(engine: FakeEngine) -> None:
    async with opened(engine, scenes.started()):
        assert len(engine.hub._subscriptions) == 1
    await asyncio.sleep(0)
    assert not engine.hub._subscriptions
    assert isinstance(engine.control, Control)


async def test_a_pause_gets_an_end_from_a_list(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled()) as (app, pilot):
        await pilot.press("P")
        await pilot.pause()
        assert "for 30 minutes" in screen_text(app)
        await pilot.press("escape")
        assert not [c for c in engine.asked if isinstance(c, commands.Pause)]
        await pilot.press("P", "down", "enter")
        await pilot.pause()
        await pilot.press("P", *["down"] * 4, "enter")
        await pilot.pause()
        hours, login = [c for c in engine.asked if isinstance(c, commands.Pause)]
        assert 7100 < hours.ends_at - time.time() <= 7200
        assert login.ends_at == commands.NEXT_LOGIN
