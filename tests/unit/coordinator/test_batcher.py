"""Batcher: requests that are served together, each with its own answer or error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.batcher import Batcher
from shared.errors import NotFound, Unavailable


@given(
    requests=st.lists(st.sampled_from(("good", "missing", "poison")), max_size=20),
    most=st.integers(1, 8),
)
def test_an_error_is_told_to_its_own_requester(requests: list[str], most: int) -> None:
    served: list[int] = []

    async def serve(batch: Sequence[str]) -> list[str | Exception]:
        served.append(len(batch))
        await asyncio.sleep(0)
        if "poison" in batch:
            raise ValueError("poison")
        return [NotFound("none") if each == "missing" else f"{each} done" for each in batch]

    async def ask_all() -> list[str | BaseException]:
        batcher: Batcher[str, str] = Batcher(serve, most)
        return await asyncio.gather(*map(batcher.ask, requests), return_exceptions=True)

    kinds = {"good": str, "missing": NotFound, "poison": ValueError}
    assert [type(each) for each in asyncio.run(ask_all())] == [kinds[each] for each in requests]
    assert max(served, default=0) <= most


async def test_what_waits_is_served_together_and_who_hung_up_is_left_out() -> None:
    batches: list[list[int]] = []
    gate = asyncio.Event()

    async def serve(batch: Sequence[int]) -> list[int]:
        batches.append(list(batch))
        await gate.wait()
        return list(batch)

    batcher: Batcher[int, int] = Batcher(serve, 10)
    asking = [asyncio.create_task(batcher.ask(number)) for number in range(5)]
    while not batches:
        await asyncio.sleep(0)
    asking[3].cancel()
    await asyncio.gather(asking[3], return_exceptions=True)
    gate.set()
    assert await asyncio.gather(*asking[:3], asking[4]) == [0, 1, 2, 4]
    assert [number for batch in batches for number in batch] in ([0, 1, 2, 4], [0, 1, 2, 3, 4])


async def test_a_database_that_is_away_is_not_asked_once_more_for_each() -> None:
    calls = []

    async def serve(batch: Sequence[int]) -> list[int]:
        calls.append(len(batch))
        raise Unavailable("away")

    batcher: Batcher[int, int] = Batcher(serve, 10)
    found = await asyncio.gather(*map(batcher.ask, range(5)), return_exceptions=True)
    assert all(isinstance(each, Unavailable) for each in found)
    assert sum(calls) == 5
    with pytest.raises(Unavailable):
        await batcher.ask(6)


async def test_requests_of_one_key_are_served_one_after_the_other() -> None:
    batches: list[list[str]] = []

    async def serve(batch: Sequence[str]) -> list[str]:
        batches.append(list(batch))
        await asyncio.sleep(0)
        return list(batch)

    batcher: Batcher[str, str] = Batcher(serve, 3, key=lambda request: request[0])
    asked = ["a1", "a2", "b1", "a3", "c1", "d1", "b2"]
    assert await asyncio.gather(*map(batcher.ask, asked)) == asked
    assert batches == [["a1", "b1", "c1"], ["a2", "d1", "b2"], ["a3"]]


async def test_nobody_waits_for_ever_where_serving_is_cancelled() -> None:
    async def serve(batch: Sequence[int]) -> list[int]:
        raise asyncio.CancelledError

    batcher: Batcher[int, int] = Batcher(serve, 2)
    asking = [asyncio.create_task(batcher.ask(number)) for number in range(5)]
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in found)
