"""Architectures of the library transformers that a run may have: their settings, checked, and the
tensors of each, without importing it.

A coordinator works with names and shapes alone, so they are written out here; a test compares them
with the library's own models. Settings and names are the library's, so that a version loads there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shared.errors import InvalidRunFile
from shared.nearest import hint
from shared.settings import read_table
from shared.tensors.spec import Schema, TensorSpec

PARAMETERS_MAX = 200_000_000_000
TABLE = "model.config"

_LlamaKind = Literal["llama", "mistral", "qwen2", "qwen3"]
Shapes = Iterator[tuple[str, tuple[int, ...]]]


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary positions: their base, and their stretching beyond the trained length."""

    rope_theta: float = 10_000.0
    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None

    def __post_init__(self) -> None:
        needed = {
            "default": (),
            "linear": ("factor",),
            "yarn": ("factor",),
            "llama3": (
                "factor",
                "original_max_position_embeddings",
                "low_freq_factor",
                "high_freq_factor",
            ),
        }[self.rope_type]
        for key in self.__struct_fields__:
            value = getattr(self, key)
            if key in needed and value is None:
                raise InvalidRunFile(
                    f'[{TABLE}] rope_parameters of the type "{self.rope_type}" need {key}'
                )
            if isinstance(value, (int, float)) and not 0 < value <= 1e9:
                raise InvalidRunFile(f"[{TABLE}] rope_parameters: {key} must lie between 0 and 1e9")


class LlamaShape(msgspec.Struct, frozen=True, kw_only=True):
    """Llama and its relatives: RMS norms, rotary positions, gated MLP, grouped heads."""

    model_type: _LlamaKind
    vocab_size: Annotated[int, Meta(ge=2, le=1 << 20)]
    hidden_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    intermediate_size: Annotated[int, Meta(ge=1, le=1 << 18)]
    num_hidden_layers: Annotated[int, Meta(ge=1, le=512)]
    num_attention_heads: Annotated[int, Meta(ge=1, le=1024)]
    num_key_value_heads: Annotated[int, Meta(ge=1, le=1024)]
    head_dim: Annotated[int, Meta(ge=2, le=1024)]
    max_position_embeddings: Annotated[int, Meta(ge=1, le=1 << 24)] = 2048
    hidden_act: Literal["silu", "gelu", "relu"] = "silu"
    rms_norm_eps: Annotated[float, Meta(ge=0, le=1)] = 1e-6
    rope_parameters: Rope = Rope()
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise InvalidRunFile(
                f"[{TABLE}] num_attention_heads {self.num_attention_heads} must be a multiple of"
                f" num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise InvalidRunFile(f"[{TABLE}] head_dim {self.head_dim} must be even")
        own = {"attention_bias": ("llama", "qwen3"), "mlp_bias": ("llama",)}
        for key, kinds in own.items():
            if getattr(self, key) and self.model_type not in kinds:
                raise InvalidRunFile(f"[{TABLE}] {self.model_type} has no {key}")
        if self.sliding_window is not None and self.model_type == "llama":
            raise InvalidRunFile(f"[{TABLE}] llama has no sliding_window")
        if self.head_dim * self.num_attention_heads != self.hidden_size and (
            self.model_type == "qwen2"
        ):
            raise InvalidRunFile(
                f"[{TABLE}] qwen2 needs hidden_size = num_attention_heads x head_dim"
            )

    @property
    def positions(self) -> int:
        """Return how many tokens a window may have."""
        return min(self.max_position_embeddings, self.sliding_window or 1 << 24)

    @property
    def layers(self) -> int:
        return self.num_hidden_layers

    @property
    def attention_width(self) -> int:
        return self.num_attention_heads * self.head_dim

    def shapes(self) -> Shapes:
        C, M, D = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_attention_heads * D, self.num_key_value_heads * D
        attended = {"q_proj": (queries, C), "k_proj": (keys, C), "v_proj": (keys, C)}
        yield "model.embed_tokens.weight", (self.vocab_size, C)
        for index in range(self.num_hidden_layers):
            block = f"model.layers.{index}"
            for name, shape in attended.items():
                biased = self.attention_bias or self.model_type == "qwen2"
                yield from _linear(f"{block}.self_attn.{name}", shape, bias=biased)
            yield from _linear(f"{block}.self_attn.o_proj", (C, queries), bias=self.attention_bias)
            if self.model_type == "qwen3":
                yield f"{block}.self_attn.q_norm.weight", (D,)
                yield f"{block}.self_attn.k_norm.weight", (D,)
            for name, shape in {"gate": (M, C), "up": (M, C), "down": (C, M)}.items():
                yield from _linear(f"{block}.mlp.{name}_proj", shape, bias=self.mlp_bias)
            yield f"{block}.input_layernorm.weight", (C,)
            yield f"{block}.post_attention_layernorm.weight", (C,)
        yield "model.norm.weight", (C,)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, C)

    def arguments(self) -> dict[str, Any]:
        """The library's own settings."""
        found = msgspec.structs.asdict(self)
        rope = msgspec.structs.asdict(self.rope_parameters)
        found["rope_parameters"] = {key: rope[key] for key in rope if rope[key] is not None}
        if self.model_type == "llama":
            del found["sliding_window"]
        if self.model_type in ("qwen2", "qwen3"):
            found |= {"use_sliding_window": False, "sliding_window": None}
        for key in ("attention_bias", "mlp_bias"):
            if not found[key]:
                del found[key]
        del found["model_type"]
        return found


class Gpt2Shape(msgspec.Struct, frozen=True, kw_only=True):
    """GPT-2: layer norms, learned positions, one matrix for queries, keys and values."""

    model_type: Literal["gpt2"]
    vocab_size: Annotated[int, Meta(ge=2, le=1 << 20)]
    n_positions: Annotated[int, Meta(ge=1, le=1 << 24)] = 1024
    n_embd: Annotated[int, Meta(ge=1, le=1 << 16)] = 768
    n_layer: Annotated[int, Meta(ge=1, le=512)] = 12
    n_head: Annotated[int, Meta(ge=1, le=1024)] = 12
    n_inner: Annotated[int, Meta(ge=1, le=1 << 18)] | None = None
    activation_function: Literal["gelu_new", "gelu", "relu"] = "gelu_new"
    layer_norm_epsilon: Annotated[float, Meta(ge=0, le=1)] = 1e-5
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise InvalidRunFile(
                f"[{TABLE}] n_embd {self.n_embd} must be a multiple of n_head {self.n_head}"
            )

    @property
    def positions(self) -> int:
        """Return how many tokens a window may have."""
        return self.n_positions

    @property
    def layers(self) -> int:
        return self.n_layer

    @property
    def attention_width(self) -> int:
        return self.n_embd

    def shapes(self) -> Shapes:
        C, M = self.n_embd, self.n_inner or 4 * self.n_embd
        yield "transformer.wte.weight", (self.vocab_size, C)
        yield "transformer.wpe.weight", (self.n_positions, C)
        for index in range(self.n_layer):
            block = f"transformer.h.{index}"
            yield from _norm(f"{block}.ln_1", C)
            yield from _conv(f"{block}.attn.c_attn", (C, 3 * C))
            yield from _conv(f"{block}.attn.c_proj", (C, C))
            yield from _norm(f"{block}.ln_2", C)
            yield from _conv(f"{block}.mlp.c_fc", (C, M))
            yield from _conv(f"{block}.mlp.c_proj", (M, C))
        yield from _norm("transformer.ln_f", C)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, C)

    def arguments(self) -> dict[str, Any]:
        """The library's own settings, without dropout: tasks must be repeatable."""
        found = msgspec.structs.asdict(self)
        del found["model_type"]
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return found | none | {"bos_token_id": None, "eos_token_id": None}


Shape: TypeAlias = LlamaShape | Gpt2Shape
KINDS: Mapping[str, type[LlamaShape] | type[Gpt2Shape]] = {
    "llama": LlamaShape,
    "mistral": LlamaShape,
    "qwen2": LlamaShape,
    "qwen3": LlamaShape,
    "gpt2": Gpt2Shape,
}
CLASSES = {  # of transformers: settings and model
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
}


def read_shape(raw: Mapping[str, Any]) -> Shape:
    """Check the settings of a model. Raises InvalidRunFile, also for an architecture that is not
    among the known ones and for a model larger than any here.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise InvalidRunFile(
            f"[{TABLE}] model_type {str(kind)[:40]!r} is not known here: {hint(kind, KINDS)}"
        )
    if raw.get("auto_map") or raw.get("trust_remote_code"):
        raise InvalidRunFile(
            f"[{TABLE}] this model asks for code of its own (auto_map): no code ever comes with a"
            " model, and one that needs it cannot be trained here"
        )
    shape: Shape = read_table(_filled(dict(raw)), KINDS[kind], f"[{TABLE}]")
    parameters = count(shape)
    if parameters > PARAMETERS_MAX:
        raise InvalidRunFile(
            f"[{TABLE}] a model of {parameters / 1e9:,.0f} billion parameters is more than the"
            f" {PARAMETERS_MAX / 1e9:,.0f} billion that a run may have"
        )
    return shape


def schema(shape: Shape) -> Schema:
    """Every tensor of a whole model, in the order of the library's parameters."""
    return tuple(TensorSpec(name, size) for name, size in shape.shapes())


def count(shape: Shape) -> int:
    """Parameters of a whole model."""
    total = 0
    for _, size in shape.shapes():
        total += size[0] * (size[1] if len(size) == 2 else 1)
    return total


def written(shape: Shape) -> dict[str, Any]:
    """The settings as they are stored with a run: every default written out."""
    found = msgspec.structs.asdict(shape)
    if isinstance(shape, LlamaShape):
        found["rope_parameters"] = msgspec.structs.asdict(shape.rope_parameters)
    return found


def _filled(raw: dict[str, Any]) -> dict[str, Any]:
    """Fill in the settings that follow from others, as the library does."""
    heads, width = raw.get("num_attention_heads"), raw.get("hidden_size")
    if raw["model_type"] != "gpt2" and isinstance(heads, int):
        if raw.get("num_key_value_heads") is None:
            raw["num_key_value_heads"] = heads
        if heads < 1:
            raise InvalidRunFile(f"[{TABLE}] num_attention_heads must be at least 1")
        if raw.get("head_dim") is None and isinstance(width, int):
            if width % heads:
                raise InvalidRunFile(
                    f"[{TABLE}] hidden_size {width} must be a multiple of num_attention_heads"
                    f" {heads}, or head_dim must be given"
                )
            raw["head_dim"] = width // heads
    return raw


def _linear(name: str, shape: tuple[int, int], *, bias: bool) -> Shapes:
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]


def _conv(name: str, shape: tuple[int, int]) -> Shapes:
    """A matrix stored as inputs x outputs, as GPT-2 has them."""
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[1:]


def _norm(name: str, width: int) -> Shapes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)
