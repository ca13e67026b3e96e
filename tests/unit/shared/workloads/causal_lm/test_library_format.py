"""Exports that the libraries transformers and peft load."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import save_file

from shared.errors import BadRequest, InvalidRunFile
from shared.workloads.base import ConvertedModel, FormatWanted, load
from shared.workloads.causal_lm.base_model import frozen_in
from shared.workloads.causal_lm.config import CausalConfig
from shared.workloads.causal_lm.library_format import as_adapter
from shared.workloads.causal_lm.model import build
from shared.workloads.data.tokenizer import train_tokenizer
from tests.support.workloads import tiny_causal

WORKLOAD = load("causal-lm")
TOKENS = torch.arange(40).reshape(2, 20) * 7 % 300


def trained(
    shape: str, changes: Mapping[str, Any] = MappingProxyType({}), **table: Any
) -> tuple[CausalConfig, dict[str, torch.Tensor]]:
    """A version whose every tensor differs from the first, and its frozen weights with it."""
    settings = {**tiny_causal.SHAPES[shape], "vocab_size": 300, **changes}
    found = CausalConfig.from_dict(tiny_causal.table(settings, **table))
    drawn = torch.Generator().manual_seed(7)
    weights = {
        name: value + 0.05 * torch.randn(value.shape, generator=drawn)
        for name, value in WORKLOAD.init(found.to_dict(), 5).items()
    }
    return found, dict(WORKLOAD.whole(found.to_dict(), weights, {}))


def logits(config: CausalConfig, whole: dict[str, torch.Tensor]) -> torch.Tensor:
    model = build(config, whole, whole, "cpu")
    model.module.train(False)
    with torch.inference_mode():
        return model.logits(TOKENS)


def written(made: ConvertedModel, folder: Path) -> None:
    if made.tensors:
        tensors = {name: value.contiguous() for name, value in made.tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name, content in made.files.items():
        (folder / name).write_bytes(content)


HEADS = ("llama", "gpt_neox")  # of two names; those of all shapes nightly


@pytest.mark.parametrize(
    ("shape", "train"),
    [
        *product(tiny_causal.SHAPES, ("all", "lora")),
        *product(HEADS, ("head",)),
        *(
            pytest.param(shape, "head", marks=pytest.mark.slow)
            for shape in tiny_causal.SHAPES
            if shape not in HEADS
        ),
    ],
)
def test_the_library_gives_the_same_logits(tmp_path: Path, shape: str, train: str) -> None:
    tied = {"tie_word_embeddings": False} if train == "head" else {}
    config, whole = trained(shape, tied, train=train)
    tokenizer = train_tokenizer(["how many legs has a spider?"], 300)
    written(
        WORKLOAD.convert(FormatWanted("transformers", tokenizer), config.to_dict(), whole), tmp_path
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        theirs = model(input_ids=TOKENS).logits
    assert torch.allclose(logits(config, whole), theirs, atol=1e-4)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert words.decode(words("a spider")["input_ids"]) == "a spider"


@pytest.mark.parametrize("shape", tiny_causal.SHAPES)
def test_peft_gives_the_same_logits_beside_the_frozen_model(tmp_path: Path, shape: str) -> None:
    import peft  # takes seconds, which each process that collects tests would spend

    config, whole = trained(shape, train="lora", lora={"rslora": shape == "llama"})
    plain = CausalConfig.from_dict({**config.to_dict(), "train": "all", "lora": None})
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
    frozen = dict(frozen_in(config, {}))
    written(WORKLOAD.convert(FormatWanted("transformers", None), plain.to_dict(), frozen), base)
    written(WORKLOAD.convert(FormatWanted("peft", None), config.to_dict(), whole), adapter)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.inference_mode():
        theirs = model(input_ids=TOKENS).logits
    assert torch.allclose(logits(config, whole), theirs, atol=1e-4)
    assert not torch.allclose(logits(plain, frozen), theirs, atol=1e-2)


@pytest.mark.parametrize(
    ("shape", "modules"),
    [
        ("llama", ["embed_tokens", "lm_head"]),
        ("llama", ["lm_head"]),
        ("qwen2", ["embed_tokens"]),
        ("gemma2", ["embed_tokens"]),
        ("gpt_neox", ["embed_in", "lm_head"]),
    ],
)
def test_modules_trained_whole_are_loaded_by_peft_and_merged(
    tmp_path: Path, shape: str, modules: list[str]
) -> None:
    import peft  # takes seconds, which each process that collects tests would spend

    config, whole = trained(shape, train="lora", lora={"modules_to_save": modules})
    plain = CausalConfig.from_dict({**config.to_dict(), "train": "all", "lora": None})
    folders = base, adapter, merged = [tmp_path / name for name in ("base", "adapter", "merged")]
    for folder in folders:
        folder.mkdir()
    frozen = dict(frozen_in(config, {}))
    written(WORKLOAD.convert(FormatWanted("transformers", None), plain.to_dict(), frozen), base)
    written(WORKLOAD.convert(FormatWanted("peft", None), config.to_dict(), whole), adapter)
    written(WORKLOAD.convert(FormatWanted("transformers", None), config.to_dict(), whole), merged)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    ours = build(config, whole, frozen, "cpu")
    expected = theirs.eval()(input_ids=TOKENS).logits
    with torch.inference_mode():
        alone = transformers.AutoModelForCausalLM.from_pretrained(merged)(input_ids=TOKENS).logits
        without = build(config, whole | frozen, frozen, "cpu").logits(TOKENS)
    found = ours.logits(TOKENS)
    assert torch.allclose(found, expected, atol=1e-4)
    assert torch.allclose(found, alone, atol=1e-4)
    assert not torch.allclose(found, without, atol=1e-2)
    for logits_of in (found, expected):
        logits_of.square().mean().backward()
    names = {spec.name for spec in WORKLOAD.schema(config.to_dict())}
    gradients = {name: value.grad for name, value in ours.module.named_parameters()}
    assert {name for name, value in gradients.items() if value is not None} == names
    there = {
        name.removeprefix("base_model.model.")
        .replace(".modules_to_save.default", "")
        .replace(".default", ""): value.grad
        for name, value in theirs.named_parameters()
        if value.requires_grad
    }
    assert there.keys() == names
    for name in names:
        assert torch.allclose(gradients[name], there[name], atol=1e-5), name


def test_a_module_that_cannot_be_trained_whole_is_named() -> None:
    for shape, name in (("qwen2", "lm_head"), ("llama", "q_proj"), ("gpt2", "wte")):
        with pytest.raises(InvalidRunFile, match=f'modules_to_save: "{name}" is not among'):
            trained(shape, train="lora", lora={"modules_to_save": [name]})
    both = {"modules_to_save": ["lm_head"], "targets": ["lm_head", "q_proj"]}
    with pytest.raises(InvalidRunFile, match="or it is a target too"):
        trained("llama", train="lora", lora=both)


def test_a_version_0_holds_the_folder_s_own_table_of_tokens(tmp_path: Path) -> None:
    plain, whole = trained("llama")
    written(WORKLOAD.convert(FormatWanted("transformers", None), plain.to_dict(), whole), tmp_path)
    table = {"from": str(tmp_path), "train": "lora", "lora": {"modules_to_save": ["embed_tokens"]}}
    config = WORKLOAD.config(table, None)
    version = WORKLOAD.init(config, 5)
    assert list(version) == [spec.name for spec in WORKLOAD.schema(config)]
    stored = version.pop("model.embed_tokens.weight")
    assert torch.equal(stored, whole["model.embed_tokens.weight"])
    assert all(".lora_" in name for name in version)


def test_an_adapter_of_the_head_is_exported_too(tmp_path: Path) -> None:
    config, whole = trained("llama", train="lora", lora={"targets": ["lm_head", "q_proj"]})
    written(WORKLOAD.convert(FormatWanted("transformers", None), config.to_dict(), whole), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        theirs = model(input_ids=TOKENS).logits
    assert torch.allclose(logits(config, whole), theirs, atol=1e-4)


def test_a_run_without_adapters_has_none_to_give() -> None:
    config, whole = trained("llama")
    with pytest.raises(BadRequest, match="has no adapters"):
        WORKLOAD.convert(FormatWanted("peft", None), config.to_dict(), whole)


def test_an_adapter_does_not_tell_where_the_organiser_keeps_the_model() -> None:
    config, whole = trained("llama", train="lora")
    secret = msgspec.structs.replace(config, source="/home/ann/private/models/tiny")
    made = as_adapter(secret, whole, FormatWanted("peft")).files
    assert not any(b"/home/ann" in content for content in made.values())
    assert b'"tiny"' in made["adapter_config.json"]
