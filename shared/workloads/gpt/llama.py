"""Version in the form of the library transformers: a Llama (Touvron et al. 2023).

The library has three matrices for queries, keys and values; a version has one for all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shared.workloads.base import Weights
from shared.workloads.gpt.config import GptConfig
from shared.workloads.gpt.model import EPSILON, ROTARY_BASE

_TOP = {"tok_emb": "model.embed_tokens", "ln_f": "model.norm", "head": "lm_head"}
_LAYER = {
    "ln1": "input_layernorm",
    "attn.proj": "self_attn.o_proj",
    "ln2": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def settings(config: GptConfig) -> dict[str, object]:
    """Return the part of `config.json` that describes the model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.block_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.key_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": ROTARY_BASE,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_head,
    }


def tensors(config: GptConfig, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under the library's names."""
    key_width = config.key_heads * config.head_width
    for name, value in weights.items():
        path = name.removesuffix(".weight")
        if path in _TOP:
            yield f"{_TOP[path]}.weight", value
            continue
        _, index, layer = path.split(".", 2)
        there = f"model.layers.{index}"
        if layer == "attn.qkv":
            parts = torch.split(value, [config.n_embd, key_width, key_width])
            for part, tensor in zip("qkv", parts, strict=True):
                yield f"{there}.self_attn.{part}_proj.weight", tensor
        else:
            yield f"{there}.{_LAYER[layer]}.weight", value
