"""Model from a folder as the library transformers writes it: config.json, safetensors, tokenizer.

Every file is checked against the schema of its architecture before any weights are read. No file is
unpickled, and no code is copied.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from shared.errors import InvalidRunFile, VolunteerError
from shared.files.text_file import json_object
from shared.tensors.header import (
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    check_cover,
    header_length,
    parse_header,
)
from shared.tensors.spec import Schema
from shared.text import escaped
from shared.workloads.base import ChunkRef
from shared.workloads.causal_lm import architectures
from shared.workloads.causal_lm.architectures import OWN, Shape, read_shape
from shared.workloads.data.tokenizer import check_size

SETTINGS, INDEX, TOKENIZER = "config.json", "model.safetensors.index.json", "tokenizer.json"
# Name of a table or file at the beginning of an error about settings; `read_folder` replaces it by
# the path of the file.
_PLACE = re.compile(rf"(\[?{re.escape(architectures.TABLE)}\]?:? |{re.escape(SETTINGS)}: )")
FILES_MAX = 256
SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,120}\.safetensors")
SETTINGS_MAX, INDEX_MAX = 1 << 20, 16 << 20  # bytes
_FLOATS = ("F32", "BF16", "F16")
_PREFIX = "transformer."  # prefix that the first files of GPT-2 lack
# Tables in old files that are not weights, but follow from the settings.
_DERIVED = re.compile(r"(.*\.)?(att(entio)?n\.(masked_)?bias|rotary_emb\.inv_freq)")

# Published code of Phi-3, which the library now contains: it is not needed, and never fetched.
_ADOPTED = re.compile(r"(microsoft/[\w.-]+--)?(configuration|modeling)_phi3\.\w+")

_PART = "partial_rotary_factor"
_LIKE_LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_QWEN = {
    **_LIKE_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_TANH = "gelu_pytorch_tanh"
_LIKE_GEMMA = {
    **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "head_dim": 256},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "query_pre_attn_scalar": 256},
    **{"sliding_window": 4096, "hidden_act": _TANH, "tie_word_embeddings": True},
}
_WHOLE = "copy the folder once more, whole, as save_pretrained writes it"
_ONE = f"take {SETTINGS} and weights of one model"
# Settings that the library leaves out of config.json because they are its own defaults.
_LEFT_OUT: Mapping[str, Mapping[str, object]] = {
    "llama": {**_LIKE_LLAMA, "vocab_size": 32000, "intermediate_size": 11008},
    "mistral": {
        **_LIKE_LLAMA,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "granite": {**_LIKE_LLAMA, "vocab_size": 32000, "intermediate_size": 11008},
    "smollm3": {
        **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008},
        **{"num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4},
        **{"max_position_embeddings": 32768, "tie_word_embeddings": True},
    },
    "olmo2": {
        **_LIKE_LLAMA,
        **{"vocab_size": 50304, "intermediate_size": 11008, "rms_norm_eps": 1e-5},
    },
    "phi3": {
        **{"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    },
    "gemma": {
        **{"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576},
        **{"num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 256},
        **{"max_position_embeddings": 8192, "hidden_act": _TANH, "tie_word_embeddings": True},
    },
    "gemma2": {
        **_LIKE_GEMMA,
        **{"vocab_size": 256000, "max_position_embeddings": 8192},
        **{"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    },
    "gemma3_text": {**_LIKE_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072},
    "gpt_neox": {
        **{"vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576},
        **{"num_hidden_layers": 44, "num_attention_heads": 64},
    },
    "gpt2": {"vocab_size": 50257},
}
_ROPE: Mapping[str, Mapping[str, float]] = {
    "smollm3": {"rope_theta": 2e6},
    "phi3": {_PART: 1.0},
    "gemma3_text": {"rope_theta": 1e6},
    "gpt_neox": {_PART: 0.25},
}
# Settings with an effect on training, each with its only supported value.
FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "use_sliding_window": False,
    "use_bidirectional_attention": False,
}


def read_folder(folder: Path) -> tuple[Shape, dict[str, ChunkRef]]:
    """Return the architecture of the model in a folder, and its files of weights by hash.

    Raises InvalidRunFile if the model cannot be trained here.
    """
    settings = settings_in(folder)
    try:
        shape = shape_of(settings)
    except InvalidRunFile as error:
        # the settings are of this file, not of the run file's table of the same keys
        reason = _PLACE.sub("", error.message, count=1)
        raise InvalidRunFile(f"{folder / SETTINGS}: {reason}") from error
    names = _shards(folder)
    file_of: dict[str, str] = {}
    for name in names:
        for tensor in placed(_entries(folder, name), architectures.schema(shape), name):
            if tensor in file_of:
                raise InvalidRunFile(f"{name} and {file_of[tensor]} both hold {tensor}")
            file_of[tensor] = name
    for spec in architectures.schema(shape):
        if spec.name not in file_of:
            raise InvalidRunFile(
                f"{folder}: no file of weights holds {spec.name}, of {SETTINGS}: {_WHOLE}"
            )
    return shape, {name: hashed(folder / name) for name in names}


def settings_in(folder: Path) -> dict[str, object]:
    """Return the settings in a folder, unchanged. Raises InvalidRunFile."""
    return _json(folder, SETTINGS, SETTINGS_MAX)


def tokenizer_sha256(folder: Path) -> str | None:
    """Return the hash of the model's tokenizer; None if the folder has no tokenizer."""
    path = folder / TOKENIZER
    if not path.is_file():
        return None
    check_size(path)
    return hashed(path).sha256


def placed(entries: Mapping[str, tuple[int, ...]], specs: Schema, file: str) -> Iterator[str]:
    """Yield the schema's names of a file's tensors, without derived tables and tied heads.

    Raises InvalidRunFile for a tensor that the architecture does not have, or of another shape.
    """
    shapes = {spec.name: spec.shape for spec in specs}
    for name, shape in entries.items():
        tensor = own_name(name, shapes)
        if tensor is None:
            continue
        if tensor not in shapes:
            raise InvalidRunFile(
                f"{file} holds {escaped(name, 120)}, which this architecture does not have: {_ONE}"
            )
        if shape != shapes[tensor]:
            raise InvalidRunFile(
                f"{file}: {tensor} has the shape {shape}, but {SETTINGS} says {shapes[tensor]}:"
                f" {_ONE}"
            )
        yield tensor


def own_name(name: str, names: Mapping[str, object]) -> str | None:
    """Return the schema's name of a tensor in a file; None for a derived table, or a tied head."""
    if name == "embed_out.weight":  # the name in files of GPT-NeoX
        name = "lm_head.weight"
    if name in names:
        return name
    if _PREFIX + name in names:
        return _PREFIX + name
    if _DERIVED.fullmatch(name) or name == "lm_head.weight":
        return None
    return name


def shape_of(settings: Mapping[str, object]) -> Shape:
    """Return the architecture of a config.json.

    Raises InvalidRunFile, also for an unsupported value of a setting in FIXED.
    """
    kind = settings.get("model_type")
    left_out = _LEFT_OUT.get(kind, {}) if isinstance(kind, str) else {}
    raw = {key: value for key, value in settings.items() if value is not None}
    keys_read = read_known(str(kind))
    for key, value in FIXED.items():
        if raw.get(key, value) != value:
            raise InvalidRunFile(f"{SETTINGS}: {key} = {escaped(raw[key], 40)} is not known here")
    if "quantization_config" in raw:
        raise InvalidRunFile(
            f"{SETTINGS} says that the weights are quantised: take the model that they were made"
            ' from; [model] base_precision = "nf4" or "int8" holds it in few bits while it trains'
        )
    foreign = {key for key, owners in OWN.items() if kind not in owners} & raw.keys()
    kinds = raw.get("layer_types") or []
    whole = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    if keys_read and "layer_types" in foreign and not whole:
        raise InvalidRunFile(f"{SETTINGS}: {kind} supports only full attention (layer_types)")
    keys_read = tuple(key for key in keys_read if key not in foreign)
    fields = {key: value for key, value in raw.items() if key in keys_read or key == "auto_map"}
    code = raw.get("auto_map")
    named = code.values() if kind == "phi3" and isinstance(code, dict) else ()
    if named and all(_ADOPTED.fullmatch(str(name)) for name in named):
        del fields["auto_map"]
    if "hidden_activation" in raw and kind in ("gemma", "gemma2", "gemma3_text"):
        fields["hidden_act"] = raw["hidden_activation"]
    if kind == "smollm3" and "no_rope_layers" not in fields:
        fields["no_rope_layers"] = [
            int(not last) for last in _pattern(raw, "no_rope_layer_interval", 4)
        ]
    if kind == "gemma3_text" and "layer_types" not in fields:
        fields["layer_types"] = [
            "full_attention" if last else "sliding_attention"
            for last in _pattern(raw, "sliding_window_pattern", 6)
        ]
    elif kind == "mistral" and "sliding_window" in settings:
        left_out = {**left_out, "sliding_window": settings["sliding_window"]}
    if "rope_parameters" in keys_read:
        fields["rope_parameters"] = {**_ROPE.get(str(kind), {}), **_rope(raw)}
    return read_shape({**left_out, **fields, "model_type": kind})


def _pattern(raw: Mapping[str, object], key: str, usual: int) -> list[bool]:
    """Return for each layer whether it is the last of a group; `key` has the group's size. Raises
    InvalidRunFile.
    """
    interval, count = raw.get(key, usual), raw.get("num_hidden_layers", 0)
    if not (type(interval) is type(count) is int and interval > 0 and 0 <= count <= 512):
        raise InvalidRunFile(f"{SETTINGS}: {key} must be a whole number, and num_hidden_layers too")
    return [(layer + 1) % interval == 0 for layer in range(count)]


def read_known(kind: str) -> tuple[str, ...]:
    """Return the names of the settings that an architecture reads; () for an unknown
    architecture.
    """
    shape_class = architectures.KINDS.get(kind)
    return () if shape_class is None else tuple(shape_class.__struct_fields__)


def _rope(raw: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of rotary positions, as old or new releases of transformers write them.
    Raises InvalidRunFile.
    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise InvalidRunFile(f"{SETTINGS}: rope_parameters must be a table")
    if isinstance(rope.get("full_attention"), Mapping):  # Gemma 3 has a table for each attention
        rope = rope["full_attention"]
    fields = {key: value for key, value in rope.items() if value is not None and key != "type"}
    for old, new in (("rotary_pct", _PART), (_PART, _PART), ("rotary_emb_base", "rope_theta")):
        if old in raw:
            fields.setdefault(new, raw[old])
    if "type" in rope:
        fields.setdefault("rope_type", rope["type"])
    if "rope_theta" in raw:
        fields.setdefault("rope_theta", raw["rope_theta"])
    return fields


def _json(folder: Path, name: str, limit: int) -> dict[str, object]:
    path = folder / name
    if not path.is_file():
        raise InvalidRunFile(
            f"[model] from: there is no {path}; name a folder with {SETTINGS} and weights in"
            " safetensors, as save_pretrained writes it"
        )
    if path.stat().st_size > limit:
        raise InvalidRunFile(f"{path} is larger than {limit >> 20} MiB, so it is not read")
    return json_object(path)


def _shards(folder: Path) -> list[str]:
    """Return the names of the files of weights. Raises InvalidRunFile."""
    if not (folder / INDEX).is_file():
        if (folder / "model.safetensors").is_file():
            return ["model.safetensors"]
        if (folder / "pytorch_model.bin").is_file():
            raise InvalidRunFile(
                f"{folder} holds its weights as a pickle (pytorch_model.bin), which can run code"
                " and is never read: save it again with safe_serialization"
            )
        raise InvalidRunFile(f"{folder} has no model.safetensors: {_WHOLE}")
    names = indexed(folder)
    for name in names:
        if not (folder / name).is_file():
            raise InvalidRunFile(f"{INDEX} names {name}, which is not in {folder}: {_WHOLE}")
    return names


def indexed(folder: Path) -> list[str]:
    """Return the files that an index lists. Raises InvalidRunFile, also for a name with a path."""
    listed = _json(folder, INDEX, INDEX_MAX).get("weight_map")
    names = sorted(map(str, set(listed.values()))) if isinstance(listed, dict) else []
    for name in names:
        if not SHARD.fullmatch(name):
            raise InvalidRunFile(
                f"{INDEX} names the file {escaped(name, 120)!r}: only plain names of safetensors"
                " files beside it are read"
            )
    if not 1 <= len(names) <= FILES_MAX:
        raise InvalidRunFile(f"{INDEX} names {len(names)} files; 1 to {FILES_MAX} are read")
    return names


def _entries(folder: Path, name: str) -> dict[str, tuple[int, ...]]:
    """Return names and shapes in one file, read from its header alone. Raises InvalidRunFile."""
    path = folder / name
    try:
        with path.open("rb") as file:
            length = header_length(
                file.read(LENGTH_BYTES), path.stat().st_size, 16 * HEADER_BYTES_MAX
            )
            header = parse_header(file.read(length))
        check_cover(header, path.stat().st_size)
    except VolunteerError as error:
        raise InvalidRunFile(f"{path}: {error.message}") from error
    for tensor, entry in header.entries.items():
        if entry.dtype not in _FLOATS and not _DERIVED.fullmatch(tensor):
            raise InvalidRunFile(
                f"{path}: {escaped(tensor, 120)} is {escaped(entry.dtype, 20)}; weights are read"
                f" as {', '.join(_FLOATS)}, so take a model that is not quantised"
            )
    return {tensor: entry.shape for tensor, entry in header.entries.items()}


def hashed(path: Path) -> ChunkRef:
    """Return size and hash of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return ChunkRef(sha256=digest.hexdigest(), size=path.stat().st_size, items=1)
