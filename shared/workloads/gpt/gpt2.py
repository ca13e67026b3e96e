"""Version in the form of the library transformers: a GPT-2 (Radford et al. 2019) with the exact
GELU.

Its dense layers are stored transposed, and always have a bias, zero if the version has none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shared.workloads.base import Weights
from shared.workloads.gpt.config import GptConfig
from shared.workloads.gpt.model import EPSILON

_TOP = {"tok_emb": "wte", "pos_emb": "wpe", "ln_f": "ln_f"}
_NORMS = {"ln1": "ln_1", "ln2": "ln_2"}
_DENSE = {
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def settings(config: GptConfig) -> dict[str, object]:
    """Return the part of `config.json` that describes the model."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.block_size,
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "activation_function": "gelu",
        "layer_norm_epsilon": EPSILON,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": config.tie_head,
    }


def tensors(config: GptConfig, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under the names of the library."""
    for name, tensor in weights.items():
        path, _, kind = name.rpartition(".")
        if path == "head":
            yield "lm_head.weight", tensor
        elif path in _TOP:
            yield f"transformer.{_TOP[path]}.{kind}", tensor
            if path == "ln_f" and not config.bias:
                yield "transformer.ln_f.bias", torch.zeros(config.n_embd)
        else:
            yield from _layer(config, path, kind, tensor)


def _layer(config: GptConfig, path: str, kind: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    _, index, layer = path.split(".", 2)
    dense = layer in _DENSE
    there = f"transformer.h.{index}.{_DENSE[layer] if dense else _NORMS[layer]}"
    yield f"{there}.{kind}", tensor.T if dense and kind == "weight" else tensor
    if not config.bias:
        yield f"{there}.bias", torch.zeros(len(tensor))
