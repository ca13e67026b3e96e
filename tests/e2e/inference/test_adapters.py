"""OpenAI's own client against adapters: the engine applies them to the frozen weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.inference.builtin import BuiltinEngine, Power
from shared.clock import SystemClock
from tests.support.answering import answering
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


@pytest.mark.parametrize("train", ["lora", "head"])
async def test_prompts_are_answered_with_what_was_trained_applied(
    tmp_path: Path, train: str
) -> None:
    text = RUN.format(train=train, shape=LLAMA)
    async with answering(tmp_path, text, workload="causal-lm") as house:
        home = house.coordinator
        engine = BuiltinEngine(home.db, SystemClock(), home.blobs, Power(threads=1))
        home.answers.connect(engine)
        try:
            async with house.client() as client:
                said = []
                for version in (0, 1, 1):
                    found = await client.completions.create(
                        model=f"tiny@{version}", prompt="1 plus", max_tokens=8, seed=1, logprobs=1
                    )
                    assert found.choices[0].logprobs is not None
                    said.append(found.choices[0].logprobs.token_logprobs)
            assert said[0] != said[1] == said[2]
            await house.sound()
        finally:
            await engine.close()
