"""Prompts of the app's page Ask: a real server, read piece by piece, stopped, remembered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.clock import SystemClock
from shared.errors import Conflict, NotFound
from tests.support.answering import Answering, answering
from tests.support.counting_engine import CountingEngine, expected
from volunteer.account.prompts import RUNNING_MAX, Prompts
from volunteer.control.commands import AskModel
from volunteer.i18n.catalogue import LanguageChoice, choose, shown, use
from volunteer.net.api import Api
from volunteer.net.client import Client
from volunteer.net.tls import Address


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Answering]:
    engine = CountingEngine(gate=asyncio.Semaphore(0))
    async with answering(tmp_path / "house", engine=engine) as made:
        yield made


@pytest.fixture
async def client(house: Answering) -> AsyncIterator[Client]:
    token = f"{house.ann.worker_id}.{house.ann.secret}"
    found = Client(Address(url=house.url), clock=SystemClock(), token=token)
    yield found
    await found.close()


@pytest.fixture
async def prompts(client: Client, tmp_path: Path) -> AsyncIterator[Prompts]:
    found = Prompts(client, tmp_path / "prompts.json")
    yield found
    await found.close()


def let(house: Answering, tokens: int) -> None:
    assert house.engine.gate is not None
    for _ in range(tokens):
        house.engine.gate.release()


async def whole(prompts: Prompts, number: int) -> tuple[str, str]:
    """Text and error of an answer that is read to its end."""
    text, done, error = "", False, ""
    while not done:
        answer = await prompts.read(number, len(text))
        text, done, error = text + answer.text, answer.done, answer.error
    return text, error


ASKED = AskModel(model="tiny", prompt="hello", max_tokens=6, seed=2)


async def test_words_are_read_as_they_come_and_the_end_says_what_they_cost(
    house: Answering, prompts: Prompts, client: Client
) -> None:
    card = await Api(client).model("tiny")
    assert card.price_micro > 0
    number = prompts.ask(ASKED)
    let(house, 2)
    seen = ""
    while len(seen) < 2:
        seen += (await prompts.read(number, len(seen))).text
    assert seen == expected("hello", 2, 6)[:2]
    let(house, 4)
    assert await whole(prompts, number) == (expected("hello", 2, 6), "")
    used = (await prompts.read(number, 0)).used
    assert used is not None
    assert (used.completion_tokens, used.cost_micro > 0) == (6, True)
    (past,) = prompts.past()
    assert (past.prompt, past.text) == ("hello", expected("hello", 2, 6))
    prompts.forget()
    assert prompts.past() == ()
    await house.sound()


async def test_an_answer_that_is_stopped_is_paid_as_far_as_it_came(
    house: Answering, prompts: Prompts
) -> None:
    number = prompts.ask(ASKED)
    let(house, 3)
    while not (await prompts.read(number, 0)).text:
        pass
    await prompts.stop(number)
    text, error = await whole(prompts, number)
    assert error == "stopped"
    assert expected("hello", 2, 6).startswith(text)
    let(house, 10)
    await house.sound()


async def test_an_answer_that_is_stopped_before_it_begins_ends(
    house: Answering, prompts: Prompts
) -> None:
    for _ in range(2 * RUNNING_MAX):  # none of them stays in the way of the next
        number = prompts.ask(ASKED)
        await prompts.stop(number)
        assert await whole(prompts, number) == ("", "stopped")
    await house.sound()


async def test_a_failure_of_ours_ends_the_answer_and_is_told(
    house: Answering, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_bytes(b"")
    prompts = Prompts(client, tmp_path / "taken" / "prompts.json")  # no folder: cannot be written
    number = prompts.ask(ASKED)
    let(house, 6)
    text, error = await whole(prompts, number)
    assert text == expected("hello", 2, 6)
    assert error.startswith("not remembered: ")
    use(choose("de"))
    try:
        assert "kann nicht gelesen werden" in shown(error)
    finally:
        use(LanguageChoice())


async def test_an_answer_without_an_end_is_cut_off(
    house: Answering, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volunteer.account.prompts.ANSWER_CHARS_MAX", 4)
    number = prompts.ask(ASKED)
    let(house, 6)
    text, error = await whole(prompts, number)
    assert text.startswith(expected("hello", 2, 6)[:5])
    assert "longer than 4 characters" in error
    await house.sound()


async def test_what_the_coordinator_refuses_is_told_in_its_words(
    house: Answering, prompts: Prompts
) -> None:
    number = prompts.ask(AskModel(model="tinny", prompt="x"))
    _, error = await whole(prompts, number)
    assert "tiny" in error
    with pytest.raises(NotFound):
        await prompts.read(99, 0)


async def test_only_a_few_answers_are_on_their_way_at_once(
    house: Answering, prompts: Prompts
) -> None:
    for _ in range(RUNNING_MAX):
        prompts.ask(ASKED)
    with pytest.raises(Conflict, match="wait for one, or stop it"):
        prompts.ask(ASKED)
    let(house, 6 * RUNNING_MAX)
    for number in range(1, RUNNING_MAX + 1):
        await whole(prompts, number)
    await house.sound()
