"""A version as the library transformers knows it: a GPT-2 (Radford et al. 2019) whose GELU is the
exact one. Needs torch only; the library is for those who load it.

Its dense layers hold their weights input first, the other way round than ours, and always with a
bias, which is zero where ours have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from shared.workloads.base import Converted
from shared.workloads.data.tokenizer import end_of_text, load_tokenizer
from shared.workloads.gpt.config import GptConfig

_TOP = {"tok_emb": "wte", "pos_emb": "wpe", "ln_f": "ln_f"}
_NORMS = {"ln1": "ln_1", "ln2": "ln_2"}
_DENSE = {
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_EPSILON = 1e-5  # of PyTorch's LayerNorm


def converted(
    config: GptConfig, weights: Mapping[str, Tensor], tokenizer: bytes | None
) -> Converted:
    """The tensors and files of a folder that `AutoModelForCausalLM` and `AutoTokenizer` load."""
    end = end_of_text(load_tokenizer(tokenizer)) if tokenizer is not None else None
    files = {
        "config.json": _settings(config, end),
        "generation_config.json": {"_from_model_config": True, **_ends(end)},
    }
    if tokenizer is not None:
        files["tokenizer_config.json"] = _tokenizer_settings(config, tokenizer, end)
    written = {
        name: msgspec.json.format(msgspec.json.encode(table)) for name, table in files.items()
    }
    return Converted(
        tensors=dict(_tensors(config, weights)),
        files=written if tokenizer is None else {**written, "tokenizer.json": tokenizer},
        code=_code(config, tokenizer),
        needs="transformers torch",
    )


def _code(config: GptConfig, tokenizer: bytes | None) -> list[str]:
    load = 'model = AutoModelForCausalLM.from_pretrained(".")'
    make = f"max_length={min(100, config.block_size)}, do_sample=True)[0]"
    if tokenizer is None:
        return [
            "from transformers import AutoModelForCausalLM",
            "",
            load,
            f"print(model.generate({make}.tolist())",
        ]
    begins = 0 < len(load_tokenizer(tokenizer).encode("A").ids) < config.block_size
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        load,
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        *(['tokens = tokenizer("A", return_tensors="pt")'] if begins else []),
        f"print(tokenizer.decode(model.generate({'**tokens, ' if begins else ''}{make}))",
    ]


def _settings(config: GptConfig, end: int | None) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.block_size,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "activation_function": "gelu",
        "layer_norm_epsilon": _EPSILON,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": config.tie_head,
        "dtype": "float32",
        **_ends(end),
    }


def _ends(end: int | None) -> dict[str, int | None]:
    """Return what begins, ends and fills a text; from nothing it begins as in our own decoder."""
    return {"bos_token_id": end or 0, "eos_token_id": end, "pad_token_id": end}


def _tokenizer_settings(config: GptConfig, data: bytes, end: int | None) -> dict[str, Any]:
    text = load_tokenizer(data).id_to_token(end) if end is not None else None
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.block_size,
        "bos_token": text,
        "eos_token": text,
        "pad_token": text,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # a mark inside a text is text, as it was in training
    }


def _tensors(config: GptConfig, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, found in weights.items():
        path, _, kind = name.rpartition(".")
        if path == "head":
            yield "lm_head.weight", found
        elif path in _TOP:
            yield f"transformer.{_TOP[path]}.{kind}", found
            if path == "ln_f" and not config.bias:
                yield "transformer.ln_f.bias", torch.zeros(config.n_embd)
        else:
            yield from _layer(config, path, kind, found)


def _layer(config: GptConfig, path: str, kind: str, found: Tensor) -> Iterator[tuple[str, Tensor]]:
    _, index, layer = path.split(".", 2)
    dense = layer in _DENSE
    there = f"transformer.h.{index}.{_DENSE[layer] if dense else _NORMS[layer]}"
    yield f"{there}.{kind}", found.T if dense and kind == "weight" else found
    if not config.bias:
        yield f"{there}.bias", torch.zeros(len(found))
