"""One contract, two engines: the built-in one, and a URL, which is that of another coordinator. Each
writes what a plain loop over the model writes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from coordinator.inference import process_messages
from coordinator.inference.builtin_engine import BuiltinEngine, ProcessLimits
from coordinator.inference.inference_engine import (
    AnswerPiece,
    Generation,
    InferenceEngine,
    ModelVersion,
)
from coordinator.inference.upstream_engine import Upstream, UpstreamEngine
from coordinator.runs.definition import of_file
from coordinator.runs.version_files import read_weights
from shared.clock import SystemClock
from shared.errors import BadRequest, NotFound, Unavailable
from shared.workloads.base import Decoder
from shared.workloads.generation import batch
from shared.workloads.generation.batch import Batch, Sequence
from shared.workloads.generation.sampling import Shaping
from tests.support.answering import Answering, answering
from tests.support.local_coordinator import RUN

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = RUN.replace("block_size = 8", "block_size = 1024")
MANY = """
[[serve.tiers]]
requests_per_minute = 100000
tokens = 4096
tokens_waiting = 1000000
"""
PROMPT = "1 plus 1 is"
NAMES = ["builtin", "url"]


@dataclass
class Engines:
    """All engines, with the same two versions, and these versions in this process."""

    house: Answering
    builtin: BuiltinEngine
    url: UpstreamEngine
    decoders: list[Decoder]

    def named(self, name: str) -> InferenceEngine:
        found: InferenceEngine = getattr(self, name)
        return found

    def expected(self, version: int = 0, prompt: str = PROMPT, **more: Any) -> list[Any]:
        """Return the tokens of one sequence alone, written in this process."""
        decoder = self.decoders[version]
        asked = {"max_tokens": 12, "seed": 3, **more}
        batch = Batch(decoder)
        batch.add(Sequence(id="a", prompt=tuple(decoder.encode(prompt)), **asked))
        made = []
        while len(batch):
            made += list(batch.step())
        return made


def process(house: Answering) -> BuiltinEngine:
    inside = house.coordinator
    return BuiltinEngine(inside.db, SystemClock(), inside.blobs, ProcessLimits(threads=1))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    async with answering(tmp_path_factory.mktemp("house"), LONG + MANY) as house:
        inside = house.coordinator
        own = process(house)
        inside.answers.connect(own)
        there = Upstream(url=f"{house.url}/v1", key=house.key)
        url = UpstreamEngine(inside.db, SystemClock(), inside.blobs, there)
        decoders = []
        for version in (0, 1):
            files = await own._files(_model(version))
            about = of_file(files.file)
            assert files.tokenizer is not None
            tokenizer = Path(files.tokenizer).read_bytes()
            weights = read_weights(Path(files.weights), about)
            found = about.workload.decoder(about.file.model, weights, tokenizer, 1, "cpu")
            assert found is not None
            decoders.append(found)
        try:
            yield Engines(house, own, url, decoders)
        finally:
            for each in (own, url):
                await each.close()


@pytest.fixture(params=NAMES)
def engine(request: pytest.FixtureRequest, engines: Engines) -> InferenceEngine:
    return engines.named(request.param)


def _model(version: int) -> ModelVersion:
    return ModelVersion(run_id=1, run="tiny", version=version)


async def ask(
    engine: InferenceEngine, version: int = 0, prompt: str = PROMPT, **more: Any
) -> list[AnswerPiece]:
    return [piece async for piece in await begin(engine, version, prompt, **more)]


async def begin(
    engine: InferenceEngine, version: int = 0, prompt: str = PROMPT, **more: Any
) -> AsyncIterator[AnswerPiece]:
    model = _model(version)
    prepared = await engine.prepare(model, prompt)
    asked = {"max_tokens": 12, "seed": 3, **more}
    sequence = batch.Sequence(id="a", prompt=prepared.tokens, **asked)
    return engine.generate(Generation(model=model, sequence=sequence, text=prompt))


def text(pieces: list[Any]) -> str:
    return "".join(piece.text for piece in pieces)


def tokens(pieces: list[AnswerPiece]) -> int:
    return sum(len(piece.tokens) for piece in pieces)


async def test_greedy_is_the_likeliest_token_each_time_of_whatever_version_is_asked(
    engine: InferenceEngine, engines: Engines
) -> None:
    versions = (0, 1, 0, 1, 1, 0)
    found = await asyncio.gather(*(ask(engine, each, temperature=0.0) for each in versions))
    wanted = [text(engines.expected(each, temperature=0.0)) for each in (0, 1)]
    assert [text(each) for each in found] == [wanted[each] for each in versions]
    assert wanted[0] != wanted[1]


async def test_a_seed_is_a_text_alone_and_among_others(
    engine: InferenceEngine, engines: Engines
) -> None:
    seeds = range(20)
    how: dict[str, Any] = {"temperature": 1.3, "top_p": 0.9}
    found = await asyncio.gather(*(ask(engine, seed=seed, **how) for seed in seeds))
    wanted = [text(engines.expected(seed=seed, **how)) for seed in seeds]
    assert [text(each) for each in found] == wanted
    assert text(await ask(engine, seed=7, **how)) == wanted[7]
    assert len(set(wanted)) > 10


SHAPINGS = (
    Shaping(top_k=3),
    Shaping(min_p=0.3, presence_penalty=1.0),
    Shaping(repetition_penalty=1.5, frequency_penalty=0.5, bias=((5, 3.0), (9, -100.0))),
)


async def test_shaped_choices_are_those_of_a_plain_loop(
    engine: InferenceEngine, engines: Engines
) -> None:
    how: dict[str, Any] = {"temperature": 1.3}
    plain = text(engines.expected(**how))
    for shaping in SHAPINGS:
        expected = text(engines.expected(shaping=shaping, **how))
        assert text(await ask(engine, shaping=shaping, **how)) == expected
        assert expected != plain


async def test_it_ends_at_the_most_tokens_and_at_a_stop_string(
    engine: InferenceEngine, engines: Engines
) -> None:
    whole = text(engines.expected(max_tokens=40, seed=5))
    found = await ask(engine, max_tokens=40, seed=5)
    assert (text(found), tokens(found), found[-1].finish) == (whole, 40, "length")
    stop = whole[20:23]
    found = await ask(engine, max_tokens=40, seed=5, stop=("never there", stop))
    assert (text(found), found[-1].finish) == (whole[: whole.index(stop)], "stop")
    assert 0 < tokens(found) < 40


async def test_probabilities_are_the_models(engine: InferenceEngine, engines: Engines) -> None:
    found = await ask(engine, logprobs=2, temperature=0.7)
    said = [each for piece in found for each in piece.logprobs]
    wanted = [each.chosen for each in engines.expected(logprobs=2, temperature=0.7)]
    assert [each.logprob for each in said] == pytest.approx(
        [each.logprob for each in wanted], abs=1e-4
    )
    assert all(1 <= len(each.top) <= 2 for each in said)  # tokens of one text are one


async def test_who_goes_away_leaves_room(engine: InferenceEngine, engines: Engines) -> None:
    async def leave() -> None:
        stream = await begin(engine, max_tokens=900)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]

    await asyncio.gather(*(leave() for _ in range(32)))
    assert text(await ask(engine)) == text(engines.expected())


async def test_what_cannot_be_answered_is_said(engine: InferenceEngine) -> None:
    with pytest.raises(NotFound):
        await ask(engine, version=9)
    with pytest.raises(BadRequest, match="1,000,000 characters, and 1024 tokens fit"):
        await ask(engine, prompt="x" * 1_000_000)
    with pytest.raises(BadRequest):
        await engine.images(_model(0), 1, 0)
    assert await ask(engine)


async def test_killed_processes_cost_what_they_worked_on_and_nothing_else(
    engines: Engines,
) -> None:
    every = [engines.named(name) for name in NAMES]
    streams = [await begin(each, max_tokens=900) for each in every]
    await asyncio.gather(*(anext(stream) for stream in streams))
    assert engines.builtin.pid is not None  # the one at the URL is another process
    os.kill(engines.builtin.pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(Unavailable):
            async for _ in stream:
                pass
    wanted = text(engines.expected())
    async with asyncio.timeout(120):
        said = await asyncio.gather(*(_in_the_end(each) for each in every))
    assert [text(each) for each in said] == [wanted] * len(every)


@pytest.mark.parametrize("gone", [False, True])
async def test_closing_ends_the_process_that_a_first_prompt_is_starting(
    engines: Engines, gone: bool
) -> None:
    engine, before = process(engines.house), set(psutil.Process().children())
    asking = asyncio.create_task(engine.prepare(_model(0), PROMPT))
    while not set(psutil.Process().children()) - before:
        await asyncio.sleep(0)
    if gone:
        asking.cancel()
    await engine.close()
    with pytest.raises(asyncio.CancelledError if gone else Unavailable):
        await asking
    assert not set(psutil.Process().children()) - before


async def test_an_event_that_nobody_can_read_ends_its_process_and_the_next_one_answers(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    babbler = tmp_path / "python"
    babbler.write_text(
        f"#!{sys.executable}\n"
        "import os, sys, time\n"
        "os.write(int(sys.argv[3]), (3).to_bytes(4, 'big') + b'\\xc1\\xc1\\xc1')\n"
        "time.sleep(600)\n"
    )
    babbler.chmod(0o700)
    engine = process(engines.house)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "executable", str(babbler))
            async with asyncio.timeout(60):
                with pytest.raises(Unavailable):
                    await engine.prepare(_model(0), PROMPT)
        assert engine.pid is None
        async with asyncio.timeout(120):
            assert text(await _in_the_end(engine)) == text(engines.expected())
    finally:
        await engine.close()


async def test_a_process_whose_server_dies_in_the_middle_of_an_order_ends() -> None:
    near, far = socket.socketpair()
    with far:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "coordinator.inference.inference_process"),
            *(str(far.fileno()), "1", "0", "cpu"),
            pass_fds=[far.fileno()],
        )
    with near:
        near.sendall(process_messages.HEAD.pack(100) + b"half an order")
    try:
        async with asyncio.timeout(120):
            assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()


async def _in_the_end(engine: InferenceEngine) -> list[AnswerPiece]:
    while True:
        try:
            return await ask(engine)
        except Unavailable as error:
            await asyncio.sleep(min(0.2, error.retry_after_s or 0.2))


async def test_a_token_of_no_word_does_not_hide_the_others_from_a_comparison(
    engines: Engines,
) -> None:
    model = _model(0)
    prepared = await engines.builtin.prepare(model, PROMPT)
    sequence = batch.Sequence(id="a", prompt=prepared.tokens, max_tokens=13, seed=3)
    request = Generation(model=model, sequence=sequence)
    right = [made.chosen.token for made in engines.expected(temperature=1.0) if made.chosen]
    assert await engines.builtin.compare(request, right, ended=False) == (len(right), 0)
    found = await engines.builtin.compare(request, [*right, 10**6], ended=False)
    assert found == (len(right) + 1, len(right) + 1)
