"""Answers by a JSON schema, and calls of functions, with OpenAI's own client and LangChain."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import openai
import pytest
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from coordinator.inference.builtin_engine import BuiltinEngine, ProcessLimits
from shared.clock import SystemClock
from shared.workloads.base import DatasetManifest
from shared.workloads.data.chat_dataset import build_chat
from shared.workloads.data.tokenizer import Put, train_tokenizer
from tests.e2e.inference.test_adapters import LLAMA, RUN
from tests.e2e.inference.test_clients import _said, needs
from tests.support.answering import Answering, answering
from tests.support.workloads.tool_templates import HERMES

pytestmark = pytest.mark.slow


class Animal(BaseModel):
    """An animal."""

    name: str = Field(max_length=8)
    kind: Literal["spider", "bird"]
    flies: bool


WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Rom"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "description": "the time"}},
]
ASKED: list[Any] = [{"role": "user", "content": "2 plus 2?"}]


def _tokenizer() -> bytes:
    texts = [f"<|im_start|>user\n{n} plus {n}?<|im_end|>" for n in range(300)]
    tokenizer = Tokenizer.from_str(train_tokenizer(texts, 300).decode())
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    text: str = tokenizer.to_str()
    return text.encode()


@asynccontextmanager
async def calling(path: Path) -> AsyncIterator[Answering]:
    """A model with random weights whose template writes functions and calls."""
    talk = path / "talk.jsonl"
    lines = [{"prompt": f"{n} plus {n}?", "completion": f"{2 * n}."} for n in range(3000)]
    talk.write_text("".join(f"{msgspec.json.encode(line).decode()}\n" for line in lines))

    def build(put: Put) -> DatasetManifest:
        return build_chat("sums", [talk], put, tokenizer=_tokenizer(), template=HERMES)

    text = RUN.format(train="lora", shape=LLAMA.replace("embeddings = 64", "embeddings = 1024"))
    text = text.replace("context = 32", "context = 1024")
    async with answering(path / "home", text, workload="causal-lm", dataset=build) as house:
        home = house.coordinator
        engine = BuiltinEngine(home.db, SystemClock(), home.blobs, ProcessLimits(threads=1))
        home.answers.connect(engine)
        try:
            yield house
        finally:
            await engine.close()


async def test_an_answer_and_a_call_follow_their_schemas(tmp_path: Path) -> None:
    async with calling(tmp_path) as house, house.client(timeout=600.0) as client:
        wish: dict[str, Any] = {"model": "tiny", "messages": ASKED, "seed": 3, "max_tokens": 250}
        parsed = await client.chat.completions.parse(response_format=Animal, **wish)
        assert isinstance(parsed.choices[0].message.parsed, Animal)
        wish |= {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        whole = (await client.chat.completions.create(**wish)).choices[0]
        assert whole.finish_reason == "tool_calls"
        (call,) = whole.message.tool_calls or []
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            assert arguments.keys() == {"city", "days"}
        async with client.chat.completions.stream(**wish) as stream:
            async for _ in stream:
                pass
            final = (await stream.get_final_completion()).choices[0]
        (streamed,) = final.message.tool_calls or []
        assert streamed.function.arguments == call.function.arguments
        # the call and its result are turns of the next request
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        turns = [*ASKED, whole.message.to_dict(), result]
        wish |= {"tool_choice": "none", "messages": turns}
        said = (await client.chat.completions.create(**wish)).choices[0]
        assert said.message.tool_calls is None
        prepared = await client.chat.completions.create(**{**wish, "messages": ASKED})
        assert said.message.content is not None
        assert prepared.usage is not None
        await _refused(client, wish)
        await house.sound()


async def _refused(client: openai.AsyncOpenAI, wish: dict[str, Any]) -> None:
    """Check the refusals of what this model or the library cannot do."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}}
    refusals: list[tuple[dict[str, Any], str, str]] = [
        ({"response_format": schema}, "response_format", "Invalid type: strin"),
        (
            {"extra_body": {"chat_template_kwargs": {"messages": 1}}},
            "messages",
            "no option of a chat template",
        ),
        ({"tools": [TOOLS[0] | {"type": "web_search"}]}, "tools", 'is not one of "function"'),
    ]
    for more, param, words in refusals:
        with pytest.raises(openai.BadRequestError, match=words) as error:
            await client.chat.completions.create(**{**wish, **more})
        assert (error.value.param or "").startswith(param)


LANGCHAIN = """
import sys
from typing import Literal
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

class Animal(BaseModel):
    "An animal."
    name: str = Field(max_length=8)
    kind: Literal["spider", "bird"]

chat = ChatOpenAI(model="tiny", base_url=sys.argv[1], max_retries=0, seed=2, max_tokens=250)
for method in ("json_schema", "function_calling"):
    print(type(chat.with_structured_output(Animal, method=method).invoke("2 plus 2?")).__name__)
called = chat.bind_tools([Animal], tool_choice="any", parallel_tool_calls=False).invoke("2 + 2?")
print(called.tool_calls[0]["name"])
"""


@needs("langchain_openai")
async def test_langchain_binds_functions_and_reads_structured_answers(tmp_path: Path) -> None:
    async with calling(tmp_path) as house:
        (tmp_path / "ask.py").write_text(LANGCHAIN)
        env = {"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}
        said = await _said(house, env, "ask", f"{house.url}/v1")
        assert said.split() == ["Animal"] * 3
        await house.sound()
