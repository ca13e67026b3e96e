"""Exported models for chat, as the programs that people use load them: each in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from shared.errors import InvalidRunFile
from shared.workloads.base import ConvertedModel, FormatWanted, load
from shared.workloads.data.chat_template import template_beside
from tests.support.fake_hub import Repository, fake_hub
from tests.support.workloads import tiny_causal
from tests.support.workloads.chat_base import ANSWER, CHATML, QUESTION, chat_base, chat_tokenizer
from tests.unit.shared.workloads.causal_lm.test_library_format import written

ROOT = Path(__file__).parents[5]
WORKLOAD = load("causal-lm")
ASK = f"""
import sys
from transformers import AutoTokenizer
import {{package}} as library
for folder in sys.argv[1:]:
    model = library.{{loader}}.from_pretrained(folder).float()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [{{{{"role": "user", "content": {QUESTION!r}}}}}]
    more = {{{{"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}}}}
    tokens = tokenizer.apply_chat_template(turns, **more)
    found = model.generate(**tokens, max_new_tokens=60, do_sample=False)[0]
    print(tokenizer.decode(found[tokens["input_ids"].shape[1]:]))
"""


def wanted(format: str = "transformers", **more: Any) -> FormatWanted:
    template = json.dumps({"source": CHATML, "eos_token": "<|im_end|>"}).encode()
    return FormatWanted(format, chat_tokenizer(), template, **more)


def exported(base: str, to: Path, how: FormatWanted, **table: Any) -> ConvertedModel:
    """A version of a run that has just begun, in a folder."""
    config = WORKLOAD.config({"from": base, "context": 64, **table}, None)
    files = WORKLOAD.sources(config)
    weights = WORKLOAD.whole(config, WORKLOAD.init(config, 1), files)
    made = WORKLOAD.convert(how, config, weights)
    to.mkdir()
    dtype = getattr(torch, made.dtype) if made.dtype else None
    tensors = {name: value.to(dtype) for name, value in made.tensors.items()}
    written(made._replace(tensors=tensors), to)
    return made


def run(code: str, *arguments: object, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)} | environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.slow
def test_transformers_asks_by_the_template_and_the_answer_ends(tmp_path: Path) -> None:
    bases, models = [], []
    for shape in ("llama", "qwen2"):
        bases.append(tmp_path / shape)
        models.append(tmp_path / f"{shape}-model")
        chat_base(bases[-1], tiny_causal.SHAPES[shape])
        exported(str(bases[-1]), models[-1], wanted(), train="lora")
    ask = ASK.format(package="transformers", loader="AutoModelForCausalLM")
    assert run(ask, *models).splitlines() == 2 * [f"{ANSWER}<|im_end|>"]
    for base, to in zip(bases, models, strict=True):
        first, last = (transformers.GenerationConfig.from_pretrained(each) for each in (base, to))
        assert last.eos_token_id == first.eos_token_id
        assert (last.temperature, last.do_sample) == (0.6, True)
        assert not hasattr(last, "trust_remote_code")
        settings = transformers.AutoConfig.from_pretrained(to)
        assert str(settings.dtype) == "torch.bfloat16"
        theirs, ours = (transformers.AutoTokenizer.from_pretrained(each) for each in (base, to))
        assert ours.special_tokens_map == theirs.special_tokens_map
        turns = [{"role": "user", "content": "a"}]
        assert ours.apply_chat_template(turns) == theirs.apply_chat_template(turns)
        assert template_beside(to / "tokenizer.json").source == CHATML


def test_the_type_of_the_numbers_is_the_bases_or_the_one_that_is_wanted(tmp_path: Path) -> None:
    chat_base(tmp_path / "base")
    sizes = []
    for dtype in ("", "float32", "float16"):
        to = tmp_path / f"model-{dtype}"
        made = exported(str(tmp_path / "base"), to, wanted(dtype=dtype), train="all")
        assert made.dtype == (dtype or "bfloat16") == json.loads(made.files["config.json"])["dtype"]
        sizes.append((to / "model.safetensors").stat().st_size)
    assert sizes[1] > 1.9 * sizes[0]
    assert sizes[0] == pytest.approx(sizes[2], rel=0.01)


@pytest.mark.slow
def test_peft_finds_the_base_of_an_adapter_by_its_name_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, to = tmp_path / "base", tmp_path / "adapter"
    chat_base(base)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with fake_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.models["ann/tiny"] = Repository()
        commit = hub.models["ann/tiny"].commit({p.name: p.read_bytes() for p in base.iterdir()})
        exported(f"hub:ann/tiny@{commit}", to, wanted("peft"), train="lora")
        settings = json.loads((to / "adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == "ann/tiny"
        assert settings["revision"] == commit
        hub.models["ann/tiny"].commit({})  # the branch moves
        code = ASK.format(package="peft", loader="AutoPeftModelForCausalLM")
        online = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        assert run(code, to, **online) == f"{ANSWER}<|im_end|>"


GGUF = f"""
import json, sys
import llama_cpp, numpy
exact = {{"type_k": 0, "type_v": 0, "n_threads": 1}}  # keys and values in float32
model = llama_cpp.Llama(sys.argv[1], n_ctx=128, verbose=False, logits_all=True, **exact)
turns = [{{"role": "user", "content": {QUESTION!r}}}]
made = model.create_chat_completion(turns, max_tokens=60, temperature=0.0)["choices"][0]
model.reset()
model.eval(json.loads(sys.argv[2]))
numpy.save(sys.argv[3], model.scores[: model.n_tokens])
print(json.dumps([made["message"]["content"], made["finish_reason"]]))
"""


def test_llama_cpp_asks_by_the_template_and_the_answer_ends(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    chat_base(tmp_path / "base")
    to = tmp_path / "model"
    exported(str(tmp_path / "base"), to, wanted(dtype="float32"), train="lora")
    exported(
        str(tmp_path / "base"), tmp_path / "file", wanted("gguf", dtype="float32"), train="lora"
    )
    tokens = list(range(40))
    file = tmp_path / "file" / "model.gguf"
    told = run(GGUF, file, json.dumps(tokens), tmp_path / "logits.npy")
    assert json.loads(told) == [ANSWER, "stop"]
    model = transformers.AutoModelForCausalLM.from_pretrained(to)
    with torch.inference_mode():
        theirs = model(input_ids=torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(np.load(tmp_path / "logits.npy") - theirs).max() < 1e-3


@pytest.mark.parametrize(
    ("file", "table"),
    [
        ("generation_config.json", {"temperature": "hot"}),
        ("generation_config.json", {"eos_token_id": [1] * 99}),
        ("tokenizer_config.json", {"eos_token": "x" * 101}),
        ("tokenizer_config.json", []),
    ],
)
def test_settings_that_no_library_would_take_are_refused(
    tmp_path: Path, file: str, table: Any
) -> None:
    chat_base(tmp_path / "base")
    (tmp_path / "base" / file).write_text(json.dumps(table))
    with pytest.raises(InvalidRunFile, match=file):
        WORKLOAD.config({"from": str(tmp_path / "base"), "context": 64}, None)
