"""Parts of an answer that machines of volunteers send, whatever they send, and their pay."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.accounts.bearer_tokens import Principal
from coordinator.database.inference.request_rows import shares
from coordinator.inference import answerers
from coordinator.inference.answerers import AnswerPart, SilentMachine, WaitingMachine
from coordinator.rules.recompute_result import is_other_model
from shared.protocol.inference import AnswerTask, AnswerTokens
from shared.protocol.versions import SignedManifest

ANN = Principal(volunteer_id="ann", worker_id="box", nickname="Ann")
TASK = AnswerTask(
    id="a",
    manifest=SignedManifest(payload="", signature=""),
    prompt=(1,),
    max_tokens=5,
    seed=1,
    place=0,
    temperature=1.0,
    top_p=1.0,
    end=None,
)


async def part() -> AnswerPart:
    return AnswerPart(WaitingMachine(ANN, ()), TASK)


async def arrived(one: AnswerPart) -> list[int]:
    return [token async for token in one.stream()]


async def test_tokens_that_are_sent_again_count_once_and_no_more_than_were_asked_for() -> None:
    one = await part()
    assert one.take(AnswerTokens(start=0, tokens=(7, 8)))
    assert one.take(AnswerTokens(start=0, tokens=(7, 8, 9)))
    assert not one.take(AnswerTokens(start=3, tokens=(1, 2, 3, 4, 5)))
    assert await arrived(one) == [7, 8, 9, 1, 2]
    assert one.finish == "length"
    assert not one.take(AnswerTokens(start=5, tokens=(6,)))


async def test_a_gap_or_a_failure_or_silence_ends_the_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for sent in (
        AnswerTokens(start=2, tokens=(7,)),
        AnswerTokens(start=0, finish="failed"),
        AnswerTokens(start=0, tokens=(7,), finish="length"),  # 5 tokens were asked for
    ):
        one = await part()
        assert not one.take(sent)
        with pytest.raises(SilentMachine):
            await arrived(one)
    monkeypatch.setattr(answerers, "FIRST_S", 0.01)
    with pytest.raises(SilentMachine):
        await arrived(await part())


async def test_a_part_of_full_length_may_end_with_these_words() -> None:
    one = await part()
    assert not one.take(AnswerTokens(start=0, tokens=(1, 2, 3, 4, 5), finish="length"))
    assert await arrived(one) == [1, 2, 3, 4, 5]
    assert one.finish == "length"


async def test_a_machine_that_drips_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answerers, "FIRST_S", 0.05)
    monkeypatch.setattr(answerers, "PACE_S", 0.0)
    one = await part()
    one.take(AnswerTokens(start=0, tokens=(7,)))
    with pytest.raises(SilentMachine):  # long before the next token would be missed
        async with asyncio.timeout(answerers.NEXT_S / 2):
            await arrived(one)


async def test_who_waits_gets_tokens_as_they_come() -> None:
    one = await part()
    reading = asyncio.ensure_future(arrived(one))
    await asyncio.sleep(0)
    one.take(AnswerTokens(start=0, tokens=(7,)))
    await asyncio.sleep(0)
    one.take(AnswerTokens(start=1, tokens=(8,), finish="stop"))
    assert await reading == [7, 8]


@given(
    cost=st.integers(0, 1 << 50),
    out=st.integers(0, 4096),
    tokens=st.lists(st.integers(-5, 5000), max_size=4),
    house=st.floats(0, 1),
)
def test_volunteers_never_get_more_than_was_paid(
    cost: int, out: int, tokens: list[int], house: float
) -> None:
    answered = {f"v{number}": count for number, count in enumerate(tokens)}
    found = shares(cost, out, answered, house)
    assert sum(found.values()) <= cost * (1 - house) + 1
    assert all(amount > 0 for amount in found.values())
    if 0 < sum(max(0, count) for count in tokens) == out and len(found) == 1:
        assert sum(found.values()) >= cost * (1 - house) - 1 - out


def test_few_wrong_tokens_prove_nothing() -> None:
    assert not is_other_model(2, 2)
    assert not is_other_model(1000, 3)
    assert is_other_model(48, 3)
