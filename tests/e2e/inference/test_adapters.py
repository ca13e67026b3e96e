"""OpenAI's own client against models of the library transformers: adapters are applied to the
frozen weights, and conversations written by the tokenizer's chat template.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from coordinator.database import runs
from coordinator.inference.answers import PLAIN_CHAT, RUN_TEMPLATE, TOKENIZER_TEMPLATE
from coordinator.inference.builtin_engine import BuiltinEngine, ProcessLimits
from coordinator.inference.inference_engine import ChatPrompt, ModelVersion
from coordinator.services import Coordinator
from shared.clock import SystemClock
from shared.workloads.base import DatasetManifest
from shared.workloads.data.chat_dataset import build_chat
from shared.workloads.data.chat_template import ChatTemplate, DialogueTurn
from shared.workloads.data.tokenizer import Put, load_tokenizer, train_tokenizer
from tests.support.answering import Answering, answering
from tests.support.counting_engine import expected
from tests.support.workloads import tiny_causal

LLAMA = ", ".join(
    f"{key} = {value!r}".replace("'", '"') for key, value in tiny_causal.LLAMA.items()
)
RUN = """
name = "tiny"
workload = "causal-lm"
dataset = "sums"
[model]
context = 32
train = "{train}"
config = {{ {shape} }}
[task]
local_steps = 2
batch_size = 2
min_steps = 1
[plan]
quorum = 2
codec = "float32"
"""


@pytest.mark.slow
@pytest.mark.parametrize("train", ["lora", "head"])
async def test_prompts_are_answered_with_what_was_trained_applied(
    tmp_path: Path, train: str
) -> None:
    text = RUN.format(train=train, shape=LLAMA)
    async with answering(tmp_path, text, workload="causal-lm") as house:
        home = house.coordinator
        engine = BuiltinEngine(home.db, SystemClock(), home.blobs, ProcessLimits(threads=1))
        home.answers.connect(engine)
        try:
            async with house.client(timeout=600.0) as client:
                said = []
                for version in (0, 1, 1):
                    found = await client.completions.create(
                        model=f"tiny@{version}", prompt="1 plus", max_tokens=8, seed=1, logprobs=1
                    )
                    assert found.choices[0].logprobs is not None
                    said.append(found.choices[0].logprobs.token_logprobs)
                wish: dict[str, Any] = {"model": "tiny", "max_tokens": 1, "logprobs": 1}
                given = [70, 80, 90, 100]
                echo = (await client.completions.create(prompt=given, echo=True, **wish)).choices[0]
                assert echo.logprobs is not None
                tops = echo.logprobs.top_logprobs or []
                assert (echo.logprobs.token_logprobs or [0])[0] is None
                assert len(tops) == len(given) + 1
                for read in range(1, len(given)):
                    likeliest = await client.completions.create(
                        prompt=given[:read], temperature=0, **wish
                    )
                    assert likeliest.choices[0].logprobs is not None
                    (top,) = likeliest.choices[0].logprobs.top_logprobs or []
                    assert tops[read] == pytest.approx(top, abs=1e-5)
                with pytest.raises(openai.BadRequestError, match="the token 300"):
                    await client.completions.create(prompt=[300], **wish)
            assert said[0] != said[1] == said[2]
            await house.sound()
        finally:
            await engine.close()


TEMPLATE = ChatTemplate(
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('a user begins') }}{% endif %}"
    "{% if messages[0].content == 'for ever' %}{% for a in range(90000) %}"
    "{% for b in range(90000) %}{% endfor %}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    eos_token="<|endoftext|>",
)
TOKENIZER = train_tokenizer([f"<user>{n} plus {n}?<assistant>{2 * n}." for n in range(300)], 300)
TURNS: list[Any] = [
    {"role": "developer", "content": "short"},
    {"role": "user", "content": "2 plus 2?"},
]
WRITTEN = "<system>short<|endoftext|><user>2 plus 2?<|endoftext|><assistant>"


async def version_of(coordinator: Coordinator, run: str) -> ModelVersion:
    """Return the newest version of a run."""
    row = await coordinator.db.read(lambda conn: runs.by_name(conn, run))
    return ModelVersion(run_id=row.id, run=run, version=row.head)


def talking(path: Path, more: str = "") -> AbstractAsyncContextManager[Answering]:
    """A run of dialogues."""
    talk = path / "talk.jsonl"
    lines = [{"prompt": f"{n} plus {n}?", "completion": f"{2 * n}."} for n in range(300)]
    talk.write_text("".join(f"{msgspec.json.encode(line).decode()}\n" for line in lines))

    def build(put: Put) -> DatasetManifest:
        return build_chat("sums", [talk], put, tokenizer=TOKENIZER, template=TEMPLATE)

    text = RUN.format(train="lora", shape=LLAMA).replace("context = 32", "context = 64") + more
    return answering(path, text, workload="causal-lm", dataset=build)


@pytest.mark.slow
async def test_a_conversation_is_written_by_the_template_of_its_tokenizer(tmp_path: Path) -> None:
    marking = load_tokenizer(TOKENIZER)
    marking.encode_special_tokens = False
    tokens = marking.encode(WRITTEN, add_special_tokens=False).ids
    end = marking.encode(TEMPLATE.eos_token, add_special_tokens=False).ids[0]
    assert tokens.count(end) == 2
    async with talking(tmp_path) as house, house.client(timeout=600.0) as client:
        home = house.coordinator
        engine = BuiltinEngine(home.db, SystemClock(), home.blobs, ProcessLimits(threads=1))
        home.answers.connect(engine)
        prepared = await engine.prepare(
            await version_of(house.coordinator, "tiny"),
            ChatPrompt(turns=(DialogueTurn("system", "short"), DialogueTurn("user", "2 plus 2?"))),
        )
        assert prepared.tokens == tuple(tokens)
        assert prepared.ends == (end,)
        wish: dict[str, Any] = {"model": "tiny", "messages": TURNS, "max_tokens": 5, "seed": 3}
        whole = await client.chat.completions.create(**wish)
        stream = await client.chat.completions.create(**wish, stream=True)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == len(tokens)
        assert "".join(parts) == whole.choices[0].message.content
        card = (await client.models.retrieve("tiny")).model_dump()
        assert TOKENIZER_TEMPLATE in card["description"]
        refusals: list[tuple[Any, str]] = [
            ([{"role": "assistant", "content": "hi"}], "a user begins"),
            ([{"role": "user", "content": "for ever"}], "does not come to an end"),
        ]
        for refused, why in refusals:
            with pytest.raises(openai.BadRequestError, match=why) as error:
                await client.chat.completions.create(model="tiny", messages=refused)
            assert error.value.param == "messages"
        assert (await client.chat.completions.create(**wish)).choices == whole.choices
        house.coordinator.answers.connect(house.engine)  # that knows no templates
        plain = (await client.models.retrieve("tiny")).model_dump()
        assert PLAIN_CHAT in plain["description"]
        await engine.close()
        await house.sound()


async def test_the_template_of_a_run_goes_before_that_of_its_tokenizer(tmp_path: Path) -> None:
    own = '[serve.chat]\nuser = "{content}"\nreply = ""\n'
    async with talking(tmp_path, own) as house, house.client() as client:
        house.engine.templates = True
        assert RUN_TEMPLATE in (await client.models.retrieve("tiny")).model_dump()["description"]
        said = await client.chat.completions.create(
            model="tiny", messages=TURNS[1:], max_tokens=2, seed=3
        )
        assert said.choices[0].message.content == expected("2 plus 2?", 3, 2)
        await house.sound()
