"""A shared value: loaded once for all who ask at the same time, again when it is old, and never
kept after a failure.
"""

from __future__ import annotations

import asyncio

import pytest

from coordinator.ttl_cache import CachedValue, KeyedCache
from shared.errors import NotFound, Unavailable
from tests.support.virtual_clock import VirtualClock


class Source:
    """Counts how often it was asked; answers when it is let."""

    def __init__(self) -> None:
        self.asked = 0
        self.open = asyncio.Event()
        self.fails = False

    async def load(self) -> int:
        self.asked += 1
        number = self.asked
        await self.open.wait()
        if self.fails:
            raise Unavailable("no")
        return number


async def test_all_who_ask_at_once_share_one_load() -> None:
    source, clock = Source(), VirtualClock()
    fresh = CachedValue(source.load, 1.0, clock)
    asking = [asyncio.create_task(fresh.get()) for _ in range(100)]
    await asyncio.sleep(0)
    source.open.set()
    assert await asyncio.gather(*asking) == [1] * 100
    assert await fresh.get() == 1
    await clock.advance(0.9)
    assert await fresh.get() == 1
    await clock.advance(0.2)
    assert await fresh.get() == 2


async def test_one_who_leaves_does_not_spoil_it_for_the_others() -> None:
    source = Source()
    fresh = CachedValue(source.load, 1.0, VirtualClock())
    first, second = asyncio.create_task(fresh.get()), asyncio.create_task(fresh.get())
    await asyncio.sleep(0)
    first.cancel()
    source.open.set()
    assert await second == 1


async def test_a_failure_is_told_and_not_kept() -> None:
    source = Source()
    source.open.set()
    source.fails = True
    fresh = CachedValue(source.load, 1.0, VirtualClock())
    with pytest.raises(Unavailable):
        await fresh.get()
    source.fails = False
    assert await fresh.get() == 2


async def test_what_was_dropped_is_loaded_anew() -> None:
    source = Source()
    source.open.set()
    fresh = CachedValue(source.load, 60.0, VirtualClock())
    assert await fresh.get() == 1
    fresh.drop()
    assert await fresh.get() == 2


async def test_under_way_the_next_value_keeps_nobody_waiting() -> None:
    source, clock = Source(), VirtualClock()
    source.open.set()
    fresh = CachedValue(source.load, 1.0, clock)
    assert fresh.peek() is None
    assert await fresh.get() == 1
    source.open.clear()
    await clock.advance(0.8)
    assert await fresh.get() == 1  # and the next one is being loaded
    assert fresh.peek() == 1
    source.open.set()
    await clock.advance(0.1)
    assert fresh.peek() == 2
    assert source.asked == 2


async def test_a_load_that_was_dropped_is_not_taken() -> None:
    source, clock = Source(), VirtualClock()
    fresh = CachedValue(source.load, 60.0, clock)
    first = asyncio.create_task(fresh.get())
    await asyncio.sleep(0)
    fresh.drop()
    second = asyncio.create_task(fresh.get())
    await asyncio.sleep(0)
    source.open.set()
    assert [await first, await second] == [1, 2]
    assert fresh.peek() == 2


async def test_what_takes_long_to_load_is_loaded_less_often() -> None:
    source, clock = Source(), VirtualClock()
    fresh = CachedValue(source.load, 1.0, clock, rest=20.0)
    asking = asyncio.create_task(fresh.get())
    await asyncio.sleep(0)
    await clock.advance(3)  # it takes so long
    source.open.set()
    assert await asking == 1
    await clock.advance(0.7 * 60)
    assert fresh.peek() == 1
    assert source.asked == 1
    await clock.advance(0.4 * 60)
    assert await fresh.get() == 2


async def test_values_are_kept_by_key_and_the_oldest_question_is_forgotten() -> None:
    asked: list[str] = []

    async def ask(name: str) -> str:
        async def load() -> str:
            asked.append(name)
            return name.upper()

        return await kept.get(name, load)

    kept: KeyedCache[str, str] = KeyedCache(60.0, VirtualClock(), most=2)
    assert [await ask(name) for name in "abab"] == ["A", "B", "A", "B"]
    assert asked == ["a", "b"]
    assert [await ask(name) for name in "cba"] == ["C", "B", "A"]  # c put a out
    assert asked == ["a", "b", "c", "a"]
    kept.clear()
    await ask("a")
    assert asked[-2:] == ["a", "a"]


async def test_a_key_is_loaded_by_its_newest_caller() -> None:
    clock = VirtualClock()
    values: KeyedCache[str, float] = KeyedCache(1.0, clock)

    async def look() -> float:
        began = clock.now()

        async def load() -> float:
            return began

        return await values.get("when", load)

    first = await look()
    await clock.advance(5.0)
    assert await look() == first + 5.0


async def test_keys_without_a_value_put_no_value_out() -> None:
    """Strangers choose some keys: a run's name, for example."""
    kept, loads = KeyedCache[str, int](60.0, VirtualClock(), most=2), 0

    async def load() -> int:
        nonlocal loads
        loads += 1
        return loads

    async def fail() -> int:
        raise NotFound("there is no such run")

    assert await kept.get("a", load) == 1
    for name in "xyz":
        with pytest.raises(NotFound):
            await kept.get(name, fail)
    failing = [kept.get(name, fail) for name in "pqrs"]
    assert len(await asyncio.gather(*failing, return_exceptions=True)) == 4
    assert await kept.get("a", load) == 1
    assert await kept.get("x", load) == 2  # a failure is not kept either
