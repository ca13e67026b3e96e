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
from shared.programs.installation import missing_extra_error
from shared.workloads.base import ConvertedModel
from shared.workloads.training.gguf_tokenizer import (
    REFUSED,
    Vocabulary,
    add_tokens,
    vocabulary,
)

if TYPE_CHECKING:
    from gguf import GGUFWriter

NAME = "model.gguf"
# llama.cpp's names of model types; it reads Mistral as a Llama
_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt2": "gpt2",
}
_ACTIVATIONS = {
    "gpt2": ("gelu", "gelu_new"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), ("gelu_pytorch_tanh",)),
}
# layers of a group, of which all but the last see a sliding window alone
_WINDOWED = {"gemma2": 2, "gemma3_text": 6}
_LARGE = {"gemma2": 46, "gemma3_text": 62}  # layers of the models with another scale of attention
_FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16"}
_WEIGHT_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")
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


class _Folder(NamedTuple):
    """Parsed files of a folder of the library transformers."""

    config: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    template: str | None
    begin: int | None  # token that the tokenizer puts before every text


def as_gguf(model: ConvertedModel) -> ConvertedModel:
    """Return a version in the form of the library transformers as one GGUF file.

    Raises Configuration without the library, BadRequest for a model that llama.cpp would compute
    differently.
    """
    if importlib.util.find_spec("gguf") is None:
        raise missing_extra_error("a GGUF file", "gguf")
    if "tokenizer.json" not in model.files:
        raise BadRequest(f"{REFUSED} a model without a tokenizer: llama.cpp needs one")
    folder = _Folder(
        config=decode(model.files["config.json"], dict[str, Any]),
        tokenizer=decode(model.files["tokenizer.json"], dict[str, Any]),
        template=decode(model.files["tokenizer_config.json"], dict[str, Any]).get("chat_template"),
        begin=_begin(model.files["tokenizer.json"]),
    )
    _check(folder.config)
    if folder.config.get("eos_token_id") is None:
        raise BadRequest(
            f"{REFUSED} a model without a token that ends a text: llama.cpp would take another one"
        )
    words = vocabulary(folder.tokenizer, chat=folder.template is not None)
    with tempfile.TemporaryDirectory(prefix="gguf-") as scratch:
        path = Path(scratch) / NAME
        _write(model, folder, words, path)
        data = path.read_bytes()
    return ConvertedModel(
        tensors={},
        files={NAME: data},
        code=_CHAT if folder.template else _CODE,
        needs="llama-cpp-python",
        dtype=model.dtype,
    )


def _check(config: Mapping[str, Any]) -> None:
    """Raise BadRequest for a model that llama.cpp would compute differently."""
    kind = config["model_type"]
    if kind not in _ARCHITECTURES:
        names = ", ".join(_ARCHITECTURES)
        raise BadRequest(f"{REFUSED} {kind}, only for {names}: choose transformers")
    act = next((config[key] for key in _ACTIVATION_KEYS if config.get(key) is not None), "gelu_new")
    if act not in _ACTIVATIONS.get(kind, ("silu",)):
        raise BadRequest(f"{REFUSED} a {kind} with the activation {act}: choose transformers")
    if biased := [key for key in ("attention_bias", "mlp_bias") if config.get(key)]:
        raise BadRequest(f"{REFUSED} a {kind} with {biased[0]}: choose transformers")
    if kind in _WINDOWED:
        _check_windows(config)
    elif (config.get("sliding_window") or math.inf) < config.get("max_position_embeddings", 0):
        raise BadRequest(
            f"{REFUSED} a {kind} with a sliding window, which llama.cpp leaves out: choose"
            " transformers"
        )
    if kind.startswith("gemma") and not config.get("tie_word_embeddings", True):
        raise BadRequest(f"{REFUSED} a {kind} with a head of its own: choose transformers")
    rope_type = _rope(config).get("rope_type", "default")
    if rope_type not in (("default",) if kind in _WINDOWED else ("default", "llama3")):
        raise BadRequest(f"{REFUSED} rotary positions of the type {rope_type}")


def _check_windows(config: Mapping[str, Any]) -> None:
    """Raise BadRequest for a Gemma whose sliding windows differ from those that llama.cpp has
    fixed.
    """
    kind, layers = config["model_type"], config["num_hidden_layers"]
    period = _WINDOWED[kind]
    types = [
        "sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)
    ]
    width: int = config["head_dim"]
    if layers == _LARGE[kind]:
        width = config["hidden_size"] // config["num_attention_heads"]
    local = config["rope_parameters"].get("sliding_attention", {}).get("rope_theta", 10_000.0)
    usual = {
        "layer_types": list(config.get("layer_types") or types) == types,
        "query_pre_attn_scalar": config.get("query_pre_attn_scalar", 256) == width,
        "attn_logit_softcapping": bool(config["attn_logit_softcapping"]) == (kind == "gemma2"),
        "final_logit_softcapping": kind != "gemma2" or bool(config["final_logit_softcapping"]),
        "rope_local_base_freq": local == 10_000.0,
    }
    if unusual := [key for key, right in usual.items() if not right]:
        raise BadRequest(
            f"{REFUSED} a {kind} with this {unusual[0]}, which llama.cpp has fixed: choose"
            " transformers"
        )


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the rotary positions in the layers that see the whole context."""
    settings: Mapping[str, Any] = config.get("rope_parameters") or {}
    whole: Mapping[str, Any] = settings.get("full_attention", settings)
    return whole


def _write(model: ConvertedModel, folder: _Folder, words: Vocabulary, path: Path) -> None:
    """Write the GGUF file of a version."""
    import gguf

    architecture = _ARCHITECTURES[folder.config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[model.dtype]])
    (_add_gpt2 if architecture == "gpt2" else _add_llama)(writer, folder.config)
    add_tokens(writer, folder.tokenizer, folder.config["vocab_size"], words)
    _add_marks(writer, folder)
    _add_tensors(writer, model, folder.config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_llama(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """Add the settings of a Llama and its relatives."""
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
    rope = {"rope_theta": config.get("rope_theta", 10_000.0), **_rope(config)}
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(rope, width).numpy())
    if config["model_type"] in _WINDOWED:
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


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


def _begin(data: bytes) -> int | None:
    """Return the token that a tokenizer.json puts before every text; None if it puts no token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(data.decode())
    whole, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    return whole.ids[0] if whole.ids[:1] != bare.ids[:1] else None


def _add_marks(writer: GGUFWriter, folder: _Folder) -> None:
    """Add the special tokens and the chat template."""
    config = folder.config
    begin, end, pad = (config.get(f"{name}_token_id") for name in ("bos", "eos", "pad"))
    begin = begin if folder.begin is None else folder.begin
    ends = end if isinstance(end, list) else [end]
    for token, add in (
        (begin, writer.add_bos_token_id),
        (ends[0], writer.add_eos_token_id),
        (next(iter(ends[1:]), None), writer.add_eot_token_id),
        (pad, writer.add_pad_token_id),
    ):
        if token is not None:
            add(token)
    writer.add_add_bos_token(folder.begin is not None)
    if folder.template:
        writer.add_chat_template(folder.template)


def _add_tensors(writer: GGUFWriter, model: ConvertedModel, config: Mapping[str, Any]) -> None:
    """Add the weights by llama.cpp's names. Raises BadRequest for a tensor without such a name."""
    import gguf

    architecture = _ARCHITECTURES[config["model_type"]]
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    layers = config["n_layer"] if architecture == "gpt2" else config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(kind, layers)
    matrices = gguf.GGMLQuantizationType[_WEIGHT_TYPES[model.dtype]]
    for name, value in model.tensors.items():
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if place is None:
            raise BadRequest(f"{REFUSED} a model with the tensor {name}")
        plain = value.ndim < 2 or place.startswith("position_embd")
        dtype = gguf.GGMLQuantizationType.F32 if plain else matrices
        array = _turned(name, value.detach().float(), config).contiguous().numpy()
        writer.add_tensor(place, gguf.quants.quantize(array, dtype), raw_dtype=dtype)


def _turned(name: str, value: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Return a tensor as llama.cpp keeps it: matrices of GPT-2 as outputs x inputs, the two rotary
    halves of a Llama's heads interleaved, the norms of a Gemma plus the 1 that Gemma adds to their
    weights.
    """
    architecture, layer = _ARCHITECTURES[config["model_type"]], name.split(".")[-2]
    if architecture == "gpt2" and layer in ("c_attn", "c_proj", "c_fc") and value.ndim == 2:
        return value.T
    if architecture.startswith("gemma") and layer.endswith("norm"):
        return value + 1  # Gemma adds 1 to the weight of a norm, llama.cpp does not
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    if architecture != "llama" or layer not in heads:
        return value
    rows, columns = value.shape
    count: int = config[heads[layer]]
    halves = value.reshape(count, 2, rows // count // 2, columns)
    return halves.transpose(1, 2).reshape(value.shape)
