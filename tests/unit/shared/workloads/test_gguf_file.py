"""GGUF files, read again by the library transformers: the same logits, the same words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from torch import Tensor

from shared.errors import BadRequest
from shared.workloads.base import ConvertedModel, FormatWanted, load
from shared.workloads.data.tokenizer import byte_tokenizer, train_tokenizer
from shared.workloads.training.gguf_file import NAME, as_gguf
from tests.support.workloads import piece_tokenizer as pieces
from tests.support.workloads.chat_base import CHATML, chat_tokenizer
from tests.support.workloads.tiny_causal import LLAMA, MISTRAL, SHAPES

CAUSAL, GPT = load("causal-lm"), load("gpt")
TEXT = train_tokenizer(["the more the merrier, the many more"] * 3, 270)
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def converted(
    table: Mapping[str, Any], tokenizer: bytes | None = TEXT, **more: Any
) -> ConvertedModel:
    """A new model in the form of the library transformers."""
    vocabulary = Tokenizer.from_str((tokenizer or TEXT).decode()).get_vocab_size()
    config = CAUSAL.config({"config": {"vocab_size": vocabulary, **table}, "context": 32}, None)
    weights = CAUSAL.init(config, 3)
    wanted = FormatWanted("transformers", tokenizer, **more)
    return CAUSAL.convert(wanted, config, CAUSAL.whole(config, weights, {}))


def own(**table: Any) -> ConvertedModel:
    size = Tokenizer.from_str(TEXT.decode()).get_vocab_size()
    table = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": size, **table}
    config = GPT.config(table, None)
    return GPT.convert(FormatWanted("transformers", TEXT), config, GPT.init(config, 3))


def written(model: ConvertedModel, to: Path) -> Path:
    from safetensors.torch import save_file

    to.mkdir()
    if model.tensors:
        save_file(
            {name: t.contiguous() for name, t in model.tensors.items()}, to / "model.safetensors"
        )
    for name, data in model.files.items():
        (to / name).write_bytes(data)
    return to


def logits(folder: Path, **how: Any) -> Tensor:
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    with torch.inference_mode():
        result: Tensor = model(input_ids=torch.arange(24)[None]).logits
    return result


def fields(folder: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(folder / NAME)
    return {name: field.contents() for name, field in reader.fields.items()}


MODELS = {
    "llama": lambda: converted(LLAMA),
    "mistral": lambda: converted({**MISTRAL, "sliding_window": None}),
    "qwen2": lambda: converted(SHAPES["qwen2"]),
    # the reader takes this width of a head, and these positions of a GPT-2, for granted
    "qwen3": lambda: converted({**SHAPES["qwen3"], "head_dim": 128}),
    "gpt2": lambda: converted({**SHAPES["gpt2"], "n_positions": 1024}),
    "own gpt2": lambda: own(block_size=1024),
    "own llama": lambda: own(architecture="llama", n_kv_head=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_another_reader_finds_the_same_model(tmp_path: Path, name: str) -> None:
    model = MODELS[name]()
    torch.manual_seed(1)
    tensors = {n: t + torch.randn_like(t) / 20 for n, t in model.tensors.items()}
    model = model._replace(tensors=tensors)
    to = written(as_gguf(model), tmp_path / "gguf")
    assert [path.name for path in to.iterdir()] == [NAME]
    expected = logits(written(model, tmp_path / "folder"))
    found = logits(to, gguf_file=NAME)
    bound = 2e-3 if name == "own gpt2" else 1e-5  # its GELU is exact, llama.cpp's is not
    assert (found - expected).abs().max() < bound * expected.abs().max()


def test_a_reader_finds_the_tokenizer_its_marks_and_the_template(tmp_path: Path) -> None:
    template = json.dumps({"source": CHATML, "eos_token": "<|im_end|>"}).encode()
    data = chat_tokenizer()
    tokenizer = Tokenizer.from_str(data.decode())
    table = {**LLAMA, "vocab_size": tokenizer.get_vocab_size() + 2}
    model = converted(table, data, template=template)
    found = fields(written(as_gguf(model), tmp_path / "gguf"))
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert [*tokens[-4:-2], *tokens[-2:]] == ["<|im_start|>", "<|im_end|>", "[PAD282]", "[PAD283]"]
    assert tokens[5] == tokenizer.id_to_token(5)
    control, usual, unused = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.UNUSED
    assert (kinds[0], kinds[5], kinds[-3:]) == (control, usual, [control, unused, unused])
    merges = json.loads(data)["model"]["merges"]
    assert found["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]
    assert found["tokenizer.ggml.eos_token_id"] == tokenizer.token_to_id("<|im_end|>")
    assert found["tokenizer.chat_template"] == CHATML
    assert (found["tokenizer.ggml.pre"], found["tokenizer.ggml.add_bos_token"]) == ("gpt-2", False)
    assert found["llama.attention.head_count_kv"] == 2


@pytest.mark.parametrize(("dtype", "name"), [("float16", "F16"), ("bfloat16", "BF16")])
def test_matrices_have_the_wanted_type_and_vectors_are_float32(
    tmp_path: Path, dtype: str, name: str
) -> None:
    model = converted(LLAMA, dtype=dtype)
    to = written(as_gguf(model), tmp_path / "gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(to / NAME).tensors}
    assert tensors["token_embd.weight"].tensor_type.name == name
    assert tensors["output_norm.weight"].tensor_type.name == "F32"
    data = gguf.quants.dequantize(
        tensors["token_embd.weight"].data, tensors["token_embd.weight"].tensor_type
    )
    exact = model.tensors["model.embed_tokens.weight"].numpy()
    assert np.abs(data - exact).max() <= 2**-8 * np.abs(exact).max()


def test_stretched_positions_of_llama_3_divide_the_frequencies(tmp_path: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stretched = {**LLAMA, "rope_parameters": STRETCHED, "max_position_embeddings": 128}
    to = written(as_gguf(converted(stretched)), tmp_path / "gguf")
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(to / NAME).tensors}
    config = transformers.LlamaConfig(**{**stretched, "head_dim": 8})
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 10_000.0 ** (np.arange(0, 8, 2) / 8)
    assert plain / tensors["rope_freqs.weight"] == pytest.approx(inverse.numpy(), rel=1e-6)


def divided(*parts: Any, normalizer: Any = None) -> bytes:
    tokenizer = Tokenizer.from_str(TEXT.decode())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts]) if parts[1:] else parts[0]
    tokenizer.normalizer = normalizer
    text: str = tokenizer.to_str()
    return text.encode()


def whole_words(tokenizer: bytes) -> bytes:
    """The tokenizer as Llama 3 has it: a word that is a token is not merged from its parts."""
    table = json.loads(tokenizer)
    table["model"]["ignore_merges"] = True
    return json.dumps(table).encode()


def label(value: object) -> str:
    """The name of a case: its sentence."""
    return value[:40] if isinstance(value, str) else "-"


def bare() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        (whole_words(divided(split(LLAMA_3), bare())), "llama-bpe"),
        (
            divided(split(LLAMA_3.replace("{1,3}", "")), bare(), normalizer=normalizers.NFC()),
            "qwen2",
        ),
        (
            divided(pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)),
            "smollm",
        ),
    ],
    ids=label,
)
def test_patterns_of_tokenizers_are_named(tmp_path: Path, tokenizer: bytes, name: str) -> None:
    found = fields(written(as_gguf(converted(LLAMA, tokenizer)), tmp_path / "gguf"))
    assert found["tokenizer.ggml.pre"] == name


@pytest.mark.parametrize(
    ("table", "tokenizer", "sentence"),
    [
        (LLAMA, None, "not for a model without a tokenizer"),
        (
            LLAMA,
            TEXT.replace(b"<|endoftext|>", b"<|else|>"),
            "not for a model without a token that ends a text",
        ),
        (
            SHAPES["phi3"],
            TEXT,
            "not for phi3, only for llama, mistral, qwen2, qwen3, gemma, gemma2",
        ),
        (SHAPES["gpt_neox"], TEXT, "not for gpt_neox, only for"),
        (MISTRAL, TEXT, "not for a mistral with a sliding window"),
        ({**LLAMA, "hidden_act": "gelu"}, TEXT, "not for a llama with the activation gelu"),
        ({**LLAMA, "mlp_bias": True}, TEXT, "not for a llama with mlp_bias"),
        (
            {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            TEXT,
            "not for rotary positions of the type linear",
        ),
        (
            LLAMA,
            byte_tokenizer(),
            "not for a model of bytes: llama.cpp needs a tokenizer with merge",
        ),
        (LLAMA, divided(split(LLAMA_3), bare()), "it divides texts by a pattern of its own"),
        (LLAMA, divided(split("a"), bare()), "it divides texts by a pattern of its own"),
        (LLAMA, divided(bare()), "it divides texts by a pattern of its own"),
        (
            LLAMA,
            divided(pre_tokenizers.ByteLevel(add_prefix_space=True)),
            "not for this tokenizer, only for a BPE of bytes",
        ),
        (LLAMA, divided(pre_tokenizers.Metaspace()), "not for this tokenizer, only for a BPE of"),
    ],
    ids=label,
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    table: Mapping[str, Any], tokenizer: bytes | None, sentence: str
) -> None:
    with pytest.raises(BadRequest, match=sentence):
        as_gguf(converted(table, tokenizer))


GEMMA_2 = {**SHAPES["gemma2"], "query_pre_attn_scalar": 16}


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"query_pre_attn_scalar": 24}, "query_pre_attn_scalar"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"attn_logit_softcapping": None}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": None}, "final_logit_softcapping"),
    ],
)
def test_a_gemma_of_which_llama_cpp_knows_less_is_refused(
    change: Mapping[str, Any], setting: str
) -> None:
    as_gguf(converted(GEMMA_2))
    with pytest.raises(BadRequest, match=f"not for a gemma2 with this {setting}, which llama.cpp"):
        as_gguf(converted({**GEMMA_2, **change}))


def pieced(**changes: Any) -> bytes:
    """A tokenizer of pieces, with other parts of its model."""
    table = pieces.piece_tokenizer(pieces.LLAMA_2)
    table["model"] |= changes
    return json.dumps(table).encode()


def test_merges_that_do_not_follow_from_scores_are_refused() -> None:
    as_gguf(converted(LLAMA, pieced()))
    merges = pieces.piece_tokenizer(pieces.LLAMA_2)["model"]["merges"]
    both = [pair for pair in merges if "".join(pair) == "▁an"]
    assert len(both) == 2  # ▁ + an, ▁a + n
    for wrong in (
        [pair for pair in merges if pair != both[1]],
        [both[1], *(pair for pair in merges if pair != both[1])],
    ):
        with pytest.raises(BadRequest, match="the merges of '▁an' do not follow from scores"):
            as_gguf(converted(LLAMA, pieced(merges=wrong)))


@pytest.mark.parametrize(
    "style",
    [
        {**pieces.LLAMA_2, "normalizer": {"type": "Lowercase"}},
        {**pieces.GEMMA, "normalizer": None},
        {**pieces.MISTRAL, "pre_tokenizer": {**pieces.MISTRAL["pre_tokenizer"], "split": True}},
    ],
)
def test_pieces_of_changed_texts_are_refused(style: Mapping[str, Any]) -> None:
    data = json.dumps(pieces.piece_tokenizer(style)).encode()
    with pytest.raises(BadRequest, match="it changes or divides texts in a way of its own"):
        as_gguf(converted(LLAMA, data))


def test_a_model_of_bytes_that_rollouts_taught_is_refused() -> None:
    rollouts = load("rollouts")
    config = rollouts.config({"problems": "sorting", "size": 3, "context": 14, "answer": 4}, None)
    with pytest.raises(BadRequest, match="not for a model of bytes"):
        rollouts.convert(FormatWanted("gguf"), config, rollouts.init(config, 1))
