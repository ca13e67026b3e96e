"""Versions in formats of other libraries give the same numbers there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.workloads.base import load
from shared.workloads.data.tokenizer import load_tokenizer, train_tokenizer
from shared.workloads.dcgan.config import DcganConfig
from shared.workloads.dcgan.evaluate import draw
from shared.workloads.gomoku.config import GomokuConfig
from shared.workloads.gomoku.network import NetEvaluator
from shared.workloads.gpt.config import GptConfig
from shared.workloads.gpt.model import build

TEXTS = ["def naïve(x):\n    return 'ß', '水', x\n", "  two  blanks <|endoftext|> as text"]
SMALL: dict[str, Any] = {"block_size": 24, "n_layer": 2, "n_head": 2, "n_embd": 16}


def noisy(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """No tensor is zero or one all over, as in a version 0."""
    drawn = torch.Generator().manual_seed(5)
    return {
        name: value + 0.05 * torch.rand(value.shape, generator=drawn)
        if value.is_floating_point()
        else value
        for name, value in weights.items()
    }


def written(folder: Path, config: dict[str, Any], tokenizer: bytes | None) -> dict[str, Any]:
    """The weights of a small GPT, and the folder of it as transformers wants it."""
    workload = load("gpt")
    weights = noisy(workload.init(config, 1))
    made = workload.convert("transformers", config, weights, tokenizer)
    tensors = {name: value.contiguous() for name, value in made.tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name, content in made.files.items():
        (folder / name).write_bytes(content)
    return weights


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tie_head", [False, True])
def test_transformers_gives_the_logits_of_ours(tmp_path: Path, bias: bool, tie_head: bool) -> None:
    config = GptConfig(vocab_size=300, bias=bias, tie_head=tie_head, **SMALL)
    weights = written(tmp_path, config.to_dict(), None)
    tokens = torch.randint(300, (3, 24), generator=torch.Generator().manual_seed(2))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = build(config, weights, "cpu").eval()
    with torch.inference_mode():
        assert torch.allclose(model(tokens).logits, ours.logits(ours.hidden(tokens)), atol=1e-4)


def test_its_tokenizer_splits_and_joins_like_ours(tmp_path: Path) -> None:
    data = train_tokenizer(TEXTS * 20, 300)
    written(tmp_path, GptConfig(vocab_size=300, **SMALL).to_dict(), data)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(data)
    for text in ("naïve ß 水  x\n", "  return 'two'"):
        assert theirs(text)["input_ids"] == ours.encode(text).ids
        assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.eos_token_id == ours.token_to_id("<|endoftext|>")


def session(workload: str, config: dict[str, Any], weights: Any) -> Any:
    made = load(workload).convert("onnx", config, weights, None)
    return onnxruntime.InferenceSession(made.files["model.onnx"])


def test_a_generator_draws_the_same_by_onnxruntime() -> None:
    config = DcganConfig(image_size=16, latent=8, generator_width=4, discriminator_width=4)
    table = load("dcgan").config(
        {"image_size": 16, "latent": 8, "generator_width": 4, "discriminator_width": 4}, None
    )
    weights = noisy(load("dcgan").init(table, 1))
    theirs = session("dcgan", table, weights)
    for batch in (1, 5):
        noise = np.random.default_rng(3).standard_normal((batch, 8)).astype("f4")
        (images,) = theirs.run(None, {"noise": noise})
        with torch.inference_mode():
            expected = draw(config, weights, noise).numpy()
        assert np.allclose(images, expected, atol=1e-4)


def test_a_player_judges_the_same_by_onnxruntime() -> None:
    config = GomokuConfig(size=7, blocks=2, channels=8)
    table = load("gomoku").config({"size": 7, "blocks": 2, "channels": 8}, None)
    weights = noisy(load("gomoku").init(table, 1))
    boards = np.random.default_rng(3).integers(-1, 2, (6, 49)).astype(np.int8)
    logits, value = session("gomoku", table, weights).run(None, {"boards": boards})
    ours = NetEvaluator(config, weights, "cpu")(boards)
    assert np.allclose(logits, ours[0], atol=1e-4)
    assert np.allclose(value, ours[1], atol=1e-4)
