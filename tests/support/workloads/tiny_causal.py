"""Language models of three architectures, so small that a task takes milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA_LIKE: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA: Mapping[str, Any] = {"model_type": "llama", **_LLAMA_LIKE}
MISTRAL: Mapping[str, Any] = {"model_type": "mistral", "sliding_window": 48, **_LLAMA_LIKE}
QWEN2: Mapping[str, Any] = {"model_type": "qwen2", "tie_word_embeddings": True, **_LLAMA_LIKE}
QWEN3: Mapping[str, Any] = {"model_type": "qwen3", "head_dim": 16, **_LLAMA_LIKE}
GPT2: Mapping[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    shape["model_type"]: shape for shape in (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2)
}
BIASED: Mapping[str, Any] = {**LLAMA, "attention_bias": True, "mlp_bias": True}


def table(shape: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A `[model]` table, without the size of its vocabulary."""
    return {"config": dict(shape), "context": 32, **changes}
