"""Our names and numbers beside those of the library transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from shared.workloads.base import load
from shared.workloads.causal_lm.architectures import CLASSES
from shared.workloads.causal_lm.base_model import frozen_of
from shared.workloads.causal_lm.config import CausalConfig
from shared.workloads.causal_lm.decoder import CausalDecoder
from shared.workloads.causal_lm.model import build, library_config
from tests.support.workloads import tiny_causal

SHAPES = {**tiny_causal.SHAPES, "biased llama": tiny_causal.BIASED}
MODELS = {kind: model for kind, (_, model) in CLASSES.items()}


def config(shape: Mapping[str, Any], **changes: Any) -> CausalConfig:
    table = tiny_causal.table({**shape, "vocab_size": 300}, **changes)
    return CausalConfig.from_dict(table)


def library_model(found: CausalConfig) -> Any:
    """The library's own model with our version 0."""
    torch.manual_seed(0)
    kind = getattr(transformers, MODELS[found.shape.model_type])
    model = kind(library_config(found.shape)).eval()
    weights = load("causal-lm").init(found.to_dict(), 5)
    missing = model.load_state_dict(weights, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model


@pytest.mark.parametrize("shape", SHAPES)
def test_names_and_shapes_are_those_of_the_library(shape: str) -> None:
    found = config(SHAPES[shape])
    theirs = getattr(transformers, MODELS[found.shape.model_type])(library_config(found.shape))
    schema = load("causal-lm").schema(found.to_dict())
    assert [(spec.name, spec.shape) for spec in schema] == [
        (name, tuple(value.shape)) for name, value in theirs.named_parameters()
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_version_gives_the_logits_of_the_library(shape: str) -> None:
    found = config(SHAPES[shape])
    tokens = torch.arange(40).reshape(2, 20) * 7 % 300
    ours = build(found, load("causal-lm").init(found.to_dict(), 5), None, "cpu")
    ours.module.train(False)
    with torch.inference_mode():
        theirs = library_model(found)(input_ids=tokens).logits
        assert torch.allclose(ours.logits(tokens), theirs, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_texts_in_slots_are_continued_as_the_library_continues_each(shape: str) -> None:
    found = config(SHAPES[shape], context=24)
    weights = load("causal-lm").init(found.to_dict(), 5)
    decoder = CausalDecoder(found, build(found, weights, None, "cpu"), None, 4, "cpu")
    library = library_model(found)
    texts = {0: [3, 1, 4, 1, 5], 1: [9, 2, 6], 3: [5, 3, 5, 8, 9, 7, 9]}

    def expected(tokens: list[int]) -> np.ndarray[Any, Any]:
        with torch.inference_mode():
            return np.asarray(library(input_ids=torch.tensor([tokens])).logits[0, -1])

    whole = decoder.prefill_many([*texts], [*texts.values()])
    for tokens, row in zip(texts.values(), whole, strict=True):
        assert np.allclose(row, expected(tokens), atol=1e-4)
    last = {}
    for slot, tokens in texts.items():
        decoder.prefill(slot, tokens[:2], 0)  # in two parts, as long prompts come
        last[slot] = decoder.prefill(slot, tokens[2:], 2)
    for _ in range(4):
        for slot, tokens in texts.items():
            assert np.allclose(last[slot], expected(tokens), atol=1e-4)
            tokens.append(int(last[slot].argmax()))
        slots = sorted(texts)
        places = [len(texts[slot]) - 1 for slot in slots]
        found_logits = decoder.decode_step(slots, [texts[slot][-1] for slot in slots], places)
        last = dict(zip(slots, found_logits, strict=True))


@pytest.mark.parametrize("shape", ["llama", "gpt2", "gemma3_text"])
def test_a_model_from_elsewhere_writes_beyond_the_training_context(shape: str) -> None:
    found = config(SHAPES[shape], context=4)
    weights = load("causal-lm").init(found.to_dict(), 5)
    whole = msgspec.structs.replace(found, source="/a/folder")
    model = build(found, weights, None, "cpu")
    assert CausalDecoder(found, model, None, 2, "cpu").context == 4
    decoder = CausalDecoder(whole, model, None, 2, "cpu")
    assert decoder.context == 64
    tokens = [(5 * number) % 300 for number in range(60)]
    for start, end in ((0, 3), (3, 30), (30, 59)):  # the cache grows twice, and keeps the past
        decoder.prefill(1, tokens[start:end], start)
    last = decoder.decode_step([1], tokens[-1:], [59])[0]
    with torch.inference_mode():
        expected = library_model(found)(input_ids=torch.tensor([tokens])).logits[0, -1]
    assert np.allclose(last, np.asarray(expected), atol=1e-4)


@pytest.mark.parametrize("shape", tiny_causal.SHAPES)
def test_adapters_change_what_peft_changes(shape: str) -> None:
    import peft  # takes seconds, which each process that collects tests would spend

    rslora = shape in ("llama", "gpt2")
    found = config(SHAPES[shape], train="lora", lora={"rank": 4, "rslora": rslora})
    assert found.lora is not None
    weights = {
        name: torch.randn(value.shape, generator=torch.Generator().manual_seed(7)) * 0.1
        for name, value in load("causal-lm").init(found.to_dict(), 5).items()
    }
    frozen = frozen_of(found, None)
    ours = build(found, weights, frozen, "cpu")
    ours.module.train(False)
    kind = getattr(transformers, MODELS[found.shape.model_type])
    base = kind(library_config(found.shape))
    base.load_state_dict(frozen, strict=False)
    base.tie_weights()
    lora = peft.LoraConfig(
        r=found.lora.rank,
        lora_alpha=found.lora.alpha,
        use_rslora=rslora,
        target_modules=list(found.lora.targets),
        fan_in_fan_out=shape == "gpt2",
    )
    theirs = peft.get_peft_model(base, lora).eval()
    named = {f"base_model.model.{name}": value for name, value in weights.items()}
    told = peft.set_peft_model_state_dict(theirs, named)
    assert not told.unexpected_keys
    tokens = torch.arange(40).reshape(2, 20) * 7 % 300
    with torch.inference_mode():
        logits = theirs(input_ids=tokens).logits
        assert torch.allclose(ours.logits(tokens), logits, atol=1e-4)
        with theirs.disable_adapter():
            assert not torch.allclose(logits, theirs(input_ids=tokens).logits, atol=1e-2)


@pytest.mark.parametrize("shape", tiny_causal.SHAPES)
def test_all_linear_is_every_matrix_that_peft_takes(shape: str) -> None:
    import peft  # takes seconds, which each process that collects tests would spend

    ours = config(SHAPES[shape], train="lora", lora={"targets": "all-linear"})
    assert ours == config(SHAPES[shape], train="lora", lora={"targets": ["all-linear"]})
    assert ours.lora is not None
    kind = getattr(transformers, MODELS[ours.shape.model_type])
    base = kind(library_config(ours.shape))
    lora = peft.LoraConfig(target_modules="all-linear", fan_in_fan_out=shape == "gpt2")
    theirs = peft.get_peft_model(base, lora)
    adapted = {
        name.split(".lora_A")[0] for name, _ in theirs.named_parameters() if "lora_A" in name
    }
    assert set(ours.lora.targets) == {name.rpartition(".")[2] for name in adapted}
