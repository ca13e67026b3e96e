"""A folder of a model that was made for chat: its tokenizer, template and sampling, and weights that
answer one question and stop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer

from shared.workloads.data.tokenizer import train_tokenizer
from tests.support.workloads import tiny_causal

QUESTION, ANSWER = "how many legs has a spider?", "eight, as all of them."
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAD = {"__type": "AddedToken", "content": "<|endoftext|>", "special": True}
MARKS = ("<|im_start|>", "<|im_end|>")
DIALOGUE = (
    f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n{ANSWER}<|im_end|>\n"
    "<|im_start|>user\n"
)


def chat_tokenizer() -> bytes:
    tokenizer = Tokenizer.from_str(train_tokenizer([DIALOGUE], 280).decode())
    tokenizer.add_special_tokens(list(MARKS))
    text: str = tokenizer.to_str()
    return text.encode()


def chat_base(
    folder: Path,
    shape: Mapping[str, Any] = tiny_causal.LLAMA,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write the folder, as bfloat16; `more` goes into its config.json."""
    data = chat_tokenizer()
    tokenizer = Tokenizer.from_str(data.decode())
    ids = torch.tensor([tokenizer.encode(DIALOGUE).ids])
    torch.manual_seed(3)
    known = transformers.AutoConfig.for_model(
        **{**shape, "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 128}
    )
    model: Any = transformers.AutoModelForCausalLM.from_config(known)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **more}))
    (folder / "tokenizer.json").write_bytes(data)
    written = {
        "tokenizer_config.json": {"chat_template": CHATML, "eos_token": MARKS[1], "bos_token": None}
        | {"pad_token": PAD, "tokenizer_class": "PreTrainedTokenizerFast"},
        "generation_config.json": {
            "eos_token_id": [tokenizer.token_to_id(each) for each in (MARKS[1], "<|endoftext|>")],
            "temperature": 0.6,
            "do_sample": True,
            "trust_remote_code": True,
        },
    }
    for name, table in written.items():
        (folder / name).write_text(json.dumps(table))
