"""The engine at an address: a second coordinator, and servers that misbehave in every way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from coordinator.inference.inference_engine import AnswerPiece, Generation, ModelVersion
from coordinator.inference.upstream_engine import Upstream, UpstreamEngine
from shared.errors import BadRequest, NotFound, Unavailable, VolunteerError
from shared.workloads.generation import batch
from tests.support.answering import Answering, answering
from tests.support.counting_engine import expected
from tests.support.local_coordinator import RUN
from tests.support.rollouts_run import RUN as ROLLOUTS

LONGER = RUN.replace("block_size = 8", "block_size = 64")
TINY = ModelVersion(run_id=1, run="tiny", version=1)
Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Chained:
    """A coordinator that asks another one, which has the model as well."""

    def __init__(self, front: Answering, back: Answering, engine: UpstreamEngine) -> None:
        self.front, self.back, self.engine = front, back, engine


@asynccontextmanager
async def chained(path: Path, **upstream: Any) -> AsyncIterator[Chained]:
    async with answering(path / "back", LONGER) as back, answering(path / "front", LONGER) as front:
        inside = front.coordinator
        there = Upstream(**{"url": f"{back.url}/v1", "key": back.key} | upstream)
        engine = UpstreamEngine(inside.db, inside.clock, inside.blobs, there)
        inside.answers.connect(engine, there.pinned_versions())
        try:
            yield Chained(front, back, engine)
        finally:
            await engine.close()


async def test_another_coordinator_answers_and_both_are_paid_for_the_same_tokens(
    tmp_path: Path,
) -> None:
    async with chained(tmp_path) as both, both.front.client() as client:
        said = await client.completions.create(model="tiny", prompt="two", max_tokens=6, seed=3)
        assert said.choices[0].text == expected("two", 3, 6)
        assert said.choices[0].finish_reason == "length"
        assert said.usage is not None
        assert said.usage.completion_tokens == 6
        stream = await client.completions.create(
            model="tiny@best", prompt="x", max_tokens=5, seed=1, n=2, logprobs=1, stream=True
        )
        texts = ["", ""]
        async for chunk in stream:
            choice = chunk.choices[0]
            texts[choice.index] += choice.text
        assert texts == [expected("x", seed, 5) for seed in (1, 2)]
        for house in (both.front, both.back):
            await house.sound()
        rows = (await both.front.ann.get("/me/usage")).json()
        assert sorted(row["tokens_out"] for row in rows) == [6, 10]
        paid = (await both.front.balances()).spent_micro
        assert sum(row["cost_micro"] for row in rows) == paid > 0
        assert (await both.back.balances()).spent_micro > 0


async def test_prompts_for_a_model_of_bytes_are_counted_in_bytes(tmp_path: Path) -> None:
    """The model of `rollouts` has no tokenizer among its files, and its samples are answers."""
    async with chained(tmp_path) as both:
        await both.front.home.start_run(ROLLOUTS)
        prepared = await both.engine.prepare(
            ModelVersion(run_id=2, run="rollouts", version=0), "3 1 2"
        )
        assert (prepared.tokens, prepared.context) == (tuple(b"3 1 2"), 14)


async def test_a_stop_string_and_a_leaving_client_end_the_stream_there_as_well(
    tmp_path: Path,
) -> None:
    async with chained(tmp_path) as both, both.front.client() as client:
        stop = expected("x", 1, 3)[2]
        said = await client.completions.create(
            model="tiny", prompt="x", max_tokens=9, seed=1, stop=[stop]
        )
        assert (said.choices[0].text, said.choices[0].finish_reason) == (
            expected("x", 1, 2),
            "stop",
        )
        both.back.engine.gate = asyncio.Semaphore(3)
        stream = await client.completions.create(
            model="tiny", prompt="x", max_tokens=40, seed=1, stream=True
        )
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 2:
                break
        await stream.close()
        await both.front.sound()
        async with asyncio.timeout(120):
            while both.back.engine.open:
                await asyncio.sleep(0.01)
        await both.back.sound()
        rows = (await both.front.ann.get("/me/usage")).json()
        assert 3 + 2 <= sum(row["tokens_out"] for row in rows) <= 3 + 3


async def test_a_pinned_version_is_what_the_run_means(tmp_path: Path) -> None:
    async with chained(tmp_path, names={"tiny@0": "tiny@0"}) as both:
        async with both.front.client() as client:
            cards = [card.id async for card in client.models.list()]
            assert cards == ["tiny"]
            said = await client.completions.create(model="tiny", prompt="x", max_tokens=1, seed=1)
            assert said.choices[0].text
            with pytest.raises(openai.NotFoundError, match="only tiny@0 answers"):
                await client.completions.create(model="tiny@1", prompt="x", max_tokens=1)
        (row,) = (await both.back.ann.get("/me/usage")).json()
        assert row["model"] == "tiny@0"


async def test_a_name_with_the_version_in_it_and_one_that_is_not_there(tmp_path: Path) -> None:
    async with chained(tmp_path, names={"tiny": "other-{version}"}) as both:
        async with both.front.client() as client:
            with pytest.raises(openai.NotFoundError, match='does not have "tiny@1"'):
                await client.completions.create(model="tiny", prompt="x", max_tokens=1)
        assert (await both.front.balances()).spent_micro == 0
        await both.front.sound()


def generation(max_tokens: int, seed: int) -> Generation:
    sequence = batch.Sequence(id="a", prompt=(1,), max_tokens=max_tokens, seed=seed)
    return Generation(model=TINY, sequence=sequence, text="x")


async def test_twenty_streams_at_once_through_another_coordinator(tmp_path: Path) -> None:
    async with chained(tmp_path) as both:
        requests = [generation(max_tokens=4, seed=n) for n in range(20)]
        found = await asyncio.gather(*(_pieces(both.engine, each) for each in requests))
        assert [_text(pieces) for pieces in found] == [expected("x", n, 4) for n in range(20)]


# --- a server that misbehaves ---

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"


def _event(text: str, finish: str | None = None, **more: Any) -> bytes:
    chunk = {"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def says(*parts: bytes, head: bytes = HEAD) -> Behaviour:
    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head + b"\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()

    return behave


def status(code: int, body: bytes = b"{}", more: bytes = b"") -> Behaviour:
    head = b"HTTP/1.1 %d X\r\ncontent-length: %d\r\nconnection: close\r\n" % (code, len(body))
    return says(body, head=head + more)


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def stalls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"\r\n" + _event("a"))
    await asyncio.Event().wait()


def endless(part: bytes) -> Behaviour:
    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"\r\n")
        while True:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)

    return behave


async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"\r\n")
    while True:  # it is alive, and never gets anywhere
        writer.write(b": still thinking\n\n" + _event(""))
        await writer.drain()
        await asyncio.sleep(0.01)


@asynccontextmanager
async def server(behave: Behaviour) -> AsyncIterator[str]:
    tasks = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await reader.readuntil(b"\r\n\r\n")
            await behave(reader, writer)
        except (OSError, asyncio.CancelledError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    finally:
        for task in tasks:
            task.cancel()
        listening.close()


async def _pieces(engine: UpstreamEngine, request: Generation) -> list[AnswerPiece]:
    return [piece async for piece in engine.generate(request)]


def _text(pieces: list[AnswerPiece]) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.fixture
def asked() -> Generation:
    return generation(max_tokens=3, seed=-5)


WRONG: dict[str, tuple[Behaviour, type[VolunteerError]]] = {
    "500": (status(500, b"oops"), Unavailable),
    "429": (status(429, more=b"retry-after: 7\r\n"), Unavailable),
    "401": (status(401), Unavailable),
    "404": (status(404), NotFound),
    "400": (status(400, b'{"error":{"message":"too long"}}'), BadRequest),
    "redirect": (status(302, more=b"location: http://127.0.0.1:1/\r\n"), Unavailable),
    "redirect for ever": (status(307, more=b"location: /v1/completions\r\n"), Unavailable),
    "nothing": (says(head=b""), Unavailable),
    "no HTTP": (says(b"SSH-2.0-x\r\n", head=b""), Unavailable),
    "silence": (silent, Unavailable),
    "silence after a token": (stalls, Unavailable),
    "drips": (drips, Unavailable),
    "no end": (says(_event("a")), Unavailable),
    "only the end": (says(b"data: [DONE]\n\n"), Unavailable),
    "no JSON": (says(b"data: {]\n\n"), Unavailable),
    "not UTF-8": (says(b'data: {"choices":[{"text":"\xff\xfe"}]}\n\n'), Unavailable),
    "another shape": (says(b'data: {"choices":[{"text":5}]}\n\n'), Unavailable),
    "a list": (says(b"data: []\n\n"), Unavailable),
    "deep": (says(b"data: " + b'{"x":' * 20_000 + b"\n\n"), Unavailable),
    "NaN": (
        says(b'data: {"choices":[{"text":"a","logprobs":{"token_logprobs":[NaN]}}]}\n\n'),
        Unavailable,
    ),
    "an error in the stream": (says(_event("a"), b'data: {"error":{"code":1}}\n\n'), Unavailable),
    "an endless line": (endless(b"data: " + b"x" * 65536), Unavailable),
    "endless comments": (endless(b": nothing\n" * 4096), Unavailable),
    "compressed": (says(b"\x1f\x8b", head=HEAD + b"content-encoding: gzip\r\n"), Unavailable),
    "endless headers": (
        says(*[b"x: y\r\n" * 1000] * 1000, head=b"HTTP/1.1 200 OK\r\n"),
        Unavailable,
    ),
}


async def test_whatever_goes_wrong_is_settled_and_said(tmp_path: Path) -> None:
    async with answering(tmp_path, LONGER) as house, house.client() as client:
        came = 0
        for wrong, (behave, error) in WRONG.items():
            async with asked_at(house, behave, silent_s=0.3):
                with pytest.raises(openai.APIStatusError) as caught:
                    await client.completions.create(model="tiny", prompt="x", max_tokens=3)
            assert caught.value.status_code == error.status, wrong
            if error is Unavailable:
                assert int(caught.value.response.headers["retry-after"]) >= 1
            await house.sound()
            came += wrong in ("silence after a token", "no end", "an error in the stream")
            rows = (await house.ann.get("/me/usage")).json()
            assert sum(row["tokens_out"] for row in rows) == came, wrong
            assert [row["cost_micro"] > 0 for row in rows].count(True) == came


@asynccontextmanager
async def asked_at(
    house: Answering, behave: Behaviour, silent_s: float = 10
) -> AsyncIterator[UpstreamEngine]:
    """The house asks a server that behaves so."""
    inside = house.coordinator
    async with server(behave) as url:
        there = Upstream(url=url)
        engine = UpstreamEngine(inside.db, inside.clock, inside.blobs, there, silent_s)
        inside.answers.connect(engine)
        try:
            yield engine
        finally:
            await engine.close()


async def _told(behave: Behaviour, asked: Generation, house: Answering) -> list[AnswerPiece]:
    async with asked_at(house, behave) as engine:
        return await _pieces(engine, asked)


async def test_tokens_are_counted_by_usage_else_by_the_tokenizer_and_never_beyond_the_most(
    tmp_path: Path, asked: Generation
) -> None:
    async with answering(tmp_path, LONGER) as house:
        ends, done = _event("", "stop"), b"data: [DONE]\n\n"
        used = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n'
        cases: list[tuple[Behaviour, int]] = [
            (says(_event("ab"), ends, used % 2, done), 2),
            (says(_event("ab"), ends, used % 900, done), 3),
            (says(_event("ab"), ends, used % -7, done), 2),
            (says(_event("ab"), ends, done), 2),
            (says(_event("ab", "length")), 2),
            (says(ends, done), 0),
            (says(_event("a"), _event("b"), ends, used % 1, done), 2),
        ]
        for behave, tokens in cases:
            pieces = await _told(behave, asked, house)
            assert sum(len(piece.tokens) for piece in pieces) == tokens
            assert pieces[-1].finish in ("stop", "length")


async def test_a_text_that_goes_on_and_on_is_cut(tmp_path: Path, asked: Generation) -> None:
    async with answering(tmp_path, LONGER) as house:
        pieces = await _told(endless(_event("a")), asked, house)
        assert sum(len(piece.tokens) for piece in pieces) == 3
        assert pieces[-1].finish == "length"
        assert len(_text(pieces)) < 20


async def test_pictures_are_not_asked_for_there(tmp_path: Path) -> None:
    async with (
        answering(tmp_path, LONGER) as house,
        asked_at(house, status(200, b"{}")) as engine,
    ):
        with pytest.raises(BadRequest, match="draws no pictures"):
            await engine.images(TINY, 1, 5)


async def test_a_server_that_is_not_there_is_left_alone_for_a_while(tmp_path: Path) -> None:
    async with answering(tmp_path, LONGER) as house, house.client() as client:
        inside = house.coordinator
        there = Upstream(url="http://127.0.0.1:9/v1")
        engine = UpstreamEngine(inside.db, inside.clock, inside.blobs, there)
        inside.answers.connect(engine)
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(model="tiny", prompt="x", max_tokens=3)
            assert caught.value.status_code == 503
        rows = (await house.ann.get("/me/usage")).json()
        assert len(rows) == 1  # the second was refused before anything was held
        await house.sound()
        await engine.close()
