"""The engine in its own process: the same text as in this one, many at once, killed and restarted."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.inference.builtin import BuiltinEngine, Power
from coordinator.inference.engine import Generation, ModelVersion, Piece
from shared.clock import SystemClock
from shared.errors import BadRequest, NotFound, Unavailable
from tests.support.local_coordinator import RUN, LocalCoordinator, local_coordinator

pytestmark = pytest.mark.asyncio
TINY = ModelVersion(run_id=1, run="tiny", version=0)


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(RUN.replace("block_size = 8", "block_size = 64"))
        yield home


@pytest.fixture
async def engine(home: LocalCoordinator) -> AsyncIterator[BuiltinEngine]:
    found = BuiltinEngine(
        home.coordinator.db, SystemClock(), home.coordinator.blobs, Power(threads=1)
    )
    try:
        yield found
    finally:
        await found.close()


async def ask(engine: BuiltinEngine, prompt: str, **more: Any) -> list[Piece]:
    prepared = await engine.prepare(TINY, prompt)
    request = Generation(
        id="a", model=TINY, prompt=prepared.tokens, **{"max_tokens": 12, "seed": 3, **more}
    )
    return [piece async for piece in engine.generate(request)]


def text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


async def test_a_seed_gives_the_same_text_alone_and_among_forty(engine: BuiltinEngine) -> None:
    alone = await ask(engine, "1 plus 1 is")
    assert sum(len(piece.tokens) for piece in alone) <= 12
    assert alone[-1].finish in ("length", "stop")
    others = [ask(engine, f"{number} plus", seed=number) for number in range(39)]
    found = await asyncio.gather(ask(engine, "1 plus 1 is"), *others)
    assert text(found[0]) == text(alone)
    assert len({text(each) for each in found}) > 10


async def test_probabilities_come_where_they_are_wanted(engine: BuiltinEngine) -> None:
    plain, told = await ask(engine, "1"), await ask(engine, "1", logprobs=2, temperature=0.0)
    assert not any(piece.logprobs for piece in plain)
    probed = [each for piece in told for each in piece.logprobs]
    assert probed
    assert all(each.logprob <= 0 and each.top[0][1] == each.logprob for each in probed)


async def test_who_goes_away_leaves_room(engine: BuiltinEngine) -> None:
    async def leave() -> None:
        prepared = await engine.prepare(TINY, "1 plus")
        request = Generation(
            id="a", model=TINY, prompt=prepared.tokens, max_tokens=50, seed=1, temperature=2.0
        )
        stream = engine.generate(request)
        await anext(stream)
        await stream.aclose()

    await asyncio.gather(*(leave() for _ in range(64)))
    assert (await ask(engine, "2 plus"))[-1].finish


async def test_a_killed_process_costs_what_it_worked_on_and_nothing_else(
    engine: BuiltinEngine,
) -> None:
    prepared = await engine.prepare(TINY, "1 plus")
    request = Generation(id="a", model=TINY, prompt=prepared.tokens, max_tokens=50, seed=1)
    stream = engine.generate(request)
    await anext(stream)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(Unavailable):
        async for _ in stream:
            pass
    with pytest.raises(Unavailable) as refused:  # it rests before it begins again
        await ask(engine, "1 plus")
    assert refused.value.retry_after_s
    async with asyncio.timeout(60):
        while True:
            try:
                assert await ask(engine, "1 plus")
                return
            except Unavailable as error:
                await asyncio.sleep(min(0.2, error.retry_after_s or 0.2))


async def test_what_cannot_be_answered_is_said(
    engine: BuiltinEngine, home: LocalCoordinator
) -> None:
    with pytest.raises(NotFound):
        await engine.prepare(ModelVersion(run_id=1, run="tiny", version=9), "1")
    with pytest.raises(BadRequest, match="draw no pictures"):
        await engine.images(TINY, 1, 0)
    with pytest.raises(BadRequest, match="1,000,000 characters, and 64 tokens fit"):
        await engine.prepare(TINY, "x" * 1_000_000)
    assert await ask(engine, "still there")
