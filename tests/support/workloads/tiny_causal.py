"""Language models of three architectures, so small that a task takes milliseconds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.workloads.data.chat_dataset import build_chat
from shared.workloads.data.chat_template import ChatTemplate
from shared.workloads.data.tokenizer import train_tokenizer
from tests.support.workloads import tiny_gpt

_LLAMA_LIKE: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA: Mapping[str, Any] = {"model_type": "llama", **_LLAMA_LIKE}
MISTRAL: Mapping[str, Any] = {"model_type": "mistral", "sliding_window": 6, **_LLAMA_LIKE}
QWEN2: Mapping[str, Any] = {"model_type": "qwen2", "tie_word_embeddings": True, **_LLAMA_LIKE}
QWEN3: Mapping[str, Any] = {"model_type": "qwen3", "head_dim": 16, **_LLAMA_LIKE}
GPT2: Mapping[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
_GEMMA: Mapping[str, Any] = {
    **_LLAMA_LIKE,
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
MORE: tuple[Mapping[str, Any], ...] = (
    {
        "model_type": "granite",
        **_LLAMA_LIKE,
        "embedding_multiplier": 12.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.2,
    },
    {"model_type": "smollm3", **_LLAMA_LIKE, "no_rope_layers": [1, 0]},
    {"model_type": "olmo2", **_LLAMA_LIKE},
    {
        "model_type": "phi3",
        **_LLAMA_LIKE,
        "rope_parameters": {"partial_rotary_factor": 0.5},
        "sliding_window": 6,
    },
    {"model_type": "gemma", **_GEMMA},
    {
        "model_type": "gemma2",
        **_GEMMA,
        **_LAYERS,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 3.0,
    },
    {"model_type": "gemma3_text", **_GEMMA, **_LAYERS, "query_pre_attn_scalar": 24},
    {
        "model_type": "gpt_neox",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
)
SHAPES: Mapping[str, Mapping[str, Any]] = {
    shape["model_type"]: shape for shape in (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, *MORE)
}
BIASED: Mapping[str, Any] = {**LLAMA, "attention_bias": True, "mlp_bias": True}


TEMPLATE = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    eos_token="<|endoftext|>",
)


def dialogues(path: Path, count: int = 800) -> tiny_gpt.Folder:
    """Questions and answers about sums, built into `path`."""

    def put(blob: bytes) -> str:
        name = hashlib.sha256(blob).hexdigest()
        (path / name).write_bytes(blob)
        return name

    lines = [{"prompt": f"{n} and {n}?", "completion": f"it is {n + n}"} for n in range(count)]
    (path / "talk.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    tokenizer = train_tokenizer([str(line) for line in lines], 300)
    sources = [path / "talk.jsonl"]
    manifest = build_chat("talk", sources, put, tokenizer=tokenizer, template=TEMPLATE)
    return tiny_gpt.Folder(manifest, path)


def table(shape: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A `[model]` table, without the size of its vocabulary."""
    return {"config": dict(shape), "context": 32, **changes}
