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
