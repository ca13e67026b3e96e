"""A GGUF file from an exported folder alone, as llama.cpp's converter makes it for a Llama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file


def write_gguf(folder: Path, to: Path) -> None:
    """Write the model in `folder`, as float32, with its tokenizer, template and special tokens."""
    settings = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(to, "llama")
    for key, name in {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "head_count": "num_attention_heads",
        "head_count_kv": "num_key_value_heads",
        "layer_norm_rms_eps": "rms_norm_eps",
        "vocab_size": "vocab_size",
    }.items():
        getattr(writer, f"add_{key}")(settings[name])
    writer.add_rope_dimension_count(settings["head_dim"])
    writer.add_rope_freq_base(settings["rope_parameters"]["rope_theta"])
    _words(writer, folder, settings["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, settings["num_hidden_layers"])
    for name, value in load_file(folder / "model.safetensors").items():
        place = names.get_name(name, try_suffixes=(".weight",))
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        for part, count in heads.items():  # rotary halves lie in turns there
            if f"{part}.weight" in name:
                value = _permuted(value, settings[count])
        writer.add_tensor(str(place), value.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _permuted(value: torch.Tensor, heads: int) -> torch.Tensor:
    rows, columns = value.shape
    halves = value.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _words(writer: Any, folder: Path, size: int) -> None:
    table = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = dict(table["model"]["vocab"])
    special = {each["content"]: each["id"] for each in table["added_tokens"]}
    tokens = ["[unused]"] * size
    kinds = [gguf.TokenType.UNUSED] * size
    for text, place in {**vocabulary, **special}.items():
        tokens[place] = text
        kinds[place] = gguf.TokenType.CONTROL if text in special else gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=size).add_to_gguf(writer)
