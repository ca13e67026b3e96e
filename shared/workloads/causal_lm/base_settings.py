"""Settings of the base model that training ignores and an export restores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.decoding import convert
from shared.errors import InvalidRunFile
from shared.workloads.data.chat_template import settings_of

GENERATION, TOKENS = "generation_config.json", "tokenizer_config.json"
_Token = Annotated[str, Meta(max_length=100)]
_Id = Annotated[int, Meta(ge=0, lt=1 << 24)]
_Share = Annotated[float, Meta(ge=0, le=1)]
Dtype = Literal["float32", "bfloat16", "float16"]


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling settings of generation_config.json."""

    eos_token_id: _Id | Annotated[tuple[_Id, ...], Meta(max_length=32)] | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: _Id | None = None
    top_p: _Share | None = None
    min_p: _Share | None = None
    typical_p: _Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the tokens that end an answer."""
        tokens = self.eos_token_id
        return tokens if isinstance(tokens, tuple) else () if tokens is None else (tokens,)


class BaseSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Type of the weights, special tokens, and sampling."""

    dtype: Dtype = "float32"
    bos_token: _Token = ""
    eos_token: _Token = ""
    pad_token: _Token = ""
    generation: GenerationSettings = GenerationSettings()


def read_base_settings(folder: Path, settings: Mapping[str, object]) -> BaseSettings:
    """Return the settings in a model's folder; `settings` are from its config.json.

    Raises InvalidRunFile for a value out of bounds, or a file that is not a JSON object.
    """
    tokens, generation = settings_of(folder / TOKENS), settings_of(folder / GENERATION)
    generation.setdefault("eos_token_id", settings.get("eos_token_id"))
    dtype = settings.get("dtype") or settings.get("torch_dtype")
    fields: dict[str, object] = {
        "dtype": dtype if dtype in ("bfloat16", "float16") else "float32",
        "generation": _known(generation, GenerationSettings),
    }
    for name in ("bos_token", "eos_token", "pad_token"):
        token = tokens.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token:
            fields[name] = token
    try:
        return convert(fields, BaseSettings)
    except msgspec.ValidationError as error:
        raise InvalidRunFile(f"{folder}: {TOKENS} or {GENERATION}: {error}") from error


def _known(table: Mapping[str, object], kind: type[msgspec.Struct]) -> dict[str, object]:
    return {key: table[key] for key in kind.__struct_fields__ if table.get(key) is not None}
