"""Folder that `AutoModelForCausalLM` and `AutoTokenizer` of the library transformers load.

Writing it needs torch, but not the library.
"""

from __future__ import annotations

import msgspec

from shared.workloads.base import ConvertedModel, FormatWanted, Weights
from shared.workloads.data.tokenizer import end_of_text, load_tokenizer
from shared.workloads.generation.sample_text import DRAWN
from shared.workloads.gpt import gpt2, llama
from shared.workloads.gpt.config import GptConfig

_ARCHITECTURES = {"gpt2": gpt2, "llama": llama}


def converted(config: GptConfig, weights: Weights, target: FormatWanted) -> ConvertedModel:
    """Return a model as the tensors and files of a folder that transformers loads."""
    tokenizer, dtype = target.tokenizer, target.dtype or "float32"
    architecture = _ARCHITECTURES[config.architecture]
    end = end_of_text(load_tokenizer(tokenizer)) if tokenizer is not None else None
    files = {
        "config.json": {**architecture.settings(config), "dtype": dtype, **_ends(end)},
        "generation_config.json": {"_from_model_config": True, **_ends(end)},
    }
    if tokenizer is not None:
        files["tokenizer_config.json"] = _tokenizer_settings(config, tokenizer, end)
    written = {
        name: msgspec.json.format(msgspec.json.encode(table)) for name, table in files.items()
    }
    return ConvertedModel(
        tensors=dict(architecture.tensors(config, weights)),
        files=written if tokenizer is None else {**written, "tokenizer.json": tokenizer},
        code=_code(config, tokenizer),
        needs="transformers torch",
        dtype=dtype,
    )


def _code(config: GptConfig, tokenizer: bytes | None) -> list[str]:
    load = 'model = AutoModelForCausalLM.from_pretrained(".")'
    make = f"max_length={min(100, config.block_size)}, {DRAWN})[0]"
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


def _ends(end: int | None) -> dict[str, int | None]:
    """Return the special tokens for the two config files; `end` is the token that ends a text, None
    if there is none. An empty prompt starts with it, or with token 0, as in `PromptText`.
    """
    return {"bos_token_id": end or 0, "eos_token_id": end, "pad_token_id": end}


def _tokenizer_settings(config: GptConfig, data: bytes, end: int | None) -> dict[str, object]:
    text = load_tokenizer(data).id_to_token(end) if end is not None else None
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.block_size,
        "bos_token": text,
        "eos_token": text,
        "pad_token": text,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # a mark inside a text is text, as in training
    }
