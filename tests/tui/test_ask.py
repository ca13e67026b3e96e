"""Ask: words as they come, their price, options, what is remembered."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot

from shared.errors import NotFound
from shared.protocol.inference import ModelCard, Usage
from tests.tui import scenes
from tests.tui.engine import FakeEngine, open_app, opened, screen_text
from tests.tui.pages import SIZES, SMALL, Snapshot, prepared, settle
from volunteer.control import commands
from volunteer.control.commands import Answer, PastPrompt
from volunteer.tui.app import VolunteerApp
from volunteer.tui.look import Look
from volunteer.tui.screens.ask import AskScreen

PAGE = Look(page="runs")
CARD = ModelCard(
    id="stdlib-gpt",
    created=0,
    owned_by="volunteers",
    description="A conversation is written as a plain transcript.",
    price_micro=1_000,
)
USED = Usage(prompt_tokens=3, completion_tokens=12, total_tokens=15, cost_micro=15)
PAST = (
    PastPrompt(model="stdlib-gpt", prompt="class A", text=":\n    pass", cost_micro=9),
    PastPrompt(model="stdlib-gpt@3", prompt="import ", text="os", cost_micro=2),
)


def answering(engine: FakeEngine, answer: Answer) -> FakeEngine:
    found = prepared(engine)
    found.answers |= {
        commands.GetModel: CARD,
        commands.GetPrompts: PAST,
        commands.AskModel: 1,
        commands.ReadAnswer: answer,
    }
    return found


DONE = Answer(text="self, text):\n    return text\x1b[2J", done=True, used=USED)


async def asked(app: VolunteerApp, pilot: Pilot[int], text: str = "def parse(") -> str:
    """Open the page of the run, ask, and return what is on the screen then."""
    await settle(app, pilot)
    await pilot.press("p")
    await settle(app, pilot)
    await pilot.press(*text, "enter")
    await settle(app, pilot)
    return screen_text(app)


@pytest.mark.parametrize("size", [*SIZES, "60x16"])
def test_picture(engine: FakeEngine, snap_compare: Snapshot, size: str) -> None:
    answering(engine, DONE)

    async def before(pilot: Pilot[Any]) -> None:
        assert isinstance(pilot.app, VolunteerApp)
        await pilot.pause()
        await engine.play(scenes.filled())
        await settle(pilot.app, pilot)
        await pilot.press("p")
        await settle(pilot.app, pilot)
        await pilot.press("ctrl+b", *"def parse(", "enter")
        await settle(pilot.app, pilot)

    terminal = {**SIZES, "60x16": SMALL}[size]
    assert snap_compare(open_app(engine, PAGE), terminal_size=terminal, run_before=before)


async def test_the_words_and_their_price_are_shown(engine: FakeEngine) -> None:
    async with opened(answering(engine, DONE), scenes.filled(), look=PAGE) as (app, pilot):
        seen = await asked(app, pilot)
    assert "def parse(self, text):" in seen
    assert "return text" in seen
    assert "3 tokens in, 12 out: 0.000015 credits" in seen
    assert "\x1b" not in seen
    (sent,) = (c for c in engine.asked if isinstance(c, commands.AskModel))
    assert (sent.model, sent.prompt, sent.max_tokens) == ("stdlib-gpt", "def parse(", None)


async def test_before_and_after_ask_two_versions(engine: FakeEngine) -> None:
    async with opened(answering(engine, DONE), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("p", "ctrl+b", *"x", "enter")
        await settle(app, pilot)
    models = {c.model for c in engine.asked if isinstance(c, commands.AskModel)}
    assert models == {"stdlib-gpt", "stdlib-gpt@0"}


async def test_the_price_and_who_reads_stand_there_before_the_first_prompt(
    engine: FakeEngine,
) -> None:
    async with opened(answering(engine, DONE), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("p")
        await settle(app, pilot)
        seen = screen_text(app)
    assert "The organiser's machines read your prompt" in seen
    assert "at most about 0.000128 credits; you have" in seen


async def test_a_long_refusal_is_read_to_its_end(engine: FakeEngine) -> None:
    said = "the prompt has 300 tokens and 128 fit, answer included: shorten it, or lower max_tokens"
    answering(engine, Answer(done=True, error=said))
    async with opened(engine, scenes.filled(), look=PAGE) as (app, pilot):
        assert "max_tokens" in await asked(app, pilot)


async def test_an_option_that_is_no_number_is_named_and_nothing_is_sent(
    engine: FakeEngine,
) -> None:
    async with opened(answering(engine, DONE), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("p", "tab", *"x", "shift+tab")
        await settle(app, pilot)
        await pilot.press(*"hi", "enter")
        await settle(app, pilot)
        assert "is no number" in screen_text(app)
    assert not [c for c in engine.asked if isinstance(c, commands.AskModel)]


async def test_what_was_asked_before_comes_back_and_can_be_erased(engine: FakeEngine) -> None:
    async with opened(answering(engine, DONE), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("p")
        await settle(app, pilot)
        await pilot.press("up", "up")
        await settle(app, pilot)
        assert "class A:" in screen_text(app)
        await pilot.press("ctrl+r")
        await settle(app, pilot)
        assert "are erased" in screen_text(app)
    assert commands.ForgetPrompts() in engine.asked


async def test_a_run_that_cannot_be_asked_says_why(engine: FakeEngine) -> None:
    answering(engine, Answer(done=True, error="too little credit: 3 more are needed"))
    async with opened(engine, scenes.filled(), look=PAGE) as (app, pilot):
        assert "too little credit" in await asked(app, pilot)


async def test_a_model_that_is_not_there_is_a_sentence(engine: FakeEngine) -> None:
    async with opened(answering(engine, DONE), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        engine.refuses = NotFound("nobody may ask this run")
        await pilot.press("p")
        await settle(app, pilot)
        assert "nobody may ask this run" in screen_text(app)
        await pilot.press("escape")
        await settle(app, pilot)
        assert "Ask stdlib" not in screen_text(app)


async def test_escape_stops_an_answer_and_again_closes_without_waiting_for_its_end(
    engine: FakeEngine,
) -> None:
    async with opened(answering(engine, DONE), scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("p")
        await settle(app, pilot)
        page = app.screen
        assert isinstance(page, AskScreen)
        page._asked.append(1)
        await pilot.press("escape")
        await settle(app, pilot)
        assert app.screen is page
        await pilot.press("escape")
        await settle(app, pilot)
        assert app.screen is not page
    assert [c for c in engine.asked if isinstance(c, commands.StopAnswer)] == [
        commands.StopAnswer(id=1)
    ]


async def test_that_strangers_may_read_is_said_before_and_can_be_forbidden(
    engine: FakeEngine,
) -> None:
    answering(engine, DONE)
    engine.answers[commands.GetModel] = msgspec.structs.replace(CARD, answered_by="volunteers")
    async with opened(engine, scenes.filled(), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        await pilot.press("p")
        await settle(app, pilot)
        assert "their owners can read your prompt" in screen_text(app)
        await pilot.press("ctrl+o")
        await settle(app, pilot)
        assert "organiser's machines read your prompt" in screen_text(app)
        await pilot.press(*"def", "enter")
        await settle(app, pilot)
    (sent,) = (c for c in engine.asked if isinstance(c, commands.AskModel))
    assert sent.private
