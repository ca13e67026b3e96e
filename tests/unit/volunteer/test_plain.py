"""The volunteer by questions and answers, as a screen reader reads it."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest

from shared.errors import Conflict
from tests.tui import scenes
from tests.tui.engine import FakeEngine
from volunteer.control import commands, events
from volunteer.plain import HELP, Plain, typed_lines


class Talk:
    """A person who types, and all that was said."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.out = io.StringIO()
        self._typed: asyncio.Queue[str] = asyncio.Queue()
        self.running = asyncio.ensure_future(Plain(engine.control, self.out, self._lines()).run())

    async def _lines(self) -> AsyncIterator[str]:
        while True:
            yield await self._typed.get()

    async def ask(self, line: str) -> list[str]:
        """Return the lines that are said to a line that is typed."""
        before = len(self.out.getvalue())
        self._typed.put_nowait(line)
        for _ in range(20):
            await asyncio.sleep(0)
        return self.out.getvalue()[before:].splitlines()


@asynccontextmanager
async def talk(told: Iterable[events.AnyEvent] = ()) -> AsyncIterator[Talk]:
    engine = FakeEngine()
    found = Talk(engine)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await engine.play(told)
    yield found
    found.running.cancel()
    await asyncio.gather(found.running, return_exceptions=True)


async def test_status_is_told_in_sentences_without_any_drawing() -> None:
    feels = events.Sensed(
        device="cpu", utilisation=0.5, celsius=61.0, watts=42.0, joules=1_123_000.0, estimated=True
    )
    async with talk([*scenes.filled(), feels]) as said:
        lines = await said.ask("status")
        assert any("task 4711 of stdlib-gpt on cpu: step 34 of 50" in line for line in lines)
        assert any('"ada" at Little Lab' in line for line in lines)
        (device,) = await said.ask("devices")
        assert "load 50 percent, 61 degrees, 42 watts, an estimate" in device
        assert "0.312 kilowatt-hours today, an estimate" in device
        assert (await said.ask("runs"))[0].startswith("stdlib-gpt, gpt, running, version 4")
        text = said.out.getvalue()
        assert "\x1b" not in text
        assert not set(text) & set("─│╭╮╰╯━▂▄▆█●○◌▶‖✓✗⣿·")


async def test_news_are_told_once_and_only_when_they_are_asked_for() -> None:
    async with talk(scenes.started()) as said:
        before = said.out.getvalue()
        news = await said.ask("")
        assert before.count("\n") == 1  # the greeting: nothing speaks unasked
        assert any("devices: cpu" in line for line in news)
        assert await said.ask("") == ["nothing new"]
        await said.engine.play([*scenes.training(), events.Traffic(sent_bytes=1, received_bytes=1)])
        assert len(await said.ask("")) == 1  # the claim; steps are no news


async def test_a_failure_speaks_for_itself() -> None:
    async with talk(scenes.started()) as said:
        await said.engine.play([events.Notice(level="error", message="the disk is full")])
        await asyncio.sleep(0)
        assert "the disk is full" in said.out.getvalue()


async def test_commands_are_given_and_slips_answered() -> None:
    async with talk(scenes.filled()) as said:
        assert await said.ask("pause cpu") == ["paused; resume goes on"]
        assert await said.ask("resume cpu") == ["going on"]
        assert await said.ask("paus") == ["there is no command paus: did you mean pause?"]
        assert len(await said.ask("help")) == len(HELP)
        devices = [c.device for c in said.engine.asked if isinstance(c, commands.Pause)]
        assert devices == ["cpu"]
        said.engine.refuses = Conflict("this needs a coordinator: join one first")
        assert await said.ask("finish") == ["this needs a coordinator: join one first"]


async def test_quit_keeps_the_task_and_ends() -> None:
    async with talk(scenes.filled()) as said:
        await said.ask("quit")
        await asyncio.wait_for(said.running, 10)
        assert [c.how for c in said.engine.asked if isinstance(c, commands.Stop)] == ["save"]


async def test_lines_are_read_to_the_end_of_the_input() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"  Status \nPAUSE cpu\n" + b"x" * 5000 + b"\n\nlast without an end")
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        found = [line async for line in typed_lines(file)]
    assert found[:2] == ["status", "pause cpu"]
    assert len(found[2]) == 1000
    assert found[3:] == [""]


@pytest.mark.parametrize("word", [word for word, _ in HELP])
async def test_every_command_of_the_help_is_one(word: str) -> None:
    async with talk(scenes.filled()) as said:
        lines = await said.ask("" if word == "enter" else word)
        assert not any("there is no command" in line for line in lines)
