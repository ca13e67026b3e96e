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
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.errors import BadRequest
from shared.workloads.base import FormatWanted, load
from shared.workloads.data.tokenizer import (
    VOCAB_MIN,
    load_tokenizer,
    train_tokenizer,
    vocab_of,
)
from shared.workloads.dcgan.config import DcganConfig
from shared.workloads.dcgan.evaluate import draw
from shared.workloads.gomoku.config import GomokuConfig
from shared.workloads.gomoku.network import build as network
from shared.workloads.gpt.config import GptConfig
from shared.workloads.gpt.model import build
from shared.workloads.training.onnx_file import onnx_file

MARKED = "before <|endoftext|> after"
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
    made = workload.convert(FormatWanted("transformers", tokenizer), config, weights)
    tensors = {name: value.contiguous() for name, value in made.tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name, content in made.files.items():
        (folder / name).write_bytes(content)
    return weights


PARTS: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"architecture": "llama"},
    {"architecture": "llama", "n_kv_head": 1},
]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("tie_head", [False, True])
def test_transformers_gives_the_logits_of_ours(
    tmp_path: Path, parts: dict[str, Any], tie_head: bool
) -> None:
    config = GptConfig(vocab_size=300, tie_head=tie_head, **parts, **SMALL)
    weights = written(tmp_path, config.to_dict(), None)
    tokens = torch.randint(300, (3, 24), generator=torch.Generator().manual_seed(2))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = build(config, weights, "cpu").eval()
    with torch.inference_mode():
        assert torch.allclose(model(tokens).logits, ours.logits(ours.hidden(tokens)), atol=1e-4)


def with_odd_tokens() -> bytes:
    """Added tokens with blanks, quotes and letters beyond ASCII, one a mark; cut to four tokens."""
    tokenizer = Tokenizer.from_str(train_tokenizer(TEXTS * 20, 300).decode())
    odd = [AddedToken(text, normalized=False) for text in ("<fox>", ' "said" ', "水水", "\\n")]
    tokenizer.add_tokens(odd)
    tokenizer.add_special_tokens([AddedToken("<|im_start|>")])
    tokenizer.enable_truncation(4)
    text: str = tokenizer.to_str()
    return text.encode()


def words_only() -> bytes:
    """Words made elsewhere, with an unknown one and no end of a text."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    text: str = tokenizer.to_str()
    return text.encode()


TOKENIZERS = {
    "bytes": lambda: train_tokenizer(TEXTS, VOCAB_MIN),
    "merges": lambda: train_tokenizer(TEXTS * 20, 300),
    "odd": with_odd_tokens,
    "words": words_only,
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_any_tokenizer_gives_the_tokens_it_was_trained_with(tmp_path: Path, kind: str) -> None:
    """Also for the mark of an end inside a text, which is text in training."""
    data = TOKENIZERS[kind]()
    ours = load_tokenizer(data)
    config = GptConfig(vocab_size=vocab_of(ours) + 7, **SMALL)  # rows that no token has
    written(tmp_path, config.to_dict(), data)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, MARKED, "<fox> 水水水 \\n <|im_start|>\x00🦊", ""):
        found = theirs(text, add_special_tokens=False)["input_ids"]
        assert found == ours.encode(text, add_special_tokens=False).ids, text
        assert theirs.decode(found) == ours.decode(found, skip_special_tokens=False)
    assert theirs.eos_token_id == ours.token_to_id("<|endoftext|>")


@pytest.mark.parametrize("kind", [*TOKENIZERS, "none"])
def test_it_writes_from_nothing(tmp_path: Path, kind: str) -> None:
    data = TOKENIZERS[kind]() if kind != "none" else None
    size = vocab_of(load_tokenizer(data)) if data else 300
    written(tmp_path, GptConfig(vocab_size=size, **SMALL).to_dict(), data)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.generate(max_length=12, do_sample=True).shape[0] == 1


def test_a_network_beyond_the_size_of_a_file_is_refused() -> None:
    with torch.device("meta"):  # of no memory
        huge = torch.nn.Linear(30_000, 20_000)
    with pytest.raises(BadRequest, match="2 GiB"):
        onnx_file(huge, torch.zeros(2, 1), ("x", ["y"]))


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
    made = load(workload).convert(FormatWanted("onnx"), config, weights)
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
    with torch.inference_mode():
        ours = network(config, weights, "cpu")(torch.from_numpy(boards))
    assert np.allclose(logits, ours[0], atol=1e-4)
    assert np.allclose(value, ours[1], atol=1e-4)
