"""Programs that people point at /v1, each by its own package: `pip install --group clients`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from coordinator.inference.builtin_engine import BuiltinEngine, ProcessLimits
from shared.clock import SystemClock
from tests.e2e.merging.test_suites import CAUSAL, add_suite
from tests.support.answering import Answering, answering
from tests.support.counting_engine import expected

WRITTEN = "User: Hello\nAssistant:"


def needs(package: str) -> Any:
    """Skip where a client is not installed; looked for, not imported (litellm takes seconds)."""
    why = f"{package} is not installed: the group clients has it"
    return pytest.mark.skipif(find_spec(package) is None, reason=why)


async def _said(house: Answering, env: dict[str, str], *command: str) -> str:
    """Run a module of Python in a process of its own; return what it prints."""
    ran = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": "", "OPENAI_API_KEY": house.key, "HF_HUB_OFFLINE": "1", **env},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


LITELLM = """
import sys, litellm
said = [{"role": "user", "content": "Hello"}]
wish = dict(model="openai/tiny", messages=said, api_base=sys.argv[1], user="ann")
wish |= dict(max_tokens=4, seed=2, temperature=0.7, presence_penalty=0)
print(repr(litellm.completion(**wish).choices[0].message.content))
parts = litellm.completion(**wish, stream=True)
print(repr("".join(part.choices[0].delta.content or "" for part in parts)))
"""
LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI, OpenAI
shared = dict(model="tiny", base_url=sys.argv[1], max_retries=0, seed=2)
chat = ChatOpenAI(**shared, max_completion_tokens=4)
named = [{"role": "user", "content": "Hello", "name": "Ann"}]
print(repr(chat.invoke(named).content))
print(repr("".join(part.content for part in chat.stream(named))))
print(repr(OpenAI(**shared, max_tokens=4).invoke("User: Hello\\nAssistant:")))
"""


@pytest.mark.parametrize(
    ("script", "times"),
    [
        pytest.param(LITELLM, 2, marks=needs("litellm"), id="litellm"),
        pytest.param(LANGCHAIN, 3, marks=needs("langchain_openai"), id="langchain"),
    ],
)
async def test_a_library_asks_and_streams(tmp_path: Path, script: str, times: int) -> None:
    async with answering(tmp_path / "home") as house:
        (tmp_path / "ask.py").write_text(script)
        env = {"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}
        said = await _said(house, env, "ask", f"{house.url}/v1")
        assert said.splitlines() == [repr(expected(WRITTEN, 2, 4))] * times
        await house.sound()


@needs("llm")
async def test_llm_asks_from_the_shell(tmp_path: Path) -> None:
    async with answering(tmp_path / "home") as house:
        models = f"- model_id: ours\n  model_name: tiny\n  api_base: {house.url}/v1\n"
        models += "  api_key_name: ours\n"
        (tmp_path / "keys.json").write_text(json.dumps({"ours": house.key}))
        (tmp_path / "extra-openai-models.yaml").write_text(models)
        options = ("-o", "max_tokens", "4", "-o", "seed", "2")
        env = {"LLM_USER_PATH": str(tmp_path), "HOME": str(tmp_path)}
        ask = ("llm", "-m", "ours", "--no-log", *options, "Hello")
        assert (await _said(house, env, *ask)).strip() == expected(WRITTEN, 2, 4).strip()
        await house.sound()


TASK = """
task: ours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc_norm
"""


@needs("lm_eval")
async def test_lm_eval_finds_the_score_of_a_suite(tmp_path: Path) -> None:
    choices = [
        {"prompt": f"{n} plus {n} is", "choices": [f" {2 * n}", f" {n}", " 7"], "answer": n % 3}
        for n in range(10, 42)
    ]
    text = CAUSAL.replace('"lora"', '"all"').replace('"tiny"', '"scored"')
    async with answering(tmp_path / "home", CAUSAL, workload="causal-lm") as house:
        home = house.coordinator
        house.key = (await home.api_keys.create_for_organiser("Ann", None)).key
        await add_suite(house.home, tmp_path, "sums-choice", choices)
        await home.runs.create(text + '[evaluation]\nsuites = ["sums-choice"]\n')
        await home.runs.start("scored")
        while await home.evaluation.evaluate_next():
            pass
        (course,) = (await home.runs.queries.info("scored")).suites
        exported = await home.export.export("scored", tmp_path / "out", 0)
        engine = BuiltinEngine(home.db, SystemClock(), home.blobs, ProcessLimits(threads=1))
        home.answers.connect(engine)
        try:
            (tmp_path / "tasks").mkdir()
            task = TASK.format(file=tmp_path / "sums-choice.jsonl")
            (tmp_path / "tasks" / "ours.yaml").write_text(task)
            about = f"model=scored@0,tokenizer={exported.path},base_url={house.url}/v1/completions"
            command = ("--model", "local-completions", "--tasks", "ours", "--model_args", about)
            where = (
                "--include_path",
                str(tmp_path / "tasks"),
                "--output_path",
                str(tmp_path / "r"),
            )
            await _said(house, {"HF_HOME": str(tmp_path)}, "lm_eval", *command, *where)
        finally:
            await engine.close()
        (found,) = (tmp_path / "r").rglob("results_*.json")
        score = json.loads(found.read_text())["results"]["ours"]["acc_norm,none"]
        assert score == pytest.approx(course.first.share, abs=1e-3)
        await house.sound()
