"""Leaving: at once without a task, after a question with one, and never more than was asked for."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from typing_extensions import override

from shared.protocol import endpoints
from shared.protocol.listings import LossPoint
from shared.protocol.versions import VersionInfo
from tests.tui import scenes
from tests.tui.engine import FakeEngine, opened, screen_text
from volunteer.control import commands, events
from volunteer.tui.screens.confirm_quit import Quit
from volunteer.tui.screens.dashboard import Dashboard


async def test_without_a_task_q_ends_at_once(engine: FakeEngine) -> None:
    async with opened(engine, scenes.empty()) as (app, pilot):
        await pilot.press("q")
        await pilot.pause()
    assert engine.asked == [commands.Stop(how="release")]
    assert app.return_value == 0


async def test_a_task_that_was_only_fetched_ahead_is_not_promised(engine: FakeEngine) -> None:
    told = [*scenes.filled(), *scenes.claimed(4712)]
    async with opened(engine, told) as (app, pilot):
        await pilot.press("q")
        await pilot.pause()
        text = screen_text(app)
        assert "Task 4711 of stdlib-gpt is 68 % done." in text
        assert "complete it, quit in about 1:26, earn 50.00 credits" in text


@pytest.mark.parametrize(
    ("key", "how"), [("f", "finish"), ("s", "save"), ("g", "release"), ("enter", "finish")]
)
async def test_with_a_task_q_asks_what_to_do_with_it(
    engine: FakeEngine, key: str, how: commands.How
) -> None:
    async with opened(engine, scenes.filled()) as (app, pilot):
        await pilot.press("q")
        await pilot.pause()
        assert isinstance(app.screen, Quit)
        assert "Task 4711 of stdlib-gpt is 68 % done." in screen_text(app)
        assert "quit in about 1:26, earn 50.00 credits" in screen_text(app)
        await pilot.press(key)
        await pilot.pause()
        await pilot.pause()
    assert engine.asked == [commands.Stop(how=how)]
    assert app.return_value == 0


async def test_the_way_to_leave_can_be_chosen_with_arrows_or_left(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled()) as (app, pilot):
        await pilot.press("q", "escape")
        await pilot.pause()
        assert isinstance(app.screen, Dashboard)
        assert not engine.asked
        await pilot.press("q", "down", "down", "enter")
        await pilot.pause()
        await pilot.pause()
    assert engine.asked == [commands.Stop(how="release")]


async def test_while_a_task_is_finished_the_screen_says_so_and_q_ends_at_once() -> None:
    slow = SlowEngine()
    async with opened(slow, scenes.filled()) as (app, pilot):
        await pilot.press("q", "f")
        await pilot.pause()
        assert "ending  the task in hand is completed first; q again" in screen_text(app)
        assert "space" not in screen_text(app).splitlines()[-1]  # nothing can be changed any more
        assert app.return_value is None
        await pilot.press("q")
        await pilot.pause()
    assert app.return_value == 0


async def test_the_exit_code_is_what_the_volunteer_ended_with() -> None:
    slow = SlowEngine()
    async with opened(slow, scenes.filled()) as (app, pilot):
        await pilot.press("q", "g")
        await pilot.pause()
        stopped = [event for event in scenes.error() if isinstance(event, events.Stopped)]
        await slow.play(stopped)
        slow.hub.close()
        await pilot.pause()
    assert app.return_value == 78


async def test_a_volunteer_that_ended_by_itself_stays_on_the_screen(engine: FakeEngine) -> None:
    async with opened(engine, scenes.error()) as (app, pilot):
        engine.hub.close()
        await pilot.pause()
        assert "✗ stopped  this version is too old" in screen_text(app)
        assert "pause" not in screen_text(app).splitlines()[-1]
        await pilot.press("q")
        await pilot.pause()
    assert app.return_value == 78
    assert not engine.asked


@pytest.mark.parametrize("remote", [False, True])
async def test_a_stop_by_a_command_ends_the_screen_of_its_own_process(
    engine: FakeEngine, remote: bool
) -> None:
    async with opened(engine, scenes.filled()) as (app, pilot):
        assert app.control is not None
        app.control.remote = remote
        ended = [event for event in scenes.error() if isinstance(event, events.Stopped)]
        await engine.play(replace(event, code=0, message="ended") for event in ended)
        engine.hub.close()
        await pilot.pause()
        await pilot.pause()
        if remote:
            assert "the volunteer has ended; q quits" in screen_text(app)
    assert app.return_value == (None if remote else 0)


async def test_an_end_without_a_word_is_told(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled()) as (app, pilot):
        engine.hub.close()
        await pilot.pause()
        await pilot.pause()
        app.redraw()
        assert "✗ stopped  the volunteer ended and gave no reason" in screen_text(app)
        await pilot.press("q")
        await pilot.pause()
    assert app.return_value == 1


async def test_leaving_a_volunteer_of_another_process_does_not_end_it(engine: FakeEngine) -> None:
    async with opened(engine, scenes.filled()) as (app, pilot):
        assert app.control is not None
        app.control.remote = True
        await pilot.press("q")
        await pilot.pause()
    assert app.return_value == 0
    assert not engine.asked


async def test_attaching_asks_for_the_versions_before(engine: FakeEngine) -> None:
    rows = tuple(
        VersionInfo(
            version=number,
            kind="merge",
            created_at=scenes.NOW,
            contributions=2,
            global_step=number,
            tokens=number,
            published_sha256="",
            loss=9.0 - number,
            mine=int(number == 2),
        )
        for number in range(4)
    )
    engine.answers[endpoints.VERSIONS] = rows  # the first page of a long history
    engine.answers[endpoints.LOSS] = tuple(
        LossPoint(version=number, loss=5.0 - number / 10, at=scenes.NOW) for number in (2, 10, 20)
    )
    for event in scenes.started():
        engine.hub.emit(event)
    engine.control.remote = True
    async with opened(engine) as (app, pilot):
        await app.workers.wait_for_complete()
        await pilot.pause()
        model = app.latest.models["stdlib-gpt"]
        assert [loss for _, loss in model.points[:6]] == [9.0, 8.0, 7.0, 6.0, 4.0, 3.0]
        assert 2 in model.mine


class SlowEngine(FakeEngine):
    """Engine that takes its time to end."""

    @override
    async def _execute(self, command: commands.Command[object]) -> object:
        if isinstance(command, commands.Stop):
            self.asked.append(command)
            return None
        return await super()._execute(command)
