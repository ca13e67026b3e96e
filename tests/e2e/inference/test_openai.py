"""OpenAI's own client against a real server: completions, conversations, streams, refusals."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from coordinator.http.app import create_app
from coordinator.inference.inference_engine import PreparedPrompt
from coordinator.v1 import reply_sender
from shared.errors import Unavailable
from shared.protocol.inference import UsageRow
from shared.workloads.data.image_dataset import build_images
from shared.workloads.data.image_sources import digit_pictures
from tests.support.answering import Answering, answering
from tests.support.counting_engine import PNG, CountingEngine, expected
from tests.support.local_coordinator import RUN, decode

CHAT: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
]
TRANSCRIPT = "System: Be brief.\nUser: Hello\nAssistant:"


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Answering]:
    async with answering(tmp_path) as made:
        yield made


async def test_a_completion_is_metered_on_either_database(
    tmp_path: Path, database_url: str
) -> None:
    async with answering(tmp_path, database=database_url) as house, house.client() as client:
        before = await house.balances()
        said = await client.completions.create(model="tiny", prompt="two", max_tokens=6, seed=3)
        assert said.choices[0].text == expected("two", 3, 6)
        assert said.choices[0].finish_reason == "length"
        assert said.usage is not None
        usage = (said.usage.prompt_tokens, said.usage.completion_tokens, said.usage.total_tokens)
        assert usage == (3, 6, 9)
        after = await house.balances()
        price = said.usage.model_dump()["cost_micro"]
        assert price > 0
        assert before.earned_micro - after.earned_micro == after.spent_micro == price
        await house.sound()


async def test_the_synchronous_client_streams(house: Answering) -> None:
    def ask() -> tuple[str, Any]:
        with house.plain() as client:
            chunks = list(
                client.completions.create(
                    model="tiny@best",
                    prompt="x",
                    max_tokens=5,
                    seed=1,
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
        text = "".join(c.choices[0].text for c in chunks if c.choices)
        return text, chunks[-1].usage

    text, usage = await asyncio.to_thread(ask)
    assert text == expected("x", 1, 5)
    assert usage.completion_tokens == 5
    await house.sound()


async def test_a_conversation_is_a_plain_transcript_whole_and_streamed(house: Answering) -> None:
    wish: dict[str, Any] = {"model": "tiny@1", "messages": CHAT, "max_completion_tokens": 4}
    wish |= {"seed": 5, "logprobs": True, "top_logprobs": 1}
    async with house.client() as client:
        whole = await client.chat.completions.create(**wish)
        stream = await client.chat.completions.create(**wish, stream=True)
        chunks = [chunk async for chunk in stream]
    text = expected(TRANSCRIPT, 5, 4)
    assert whole.choices[0].message.content == text
    assert whole.choices[0].logprobs is not None
    assert [each.token for each in whole.choices[0].logprobs.content or ()] == list(text)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_several_sequences_and_a_stop_string(house: Answering) -> None:
    async with house.client() as client:
        said = await client.completions.create(
            model="tiny", prompt="x", max_tokens=9, seed=1, n=2, logprobs=1
        )
        assert [c.text for c in said.choices] == [expected("x", s, 9) for s in (1, 2)]
        assert said.usage is not None
        assert said.usage.completion_tokens == 18
        stop = expected("x", 1, 3)[2]
        said = await client.completions.create(
            model="tiny", prompt="x", max_tokens=9, seed=1, stop=[stop]
        )
    assert (said.choices[0].text, said.choices[0].finish_reason) == (expected("x", 1, 2), "stop")
    await house.sound()


async def test_models_say_licence_dataset_loss_and_price(house: Answering) -> None:
    async with house.client() as client:
        cards = {card.id: card.model_dump() async for card in client.models.list()}
        one = (await client.models.retrieve("tiny@0")).model_dump()
    assert cards["tiny"]["licence"] == "CC0-1.0"
    assert cards["tiny"]["dataset"] == "sums"
    assert "plain transcript" in cards["tiny"]["description"]
    assert cards["tiny"]["price_micro"] > 0
    assert (one["id"], one["version"]) == ("tiny@0", 0)


async def test_a_client_that_leaves_pays_for_what_was_generated(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(3)
    engine = CountingEngine(gate=gate)
    async with answering(tmp_path, engine=engine) as house, house.client() as client:
        stream = await client.completions.create(
            model="tiny", prompt="x", max_tokens=50, seed=1, stream=True
        )
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 3:
                break
        await stream.close()
        await house.sound()
        assert engine.closed == 1
        listed = await house.ann.get("/me/usage")
        (row,) = listed.json()
        assert (row["tokens_in"], row["tokens_out"]) == (1, 3)
        assert row["cost_micro"] == (await house.balances()).spent_micro


REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "tiny", "prompt": "x", "best_of": 3}, 400, "best_of", "not supported"),
    ({"model": "tiny", "prompt": "x", "logit_bias": {"5": 101}}, 400, "logit_bias", "at most 100"),
    ({"model": "tiny", "prompt": "x", "logit_bias": {"x": 1}}, 400, "logit_bias", "expected"),
    ({"model": "tiny", "prompt": "x", "presence_penalty": 3}, 400, "presence_penalty", "at most 2"),
    ({"model": "tiny", "prompt": "x", "min_p": 2}, 400, "min_p", "at most 1"),
    ({"model": "tiny", "prompt": "x", "top_k": -2}, 400, "top_k", "at least -1"),
    ({"model": "tiny", "prompt": "x", "tool_choice": "required"}, 400, "tool_choice", "not supp"),
    ({"model": "tiny", "prompt": "x", "store": 0}, 400, "store", "not supported"),
    ({"model": "tiny", "prompt": ["x"] * 65}, 400, "prompt", "at most 64"),
    ({"model": "tiny", "prompt": ["x", 5]}, 400, "prompt", "expected"),
    ({"model": "tiny", "prompt": ["x", "y" * 1001]}, 400, "prompt", "1001 tokens, and 1000 fit"),
    ({"model": "tiny", "prompt": 5}, 400, "prompt", "expected"),
    ({"prompt": "x"}, 400, "model", "missing"),
    (
        {"model": "tiny", "prompt": "x", "max_tokens": "many"},
        400,
        "max_tokens",
        "expected a whole number, not a text",
    ),
    ({"model": "tiny", "prompt": "x" * 1_000_000}, 400, "prompt", "1000 fit"),
    ({"model": "tiny", "prompt": "x", "temperature": 9}, 400, "temperature", "at most 2"),
    ({"model": "tiny", "prompt": "x", "n": 100}, 400, "n", "at most 8"),
    ({"model": "tiny", "prompt": "x", "stop": ["y"] * 1000}, 400, "stop", "at most 4"),
    ({"model": "tiny", "prompt": "x" * 1001}, 400, "prompt", "1001 tokens, and 1000 fit"),
    ({"model": "tiny", "prompt": "x", "max_tokens": 300}, 400, "max_tokens", "at most 256"),
    ({"model": "tinny", "prompt": "x"}, 404, "model", 'did you mean "tiny"?'),
    ({"model": "tiny@77", "prompt": "x"}, 404, "model", "tiny@0 to tiny@1"),
    ({"model": "tiny", "prompt": "x" * (1 << 20)}, 413, "", "1048576 bytes"),
]


@pytest.mark.parametrize(("body", "status", "param", "words"), REFUSED)
async def test_bad_input_gets_a_sentence_in_openais_shape(
    house: Answering, body: dict[str, Any], status: int, param: str, words: str
) -> None:
    headers = {"Authorization": f"Bearer {house.key}"}
    async with httpx.AsyncClient(base_url=house.url, headers=headers) as http:
        reply = await http.post("/v1/completions", json=body)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert (error["param"] or "") == param
    assert words in error["message"]
    assert (await house.balances()).held_micro == 0


RAW: dict[str, tuple[bytes, dict[str, str], int, str]] = {
    "compressed": (b"\x1f\x8b", {"Content-Encoding": "gzip"}, 400, "without Content-Encoding"),
    "deep": (b'{"model":' + b"[" * 40 + b"]" * 40 + b"}", {}, 400, "deeper than 32"),
    "deeper": (b"[" * 200_000, {}, 400, "expected a table"),
    "NUL": (b'{"model": "tiny", "prompt": "\\u0000"}', {}, 400, "NUL"),
    "no UTF-8": (b'{"model": "\xff"}', {}, 400, "UTF-8"),
    "no JSON": (b"prompt=x", {}, 400, "is not JSON"),
    "empty": (b"", {}, 400, "empty"),
}


IDLE: dict[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "user": "ann",
    "response_format": {"type": "text"},
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "tools": None,
    "store": False,
    "metadata": {},
    "stream_options": {"include_usage": None, "include_obfuscation": False},
    "logprobs": None,
    "prompt_cache_retention": None,
    "size": "auto",
    "output_format": "png",
}


async def test_a_field_at_the_value_that_changes_nothing_is_accepted(house: Answering) -> None:
    headers = {"Authorization": f"Bearer {house.key}"}
    turns = [
        {"role": "user", "content": "a", "name": "Ann", "tool_calls": None},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": []},
        {"role": "user", "content": "b", "name": None},
    ]
    async with httpx.AsyncClient(base_url=house.url, headers=headers) as http:
        for path, body in (
            ("completions", {"prompt": ["two"]}),
            ("completions", {"prompt": [list(b"two")]}),
            ("completions", {"prompt": list(b"two"), "best_of": 1, "echo": None}),
            ("chat/completions", {"messages": turns}),
        ):
            body |= {"model": "tiny", "max_tokens": 3, "seed": 1}
            plain = await http.post(f"/v1/{path}", json=body)
            reply = await http.post(f"/v1/{path}", json={**body, **IDLE})
            assert (plain.status_code, reply.status_code) == (200, 200), reply.text
            assert reply.json()["choices"] == plain.json()["choices"]


async def test_an_echo_begins_with_the_prompt(house: Answering) -> None:
    async with house.client() as client:
        wish: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "seed": 1, "echo": True}
        for prompt in ("two", list(b"two")):
            said = await client.completions.create(prompt=prompt, **wish)
            assert said.choices[0].text == "two" + expected("two", 1, 2)
            assert said.usage is not None
            assert said.usage.completion_tokens == 2
            parts = [
                c async for c in await client.completions.create(prompt=prompt, stream=True, **wish)
            ]
            assert "".join(c.choices[0].text for c in parts) == said.choices[0].text


@pytest.mark.parametrize("given", [["one", "two"], [list(b"one"), list(b"two")]])
async def test_several_prompts_are_answered_in_their_order(
    house: Answering, given: list[Any]
) -> None:
    wish: dict[str, Any] = {"model": "tiny", "prompt": given, "max_tokens": 3, "seed": 4, "n": 2}
    texts = [expected(text, 4 + n, 3) for n, text in enumerate(("one", "one", "two", "two"))]
    before = await house.balances()
    async with house.client() as client:
        whole = await client.completions.create(**wish)
        parts = [c async for c in await client.completions.create(**wish, stream=True)]
        echo = await client.completions.create(**wish, echo=True)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in whole.choices] == texts
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, 12)
    for number, text in enumerate(texts):
        streamed = [c.choices[0] for c in parts if c.choices and c.choices[0].index == number]
        assert "".join(choice.text for choice in streamed) == text
        assert echo.choices[number].text == ("one", "two")[number // 2] + text
    spent = (await house.balances()).spent_micro - before.spent_micro
    assert spent == 3 * whole.usage.model_dump()["cost_micro"]
    await house.sound()


async def test_prompts_are_scored_together_as_harnesses_ask(house: Answering) -> None:
    wish: dict[str, Any] = {"model": "tiny", "echo": True, "max_tokens": 0, "logprobs": 1}
    async with house.client() as client:
        reply = await client.completions.create(**wish, prompt=["one", "three"])
    assert [choice.text for choice in reply.choices] == ["one", "three"]
    for choice in reply.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == list(choice.text)
        assert choice.logprobs.text_offset == list(range(len(choice.text)))
    await house.sound()


async def test_a_prompt_is_scored_without_an_answer(house: Answering) -> None:
    wish: dict[str, Any] = {"model": "tiny", "prompt": "two", "echo": True, "max_tokens": 0}
    async with house.client() as client:
        said = await client.completions.create(**wish, logprobs=1)
        chunks = [c async for c in await client.completions.create(**wish, logprobs=1, stream=True)]
        with pytest.raises(openai.BadRequestError, match="max_tokens: 0 needs echo"):
            await client.completions.create(**{**wish, "echo": False})
        with pytest.raises(openai.BadRequestError, match="n: max_tokens = 0 has one answer, not 2"):
            await client.completions.create(**wish, logprobs=1, n=2)
    for found in (said.choices[0], chunks[0].choices[0]):
        assert found.text == "two"
        assert found.logprobs is not None
        assert found.logprobs.tokens == ["t", "w", "o"]
        assert found.logprobs.token_logprobs == [None, -0.5, -0.5]
    assert said.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert said.usage is not None
    assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (3, 0)
    assert said.usage.model_dump()["cost_micro"] > 0
    await house.sound()


async def test_nothing_is_scored_before_it_is_paid_for(house: Answering) -> None:
    key = (await house.new_key(cap_micro=0)).key
    before = await house.balances()
    async with house.client(key) as client:
        for most in (0, 2):
            wish: dict[str, Any] = {"model": "tiny", "prompt": "two", "max_tokens": most}
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(**wish, echo=True, logprobs=1)
            assert caught.value.code == "insufficient_quota"
    assert house.engine.scored == house.engine.prepared == 0
    assert await house.balances() == before
    await house.sound()


async def test_prompts_that_are_scored_count_among_the_tokens_under_way(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(0)
    engine = CountingEngine(gate=gate, context=3000)
    async with answering(tmp_path, engine=engine) as house, house.client() as client:
        wish: dict[str, Any] = {"model": "tiny", "max_tokens": 0, "echo": True, "logprobs": 1}
        ask = partial(client.completions.create, **wish)
        scoring = [asyncio.ensure_future(ask(prompt="x" * 1000)) for _ in range(2)]
        async with asyncio.timeout(120):
            while house.coordinator.answers.meter.running < 2:
                await asyncio.sleep(0.001)
        with pytest.raises(openai.RateLimitError, match="2000 tokens of this account are under"):
            await ask(prompt="x" * 100)
        for _ in range(3):
            gate.release()
        await asyncio.gather(*scoring)
        said = await ask(prompt="x" * 2500)  # more than may be under way, but alone
        assert said.usage is not None
        assert said.usage.prompt_tokens == 2500
        await house.sound()


async def test_a_client_that_leaves_pays_for_what_was_scored(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(1)
    engine = CountingEngine(gate=gate)
    async with answering(tmp_path, engine=engine) as house:
        headers = {"Authorization": f"Bearer {house.key}"}
        wish = {"model": "tiny", "prompt": "two", "max_tokens": 2, "echo": True, "logprobs": 1}
        async with (
            httpx.AsyncClient(base_url=house.url, headers=headers) as http,
            http.stream("POST", "/v1/completions", json={**wish, "stream": True}) as reply,
        ):
            async for line in reply.aiter_lines():
                if line.startswith("data:"):
                    break
        await house.settled()
        [row] = decode(await house.ann.get("/me/usage"), tuple[UsageRow, ...])
        assert row.cost_micro > 0
        assert row.tokens_in + row.tokens_out == 3
        await house.sound()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_its_prompt_is_scored_pays_for_that(
    tmp_path: Path, stream: bool
) -> None:
    gate = asyncio.Semaphore(0)
    engine = CountingEngine(gate=gate)
    async with answering(tmp_path, engine=engine) as house:
        wish: dict[str, Any] = {"model": "tiny", "prompt": "two", "max_tokens": 2, "logprobs": 1}
        wish |= {"echo": True, "stream": stream}
        headers = {"Authorization": f"Bearer {house.key}"}
        async with httpx.AsyncClient(base_url=house.url, headers=headers) as http:
            asking = asyncio.ensure_future(http.post("/v1/completions", json=wish))
            async with asyncio.timeout(120):
                while not engine.scoring:
                    await asyncio.sleep(0.001)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        gate.release()
        await house.settled()
        [row] = decode(await house.ann.get("/me/usage"), tuple[UsageRow, ...])
        assert row.cost_micro > 0
        assert row.tokens_in + row.tokens_out == 3
        await house.sound()


async def test_a_prompt_that_could_not_be_scored_costs_nothing(
    house: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = house.engine.prepare

    async def broken(
        model: Any, prompt: Any, probe: Any = None, rule: Any = None
    ) -> PreparedPrompt:
        if probe is not None:
            raise Unavailable("the answer broke off", retry_after_s=1)
        return await prepare(model, prompt)

    monkeypatch.setattr(house.engine, "prepare", broken)
    before = await house.balances()
    async with house.client() as client:
        wish: dict[str, Any] = {"model": "tiny", "prompt": "two", "max_tokens": 0, "echo": True}
        with pytest.raises(openai.InternalServerError, match="broke off"):
            await client.completions.create(**wish, logprobs=1)
    await house.sound()
    assert await house.balances() == before


async def test_a_page_of_another_site_may_ask_with_a_key(house: Answering) -> None:
    origin = {"Origin": "https://chat.example.org"}
    asked = "authorization,content-type,x-stainless-lang"
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": asked}
    async with httpx.AsyncClient(base_url=house.url) as http:
        for path in ("/v1/chat/completions", "/v1/models", "/v1/models/tiny"):
            reply = await http.options(path, headers=origin | preflight)
            allowed = {key[21:]: value for key, value in reply.headers.items() if "allow-" in key}
            assert (reply.status_code, reply.content) == (200, b"")
            assert allowed == {"methods": "GET, POST", "headers": "authorization, *", "origin": "*"}
        refused = await http.get("/v1/models", headers=origin)
        elsewhere = await http.options("/api/v1/runs", headers=origin | preflight)
    replies: list[Any] = [refused]
    async with house.client() as client:
        page = client.with_options(default_headers=origin)
        wish: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        for stream in (False, True):
            raw = await page.completions.with_raw_response.create(**wish, stream=stream)
            replies.append(raw.http_response)
        with pytest.raises(openai.BadRequestError) as wrong:
            await page.completions.create(**{**wish, "temperature": 3})
        replies.append(wrong.value.response)
    assert [reply.status_code for reply in replies] == [401, 200, 200, 400]
    for reply in replies:
        assert reply.headers.get_list("access-control-allow-origin") == ["*"]
        assert "access-control-allow-credentials" not in reply.headers
    assert "access-control-allow-origin" not in elsewhere.headers


async def test_a_page_reads_refusals_from_outside_the_handlers_too(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(0)
    engine = CountingEngine(gate=gate)
    async with answering(tmp_path, engine=engine, rate_ip="100/minute") as house:
        client = house.home.client(house.key)
        wish = {"model": "tiny", "prompt": "x", "max_tokens": 2}
        waiting = asyncio.ensure_future(client.post("/v1/completions", json=wish))
        async with asyncio.timeout(120):
            while not engine.open:
                await asyncio.sleep(0.001)
        house.coordinator.stopping.set()
        waiting.cancel()
        replies = [await waiting]
        replies += [await client.get(path) for path in ("/v1", "/v1/%00")]
        replies.append(await client.patch("/v1/models"))
        while (elsewhere := await client.get("/join")).status_code != 429:
            assert "access-control-allow-origin" not in elsewhere.headers
        replies.append(await client.get("/v1/models"))
    assert [reply.status_code for reply in replies] == [503, 404, 404, 400, 429]
    for reply in replies:
        assert reply.headers.get_list("access-control-allow-origin") == ["*"]
    assert "access-control-allow-origin" not in elsewhere.headers


async def test_a_stream_that_waits_is_bridged_by_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_sender, "COMMENT_S", 0.01)
    engine = CountingEngine()
    engine.gate = asyncio.Semaphore(0)
    async with answering(tmp_path, engine=engine) as house:
        headers = {"Authorization": f"Bearer {house.key}"}
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "stream": True}
        async with (
            httpx.AsyncClient(base_url=house.url, headers=headers) as http,
            http.stream("POST", "/v1/completions", json=body) as reply,
        ):
            lines = reply.aiter_lines()
            while await anext(lines) != ": waiting":
                pass
            engine.gate.release()
            rest = [line async for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        await house.sound()


@pytest.mark.parametrize("which", RAW)
async def test_a_body_is_read_as_strictly_as_elsewhere(house: Answering, which: str) -> None:
    body, more, status, words = RAW[which]
    headers = {"Authorization": f"Bearer {house.key}"} | more
    async with httpx.AsyncClient(base_url=house.url) as http:
        reply = await http.post("/v1/completions", content=body, headers=headers)
    assert reply.status_code == status
    assert words in reply.json()["error"]["message"]


async def test_a_seed_has_as_many_digits_as_openais(house: Answering) -> None:
    wish = {"model": "tiny", "prompt": "x", "max_tokens": 1, "seed": 1 << 62}
    headers = {"Authorization": f"Bearer {house.key}"}
    async with httpx.AsyncClient(base_url=house.url, headers=headers) as http:
        assert (await http.post("/v1/completions", json=wish)).status_code == 200


async def test_keys_that_do_not_work(house: Answering) -> None:
    async with house.client("vk-wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    capped = await house.new_key(cap_micro=1)
    async with house.client(capped.key) as client:
        with pytest.raises(openai.RateLimitError, match="this key may spend") as caught:
            await client.completions.create(model="tiny", prompt="x" * 90, max_tokens=200)
    assert (caught.value.code, house.engine.prepared) == ("insufficient_quota", 0)
    reply = await house.ann.post(f"/me/keys/{capped.info.id}/revoke")
    assert reply.json()["state"] == "revoked"
    async with house.client(capped.key) as client:
        with pytest.raises(openai.AuthenticationError, match="revoked"):
            await client.models.list()


async def test_too_little_credit_says_how_much_is_missing(house: Answering) -> None:
    token = f"{house.ann.worker_id}.{house.ann.secret}"
    gift = {"id": "a" * 32, "to": "Bob", "amount_micro": (await house.balances()).earned_micro}
    assert (await house.ann.post("/me/give", gift)).status_code == 200
    async with house.client(token) as client:
        with pytest.raises(openai.RateLimitError, match=r"missing.*train with") as caught:
            await client.completions.create(model="tiny", prompt="x", max_tokens=200)
    assert caught.value.code == "insufficient_quota"
    assert house.engine.prepared == 0  # no model is loaded for it
    await house.sound()


async def test_without_an_engine_it_says_when_to_come_back(house: Answering) -> None:
    house.coordinator.answers.connect(None)
    async with house.client() as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="tiny", prompt="x", max_tokens=2)
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) > 0


async def test_a_run_without_a_version_says_so(house: Answering) -> None:
    await house.coordinator.runs.create(RUN.replace('"tiny"', '"second"'))
    async with house.client() as client:
        with pytest.raises(openai.NotFoundError, match="has no version yet"):
            await client.completions.create(model="second", prompt="x", max_tokens=1)


async def test_a_key_asks_the_runs_that_it_names(house: Answering) -> None:
    await house.coordinator.runs.create(RUN.replace('"tiny"', '"second"'))
    made = await house.new_key(runs=["second"])
    async with house.client(made.key) as client:
        with pytest.raises(openai.PermissionDeniedError, match="second only"):
            await client.completions.create(model="tiny", prompt="x", max_tokens=1)


async def test_metrics_count_requests_tokens_and_time_to_the_first(house: Answering) -> None:
    async with house.client() as client:
        await client.completions.create(model="tiny", prompt="x", max_tokens=7)
    async with httpx.AsyncClient(base_url=house.url) as http:
        said = (await http.get("/metrics")).text
    assert 'coordinator_answers_requests_total{run="tiny"} 1.0' in said
    assert 'coordinator_answers_tokens_total{run="tiny"} 7.0' in said
    assert "coordinator_answers_first_token_seconds_count 1.0" in said
    assert "coordinator_answers_waiting 0.0" in said


async def test_the_interface_describes_itself(house: Answering) -> None:
    async with httpx.AsyncClient(base_url=house.url) as http:
        paths = (await http.get("/api/v1/openapi.json")).json()["paths"]
        nothing = await http.get("/v1/nothing", headers={"Authorization": f"Bearer {house.key}"})
    assert {"/v1/models", "/v1/completions", "/v1/chat/completions"} <= set(paths)
    assert paths["/v1/completions"]["post"]["security"] == [{"key": []}]
    assert (nothing.status_code, "/v1/models" in nothing.json()["error"]["message"]) == (404, True)


IMAGES = """
name = "digits"
workload = "dcgan"
dataset = "digits"
[model]
generator_width = 8
discriminator_width = 8
latent = 16
[task]
batch_size = 32
"""


async def start_images(house: Answering) -> None:
    await house.coordinator.datasets.add(
        lambda put: build_images("digits", digit_pictures(), put, size=8, channels=1)
    )
    await house.coordinator.runs.create(IMAGES)
    await house.coordinator.runs.start("digits")


async def test_a_client_that_leaves_pays_for_the_pictures_that_are_drawn(tmp_path: Path) -> None:
    engine = CountingEngine(gate=asyncio.Semaphore(0))
    async with answering(tmp_path, engine=engine) as house:
        await start_images(house)
        came: list[MutableMapping[str, Any]] = [
            {"type": "http.request", "body": b'{"model": "digits", "n": 3}'}
        ]

        async def receive() -> MutableMapping[str, Any]:
            while not (came or engine.drawing):
                await asyncio.sleep(0.001)
            return came.pop() if came else {"type": "http.disconnect"}

        async def send(_: object) -> None:
            pass

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/images/generations",
            "root_path": "",
            "client": ("127.0.0.1", 1),
            "headers": [
                (b"host", b"localhost"),
                (b"authorization", f"Bearer {house.key}".encode()),
            ],
        }
        asking = asyncio.ensure_future(create_app(house.coordinator)(scope, receive, send))
        async with asyncio.timeout(120):
            while not engine.drawing:
                assert not asking.done()
                await asyncio.sleep(0.001)
        for _ in range(100):  # it could hear now that the client has left
            await asyncio.sleep(0)
        assert engine.gate is not None
        engine.gate.release()
        await asking
        await house.settled()
        [row] = decode(await house.ann.get("/me/usage"), tuple[UsageRow, ...])
        assert row.tokens_out == 3
        assert row.cost_micro > 0
        await house.sound()


async def test_pictures_of_an_image_run_are_paid_by_the_piece(house: Answering) -> None:
    await start_images(house)
    async with house.client() as client:
        card = (await client.models.retrieve("digits")).model_dump()
        made = await client.images.generate(model="digits", prompt="", n=3)
        with pytest.raises(openai.BadRequestError, match="draws pictures: volunteer generate"):
            await client.completions.create(model="digits", prompt="x", max_tokens=1)
    assert made.data is not None
    pictures = [base64.b64decode(each.b64_json or "") for each in made.data]
    assert len(pictures) == 3
    assert all(picture.startswith(PNG) for picture in pictures)
    (row,) = (await house.ann.get("/me/usage")).json()
    assert (row["kind"], row["tokens_out"]) == ("image", 3)
    assert 0 < row["cost_micro"] <= 3 * card["price_micro"]
    assert "transcript" not in card["description"]
    await house.sound()
