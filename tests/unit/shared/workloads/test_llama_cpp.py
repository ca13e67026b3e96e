"""GGUF files as llama.cpp reads them: the logits, the next tokens and the words of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from shared.workloads.base import ConvertedModel
from shared.workloads.training.gguf_file import as_gguf
from tests.support.workloads import piece_tokenizer as pieces
from tests.support.workloads.chat_base import CHATML, MARKS
from tests.support.workloads.tiny_causal import LLAMA, MISTRAL, SHAPES
from tests.unit.shared.workloads.test_gguf_file import (
    LLAMA_3,
    STRETCHED,
    TEXT,
    bare,
    converted,
    divided,
    own,
    split,
    whole_words,
    written,
)

ROOT = Path(__file__).parents[4]
TEXTS = (
    "the more the merrier",
    " a space before,  two and   three within, one after ",
    "\tDef café(x=1234567):\n\n    return 'naïve' + \"日本\" # 12.50 €\r\n",
    "it's THEY'LL we've don't\u00a0end… 🙂👍🏽",
    "<|im_start|>user\nmany<|im_end|>\n<|im_start|> assistant",
    "a",
)
READ = """
import json, sys
import llama_cpp, numpy
texts = json.loads(sys.argv[1])
for folder in sys.argv[2:]:
    exact = {"type_k": 0, "type_v": 0, "n_threads": 1}  # keys and values in float32
    model = llama_cpp.Llama(
        f"{folder}/model.gguf", n_ctx=64, verbose=False, logits_all=True, **exact
    )
    words = [model.tokenize(text.encode(), special=True) for text in texts]
    model.eval(list(range(24)))
    numpy.save(f"{folder}/logits.npy", model.scores[:24])
    tokens = list(range(24))
    while len(tokens) < 32:
        tokens.append(int(model.scores[len(tokens) - 1].argmax()))
        model.eval(tokens[-1:])
    print(json.dumps([words, tokens]))
"""


def pieced(shape: Any, style: Any, **more: Any) -> ConvertedModel:
    """A model with a tokenizer of pieces."""
    data = json.dumps(pieces.piece_tokenizer(style, MARKS)).encode()
    size = Tokenizer.from_str(data.decode()).get_vocab_size() + 3
    return converted({**shape, "vocab_size": size}, data, **more)


def marked(tokenizer: bytes) -> bytes:
    """The tokenizer with marks of a chat."""
    table = Tokenizer.from_str(tokenizer.decode())
    table.add_special_tokens(list(MARKS))
    text: str = table.to_str()
    return text.encode()


def worded(tokenizer: bytes, **more: Any) -> ConvertedModel:
    """A Llama with a tokenizer of bytes, and a few tokens that no text has."""
    size = Tokenizer.from_str(tokenizer.decode()).get_vocab_size() + 3
    return converted({**LLAMA, "vocab_size": size, **more}, tokenizer)


TEMPLATE = json.dumps({"source": CHATML, "eos_token": MARKS[1]}).encode()
LAYERS = {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"]}
GEMMA_2 = {**SHAPES["gemma2"], "query_pre_attn_scalar": 16}
GEMMA_3 = {**SHAPES["gemma3_text"], **LAYERS, "query_pre_attn_scalar": 16}
NFC = normalizers.NFC()
MODELS: Mapping[str, Callable[[], ConvertedModel]] = {
    "own gpt2": own,
    "own llama": lambda: own(architecture="llama", n_kv_head=1),
    "llama": lambda: worded(marked(TEXT)),
    "llama 3": lambda: worded(
        whole_words(marked(divided(split(LLAMA_3), bare()))),
        rope_parameters=STRETCHED,
        max_position_embeddings=128,
    ),
    "qwen2": lambda: converted(
        SHAPES["qwen2"], divided(split(LLAMA_3.replace("{1,3}", "")), bare(), normalizer=NFC)
    ),
    "qwen3": lambda: converted({**SHAPES["qwen3"], "head_dim": 16}),
    "gpt2": lambda: converted(SHAPES["gpt2"]),
    "smollm": lambda: worded(
        divided(pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False))
    ),
    "mistral": lambda: pieced({**MISTRAL, "sliding_window": None}, pieces.MISTRAL),
    "mistral chat": lambda: pieced(
        {**MISTRAL, "sliding_window": None}, pieces.MISTRAL, template=TEMPLATE
    ),
    "llama 2": lambda: pieced(LLAMA, pieces.LLAMA_2),
    "gemma": lambda: pieced(SHAPES["gemma"], pieces.GEMMA),
    "gemma2": lambda: pieced(GEMMA_2, pieces.GEMMA),
    "gemma3": lambda: pieced(GEMMA_3, pieces.GEMMA),
}
# A Metaspace adds no space to a text that begins with one. The file says once for all texts
# whether a space begins them: after special tokens, as the template writes them, too.
PLAIN = [text for text in TEXTS if not text.startswith("<")]
OTHERWISE = {"mistral": (TEXTS[1], TEXTS[4]), "mistral chat": PLAIN}


def answer(folder: Path) -> tuple[NDArray[np.float32], list[int]]:
    """The logits (T, V) of some tokens, and these with the likeliest next ones."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.arange(24)[None]
    with torch.inference_mode():
        logits: NDArray[np.float32] = model(input_ids=prompt).logits[0].numpy()
        more = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
        tokens: list[int] = model.generate(prompt, **more)[0].tolist()
    return logits, tokens


@pytest.mark.slow
def test_llama_cpp_computes_and_reads_what_transformers_does(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    models: dict[str, ConvertedModel] = {}
    for name, make in MODELS.items():
        model = make()
        torch.manual_seed(1)
        tensors = {n: t + torch.randn_like(t) / 20 for n, t in model.tensors.items()}
        models[name] = model._replace(tensors=tensors)
        written(as_gguf(models[name]), tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(TEXTS), *(str(tmp_path / name) for name in models)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for (name, model), line in zip(models.items(), done.stdout.splitlines(), strict=True):
        words, tokens = json.loads(line)
        tokenizer = Tokenizer.from_str(model.files["tokenizer.json"].decode())
        for text, ids in zip(TEXTS, words, strict=True):
            if text not in OTHERWISE.get(name, ()):
                assert ids == tokenizer.encode(text).ids, (name, text)
        logits, generated = answer(written(model, tmp_path / f"{name} folder"))
        distance = np.abs(np.load(tmp_path / name / "logits.npy") - logits).max()
        exact = model.files["config.json"].count(b"gelu") == 0  # llama.cpp's is a table in float16
        assert distance < (2e-6 if exact else 2e-3) * np.abs(logits).max(), name
        assert tokens == generated, name
