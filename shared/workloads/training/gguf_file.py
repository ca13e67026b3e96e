"""GGUF file of a language model, for llama.cpp. Needs the extra `gguf`.

The file is written from the folder of the library transformers: its tensors, config.json and
tokenizer. Matrices have the wanted type of numbers, vectors and positions are float32.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shared.decoding import decode
from shared.errors import BadRequest
from shared.programs.installation import lacking
from shared.workloads.base import ConvertedModel

if TYPE_CHECKING:
    from gguf import GGUFWriter

NAME = "model.gguf"
# llama.cpp's names of model types; it reads Mistral as a Llama
_ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gpt2": "gpt2"
}  # fmt: skip
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's names of the patterns by which tokenizers divide a text
_PATTERNS = {
    _PATTERN.replace("DIGITS", r"\p{N}{1,3}"): "llama-bpe",
    _PATTERN.replace("DIGITS", r"\p{N}"): "qwen2",
}
_FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16"}
_WEIGHT_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_CODE = (
    "from llama_cpp import Llama",
    "",
    f'model = Llama("{NAME}", n_ctx=0, verbose=False)',
    'print(model("A", max_tokens=32)["choices"][0]["text"])',
)
_CHAT = (
    *_CODE[:-1],
    'turns = [{"role": "user", "content": "Hello!"}]',
    "reply = model.create_chat_completion(turns, max_tokens=32)",
    'print(reply["choices"][0]["message"]["content"])',
)
_REFUSED = "the format gguf is not for"


class _Folder(NamedTuple):
    """Parsed files of a folder of the library transformers."""

    config: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    template: str | None
    begins: bool  # a text begins with the token of its beginning


def as_gguf(model: ConvertedModel) -> ConvertedModel:
    """Return a version in the form of the library transformers as one GGUF file.

    Raises Configuration without the library, BadRequest for what llama.cpp would compute otherwise.
    """
    if importlib.util.find_spec("gguf") is None:
        raise lacking("a GGUF file", "gguf")
    if "tokenizer.json" not in model.files:
        raise BadRequest(f"{_REFUSED} a model without a tokenizer: llama.cpp needs one")
    folder = _Folder(
        config=decode(model.files["config.json"], dict[str, Any]),
        tokenizer=decode(model.files["tokenizer.json"], dict[str, Any]),
        template=decode(model.files["tokenizer_config.json"], dict[str, Any]).get("chat_template"),
        begins=_begins(model.files),
    )
    _check(folder.config)
    pattern = _pattern(folder.tokenizer)
    with tempfile.TemporaryDirectory(prefix="gguf-") as scratch:
        path = Path(scratch) / NAME
        _write(model, folder, pattern, path)
        data = path.read_bytes()
    return ConvertedModel(
        tensors={},
        files={NAME: data},
        code=_CHAT if folder.template else _CODE,
        needs="llama-cpp-python",
        dtype=model.dtype,
    )


def _check(config: Mapping[str, Any]) -> None:
    """Raise BadRequest for a model that llama.cpp would compute otherwise."""
    kind = config["model_type"]
    if kind not in _ARCHITECTURES:
        names = ", ".join(_ARCHITECTURES)
        raise BadRequest(f"{_REFUSED} {kind}, only for {names}: choose transformers")
    usual = ("gelu", "gelu_new") if kind == "gpt2" else ("silu",)
    if (act := config.get("activation_function") or config.get("hidden_act")) not in usual:
        raise BadRequest(f"{_REFUSED} a {kind} with the activation {act}: choose transformers")
    if biased := [key for key in ("attention_bias", "mlp_bias") if config.get(key)]:
        raise BadRequest(f"{_REFUSED} a {kind} with {biased[0]}: choose transformers")
    if (config.get("sliding_window") or math.inf) < config.get("max_position_embeddings", 0):
        raise BadRequest(
            f"{_REFUSED} a {kind} with a sliding window, which llama.cpp leaves out: choose"
            " transformers"
        )
    rope_type = (config.get("rope_parameters") or {}).get("rope_type", "default")
    if rope_type not in ("default", "llama3"):
        raise BadRequest(f"{_REFUSED} rotary positions of the type {rope_type}")


def _pattern(tokenizer: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the pattern by which a tokenizer divides a text. Raises BadRequest
    for one that is no BPE of bytes, or divides otherwise.
    """
    model, normalizer = tokenizer["model"], tokenizer.get("normalizer") or {"type": "NFC"}
    divider = tokenizer.get("pre_tokenizer") or {"type": ""}
    parts = divider["pretokenizers"] if divider["type"] == "Sequence" else [divider]
    last = parts[-1]
    if model["type"] != "BPE" or last["type"] != "ByteLevel" or last["add_prefix_space"]:
        raise BadRequest(f"{_REFUSED} this tokenizer, only for a BPE of bytes")
    if not model["merges"]:
        raise BadRequest(f"{_REFUSED} a model of bytes: llama.cpp needs a tokenizer with merges")
    usual = normalizer["type"] == "NFC" and last["use_regex"]
    match parts[:-1]:
        case [] if usual:
            return "gpt-2"
        case [{"type": "Digits", "individual_digits": True}] if usual:
            return "smollm"
        case [{"type": "Split", "behavior": "Isolated", "pattern": {"Regex": pattern}}] if (
            pattern in _PATTERNS and normalizer["type"] == "NFC" and not last["use_regex"]
        ):
            return _PATTERNS[pattern]
    raise BadRequest(
        f"{_REFUSED} this tokenizer: it divides texts by a pattern of its own, not as GPT-2,"
        " SmolLM, Llama 3 or Qwen 2"
    )


def _write(model: ConvertedModel, folder: _Folder, pattern: str, path: Path) -> None:
    """Write the file."""
    import gguf

    architecture = _ARCHITECTURES[folder.config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[model.dtype]])
    (_add_gpt2 if architecture == "gpt2" else _add_llama)(writer, folder.config)
    _add_tokens(writer, folder, pattern)
    _add_tensors(writer, model, folder.config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_llama(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """Add the settings of a Llama or a Qwen."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(width)
    rope = {"rope_theta": config.get("rope_theta", 10_000.0), **config.get("rope_parameters", {})}
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(rope, width).numpy())


def _divisors(rope: Mapping[str, Any], width: int) -> Tensor:
    """Return the divisors of the frequencies of rotary positions, as Llama 3 stretches them."""
    base: float = rope["rope_theta"]
    length: float = rope["original_max_position_embeddings"]
    low, high, factor = (
        float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor")
    )
    frequencies = base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    smooth = ((length * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    divisors: Tensor = 1 / ((1 - smooth) / factor + smooth)
    return divisors.float()


def _add_gpt2(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """Add the settings of a GPT-2."""
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _begins(files: Mapping[str, bytes]) -> bool:
    """Return True if the tokenizer itself begins a text with the token of its beginning."""
    from tokenizers import Tokenizer

    begin = decode(files["config.json"], dict[str, Any]).get("bos_token_id")
    ids = Tokenizer.from_str(files["tokenizer.json"].decode()).encode("a").ids
    return begin is not None and ids[:1] == [begin]


def _add_tokens(writer: GGUFWriter, folder: _Folder, pattern: str) -> None:
    """Add the tokenizer, its special tokens and the chat template."""
    import gguf

    config, bpe, size = folder.config, folder.tokenizer["model"], folder.config["vocab_size"]
    tokens = [f"[PAD{token}]" for token in range(size)]
    kinds = [gguf.TokenType.UNUSED] * size
    for text, token in bpe["vocab"].items():
        tokens[token], kinds[token] = text, gguf.TokenType.NORMAL
    for added in folder.tokenizer["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], kinds[added["id"]] = added["content"], kind
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pattern)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    begin, end, pad = (config.get(f"{name}_token_id") for name in ("bos", "eos", "pad"))
    ends = end if isinstance(end, list) else [end]
    for token, add in (
        (begin, writer.add_bos_token_id),
        (ends[0], writer.add_eos_token_id),
        (next(iter(ends[1:]), None), writer.add_eot_token_id),
        (pad, writer.add_pad_token_id),
    ):
        if token is not None:
            add(token)
    writer.add_add_bos_token(folder.begins)
    if folder.template:
        writer.add_chat_template(folder.template)


def _add_tensors(writer: GGUFWriter, model: ConvertedModel, config: Mapping[str, Any]) -> None:
    """Add the weights by llama.cpp's names."""
    import gguf

    architecture = _ARCHITECTURES[config["model_type"]]
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    layers = config["n_layer"] if architecture == "gpt2" else config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(kind, layers)
    matrices = gguf.GGMLQuantizationType[_WEIGHT_TYPES[model.dtype]]
    for name, value in model.tensors.items():
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if place is None:
            raise BadRequest(f"{_REFUSED} a model with the tensor {name}")
        plain = value.ndim < 2 or place.startswith("position_embd")
        dtype = gguf.GGMLQuantizationType.F32 if plain else matrices
        array = _turned(name, value.detach().float(), config).contiguous().numpy()
        writer.add_tensor(place, gguf.quants.quantize(array, dtype), raw_dtype=dtype)


def _turned(name: str, value: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Return a tensor as llama.cpp keeps it: matrices of GPT-2 as outputs x inputs, and the rotary
    halves of a Llama's heads in turns.
    """
    architecture, layer = _ARCHITECTURES[config["model_type"]], name.split(".")[-2]
    if architecture == "gpt2" and layer in ("c_attn", "c_proj", "c_fc") and value.ndim == 2:
        return value.T
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    if architecture != "llama" or layer not in heads:
        return value
    rows, columns = value.shape
    count: int = config[heads[layer]]
    halves = value.reshape(count, 2, rows // count // 2, columns)
    return halves.transpose(1, 2).reshape(value.shape)
