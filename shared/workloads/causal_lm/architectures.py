"""Supported architectures of the library transformers: their checked settings, and the tensors of
each, without importing the library.

A coordinator works with names and shapes alone, so they are listed here; a test compares them with
the library's own models. Settings and tensors have the library's names, so that it can load a
version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from shared.errors import InvalidRunFile
from shared.settings import read_table
from shared.tensors.spec import Schema, TensorSpec

PARAMETERS_MAX = 200_000_000_000
TABLE = "model.config"

_GEMMAS = ("gemma", "gemma2", "gemma3_text")
_SANDWICHED = ("gemma2", "gemma3_text")  # norms before and after each part of a block
# Settings that only some architectures have.
OWN: Mapping[str, tuple[str, ...]] = {
    "attention_bias": ("llama", "qwen3", "granite", "smollm3", "olmo2", "gpt_neox", *_GEMMAS),
    "mlp_bias": ("llama", "granite", "smollm3"),
    "sliding_window": ("mistral", "phi3", *_SANDWICHED),
    **dict.fromkeys(
        ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"),
        ("granite",),
    ),
    **dict.fromkeys(
        ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"), _SANDWICHED
    ),
    "layer_types": _SANDWICHED,
    "rope_local_base_freq": ("gemma3_text",),
    "no_rope_layers": ("smollm3",),
    "original_max_position_embeddings": ("phi3",),
}
# Settings for which None differs from the library's default.
_UNSET = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
_SHARED_WIDTH = ("qwen2", "granite", "smollm3", "olmo2", "phi3")
_NORMS: Mapping[str, tuple[str, ...]] = {
    "olmo2": ("post_attention", "post_feedforward"),
    **dict.fromkeys(
        _SANDWICHED, ("input", "post_attention", "pre_feedforward", "post_feedforward")
    ),
}
_LlamaKind = Literal[
    "llama", "mistral", "qwen2", "qwen3", "granite", "smollm3", "olmo2", "phi3", "gemma", "gemma2",
    "gemma3_text",
]  # fmt: skip
Shapes = Iterator[tuple[str, tuple[int, ...]]]


Words: TypeAlias = Annotated[int, Meta(ge=2, le=1 << 20)]
Width: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 16)]
InnerWidth: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 18)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=512)]
Heads: TypeAlias = Annotated[int, Meta(ge=1, le=1024)]
HeadWidth: TypeAlias = Annotated[int, Meta(ge=2, le=1024)]
Positions: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 24)]
Small: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Factor: TypeAlias = Annotated[float, Meta(gt=0, le=1e9)]
Factors: TypeAlias = Annotated[tuple[Factor, ...], Meta(max_length=512)]
Layers: TypeAlias = Annotated[tuple[int, ...], Meta(max_length=512)]
Attentions: TypeAlias = tuple[Literal["full_attention", "sliding_attention"], ...]


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary positions: their base, and their scaling beyond the trained length."""

    rope_theta: float = 10_000.0
    rope_type: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    partial_rotary_factor: float | None = None
    short_factor: Factors | None = None
    long_factor: Factors | None = None
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
            "longrope": ("short_factor", "long_factor"),
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
        if self.rope_theta <= 1:
            raise InvalidRunFile(f"[{TABLE}] rope_parameters: rope_theta must lie above 1")

    def check_head(self, width: int) -> None:
        """Raise InvalidRunFile for positions that cannot rotate a head of this width."""
        pairs = -(-int(width * (self.partial_rotary_factor or 1.0)) // 2)
        if 2 * pairs > width:
            raise InvalidRunFile(
                f"[{TABLE}] rope_parameters rotate {pairs} pairs of numbers, and a head has {width}"
                " numbers: lower partial_rotary_factor, or make heads of an even width"
            )
        for key in ("short_factor", "long_factor"):
            factors = getattr(self, key)
            if factors is not None and len(factors) != pairs:
                raise InvalidRunFile(
                    f"[{TABLE}] rope_parameters: {key} has {len(factors)} factors for {pairs} pairs"
                    " of numbers that rotate"
                )


class LlamaShape(msgspec.Struct, frozen=True, kw_only=True):
    """Llama and its relatives: RMS norms, rotary positions, gated MLP, grouped heads."""

    model_type: _LlamaKind
    vocab_size: Words
    hidden_size: Width
    intermediate_size: InnerWidth
    num_hidden_layers: Count
    num_attention_heads: Heads
    num_key_value_heads: Heads
    head_dim: HeadWidth
    max_position_embeddings: Positions = 2048
    hidden_act: Literal["silu", "gelu", "relu", "gelu_pytorch_tanh"] = "silu"
    rms_norm_eps: Small = 1e-6
    rope_parameters: Rope = Rope()
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Positions | None = None
    tie_word_embeddings: bool = False
    embedding_multiplier: Factor | None = None
    logits_scaling: Factor | None = None
    residual_multiplier: Factor | None = None
    attention_multiplier: Factor | None = None
    query_pre_attn_scalar: Width | None = None
    attn_logit_softcapping: Factor | None = None
    final_logit_softcapping: Factor | None = None
    layer_types: Attentions | None = None
    rope_local_base_freq: Factor | None = None
    no_rope_layers: Layers | None = None
    original_max_position_embeddings: Positions | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise InvalidRunFile(
                f"[{TABLE}] num_attention_heads {self.num_attention_heads} must be a multiple of"
                f" num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise InvalidRunFile(f"[{TABLE}] head_dim {self.head_dim} must be even")
        for key, kinds in OWN.items():
            if getattr(self, key) and self.model_type not in kinds:
                raise InvalidRunFile(f"[{TABLE}] {self.model_type} has no {key}")
        for key in ("layer_types", "no_rope_layers"):
            if (items := getattr(self, key)) and len(items) != self.num_hidden_layers:
                raise InvalidRunFile(
                    f"[{TABLE}] {key} has {len(items)} items for {self.num_hidden_layers} layers"
                )
        self._check_positions()
        if self.head_dim * self.num_attention_heads != self.hidden_size and (
            self.model_type in _SHARED_WIDTH
        ):
            raise InvalidRunFile(
                f"[{TABLE}] {self.model_type} needs hidden_size = num_attention_heads x head_dim"
            )

    def _check_positions(self) -> None:
        """Raise InvalidRunFile for positions or windows that the library refuses."""
        rope, kind = self.rope_parameters, self.model_type
        if rope.partial_rotary_factor and kind != "phi3":
            raise InvalidRunFile(f"[{TABLE}] {kind} has no partial_rotary_factor")
        if kind == "phi3" and rope.rope_type not in ("default", "longrope"):
            raise InvalidRunFile(f'[{TABLE}] phi3 has no rope_type "{rope.rope_type}"')
        rope.check_head(self.head_dim)
        slides = kind in _SANDWICHED and {*(self.layer_types or ())} != {"full_attention"}
        if slides and self.sliding_window is None:
            raise InvalidRunFile(
                f"[{TABLE}] {kind} needs sliding_window, for its layers with sliding_attention"
            )

    @property
    def positions(self) -> int:
        """Return the most tokens of a window."""
        return self.max_position_embeddings

    @property
    def layers(self) -> int:
        return self.num_hidden_layers

    @property
    def attention_width(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Return how many numbers the keys of a token have in a layer; its values have as many."""
        return self.num_key_value_heads * self.head_dim

    @property
    def norms_begin_at(self) -> float:
        """Return the neutral weight of a norm; 0 for Gemma, which adds 1 to the weight."""
        return 0.0 if self.model_type in _GEMMAS else 1.0

    def shapes(self) -> Shapes:
        C, M, D = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_attention_heads * D, self.num_key_value_heads * D
        attended = {"q_proj": (queries, C), "k_proj": (keys, C), "v_proj": (keys, C)}
        attended["o_proj"] = (C, queries)
        fed = {"gate_proj": (M, C), "up_proj": (M, C), "down_proj": (C, M)}
        if self.model_type == "phi3":
            attended = {"o_proj": (C, queries), "qkv_proj": (queries + 2 * keys, C)}
            fed = {"gate_up_proj": (2 * M, C), "down_proj": (C, M)}
        normed = {"olmo2": (queries, keys), "qwen3": (D, D), "gemma3_text": (D, D)}
        yield "model.embed_tokens.weight", (self.vocab_size, C)
        for index in range(self.num_hidden_layers):
            block = f"model.layers.{index}"
            for name, shape in attended.items():
                biased = self.model_type == "qwen2" and name != "o_proj"
                biased = biased or self.attention_bias
                yield from _linear(f"{block}.self_attn.{name}", shape, bias=biased)
            for name, width in zip("qk", normed.get(self.model_type, ()), strict=False):
                yield f"{block}.self_attn.{name}_norm.weight", (width,)
            for name, shape in fed.items():
                yield from _linear(f"{block}.mlp.{name}", shape, bias=self.mlp_bias)
            for name in _NORMS.get(self.model_type, ("input", "post_attention")):
                yield f"{block}.{name}_layernorm.weight", (C,)
        yield "model.norm.weight", (C,)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, C)

    def arguments(self) -> dict[str, object]:
        """Return the library's own settings."""
        arguments = msgspec.structs.asdict(self)
        kind = arguments.pop("model_type")
        for key, kinds in OWN.items():
            value = arguments.pop(key)
            if kind in kinds and (value or key in _UNSET):
                arguments[key] = list(value) if isinstance(value, tuple) else value
        arguments["rope_parameters"] = _rope_arguments(self.rope_parameters)
        local = arguments.pop("rope_local_base_freq", None)
        if kind == "gemma3_text":
            plain = {"rope_type": "default", "rope_theta": local or 10_000.0}
            nested = {"sliding_attention": plain, "full_attention": arguments["rope_parameters"]}
            arguments["rope_parameters"] = nested
        if kind in _SANDWICHED:
            arguments["hidden_activation"] = arguments.pop("hidden_act")
        if kind in ("qwen2", "qwen3", "smollm3"):
            arguments |= {"use_sliding_window": False, "sliding_window": None}
        if kind in _SHARED_WIDTH and kind != "qwen2":
            del arguments["head_dim"]
        return arguments | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))


class Gpt2Shape(msgspec.Struct, frozen=True, kw_only=True):
    """GPT-2: layer norms, learned positions, one matrix for queries, keys and values."""

    model_type: Literal["gpt2"]
    vocab_size: Words
    n_positions: Positions = 1024
    n_embd: Width = 768
    n_layer: Count = 12
    n_head: Heads = 12
    n_inner: InnerWidth | None = None
    activation_function: Literal["gelu_new", "gelu", "relu"] = "gelu_new"
    layer_norm_epsilon: Small = 1e-5
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise InvalidRunFile(
                f"[{TABLE}] n_embd {self.n_embd} must be a multiple of n_head {self.n_head}"
            )

    @property
    def positions(self) -> int:
        """Return the most tokens of a window."""
        return self.n_positions

    norms_begin_at = 1.0

    @property
    def layers(self) -> int:
        return self.n_layer

    @property
    def attention_width(self) -> int:
        return self.n_embd

    key_width = attention_width

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

    def arguments(self) -> dict[str, object]:
        """Return the library's own settings, without dropout, since tasks must be repeatable."""
        arguments = msgspec.structs.asdict(self)
        del arguments["model_type"]
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return arguments | none | {"bos_token_id": None, "eos_token_id": None}


class NeoxShape(msgspec.Struct, frozen=True, kw_only=True):
    """GPT-NeoX (Pythia): layer norms, rotary positions on a part of each head."""

    model_type: Literal["gpt_neox"]
    vocab_size: Words
    hidden_size: Width
    intermediate_size: InnerWidth
    num_hidden_layers: Count
    num_attention_heads: Heads
    num_key_value_heads: int = 0  # 0 = as many as heads
    head_dim: int = 0
    max_position_embeddings: Positions = 2048
    hidden_act: Literal["gelu", "gelu_new", "relu"] = "gelu"
    layer_norm_eps: Small = 1e-5
    use_parallel_residual: bool = True
    attention_bias: bool = True
    rope_parameters: Rope = Rope(partial_rotary_factor=0.25)
    tie_word_embeddings: bool = False

    norms_begin_at = 1.0

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise InvalidRunFile(
                f"[{TABLE}] hidden_size {self.hidden_size} must be a multiple of"
                f" num_attention_heads {self.num_attention_heads}"
            )
        self.rope_parameters.check_head(self.hidden_size // self.num_attention_heads)

    @property
    def positions(self) -> int:
        """Return the most tokens of a window."""
        return self.max_position_embeddings

    @property
    def layers(self) -> int:
        return self.num_hidden_layers

    @property
    def attention_width(self) -> int:
        return self.hidden_size

    key_width = attention_width

    def shapes(self) -> Shapes:
        C, M = self.hidden_size, self.intermediate_size
        yield "gpt_neox.embed_in.weight", (self.vocab_size, C)
        for index in range(self.num_hidden_layers):
            block = f"gpt_neox.layers.{index}"
            yield from _norm(f"{block}.input_layernorm", C)
            yield from _norm(f"{block}.post_attention_layernorm", C)
            for name, shape in {"query_key_value": (3 * C, C), "dense": (C, C)}.items():
                yield from _linear(f"{block}.attention.{name}", shape, bias=self.attention_bias)
            yield from _linear(f"{block}.mlp.dense_h_to_4h", (M, C), bias=True)
            yield from _linear(f"{block}.mlp.dense_4h_to_h", (C, M), bias=True)
        yield from _norm("gpt_neox.final_layer_norm", C)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, C)

    def arguments(self) -> dict[str, object]:
        """Return the library's own settings."""
        arguments = msgspec.structs.asdict(self)
        for key in ("model_type", "num_key_value_heads", "head_dim"):
            del arguments[key]
        arguments["rope_parameters"] = _rope_arguments(self.rope_parameters)
        return arguments | dict.fromkeys(("bos_token_id", "eos_token_id"))


Shape: TypeAlias = LlamaShape | NeoxShape | Gpt2Shape
KINDS: Mapping[str, type[LlamaShape] | type[NeoxShape] | type[Gpt2Shape]] = {
    **dict.fromkeys(get_args(_LlamaKind), LlamaShape),
    "gpt_neox": NeoxShape,
    "gpt2": Gpt2Shape,
}
CLASSES = {  # transformers' classes of settings and model
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "gemma": ("GemmaConfig", "GemmaForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
}


def read_shape(raw: Mapping[str, object]) -> Shape:
    """Check a model's settings. Raises InvalidRunFile, also for an unknown architecture or a model
    that is too large.
    """
    kind = raw.get("model_type")
    experts = next((key for key in ("num_experts", "num_local_experts") if raw.get(key)), None)
    if experts and kind not in KINDS:
        raise InvalidRunFile(
            f"[{TABLE}] {str(kind)[:40]!r} is a mixture of experts ({experts}), and none can be"
            " trained here: take a dense model"
        )
    if not isinstance(kind, str) or kind not in KINDS:
        raise InvalidRunFile(
            f"[{TABLE}] model_type {str(kind)[:40]!r} is not known here; {', '.join(KINDS)} are"
        )
    if raw.get("auto_map") or raw.get("trust_remote_code"):
        raise InvalidRunFile(
            f"[{TABLE}] this model asks for code of its own (auto_map): no code ever comes with a"
            " model, and one that needs it cannot be trained here"
        )
    shape: Shape = read_table(_filled(dict(raw)), KINDS[kind], TABLE)
    parameters = count(shape)
    if parameters > PARAMETERS_MAX:
        raise InvalidRunFile(
            f"[{TABLE}] a model of {parameters / 1e9:,.0f} billion parameters is more than the"
            f" {PARAMETERS_MAX / 1e9:,.0f} billion that a run may have"
        )
    return shape


def schema(shape: Shape) -> Schema:
    """Return every tensor of a whole model, in the order of the library's parameters."""
    return tuple(TensorSpec(name, size) for name, size in shape.shapes())


def count(shape: Shape) -> int:
    """Return the number of parameters of a whole model."""
    total = 0
    for _, size in shape.shapes():
        total += size[0] * (size[1] if len(size) == 2 else 1)
    return total


def written(shape: Shape) -> dict[str, object]:
    """Return the settings in stored form, with every default filled in."""
    fields = msgspec.structs.asdict(shape)
    if not isinstance(shape, Gpt2Shape):
        fields["rope_parameters"] = msgspec.structs.asdict(shape.rope_parameters)
    fields = {key: value for key, value in fields.items() if value is not None}
    return {
        key: list(value_written) if isinstance(value_written, tuple) else value_written
        for key, value_written in fields.items()
    }


def _rope_arguments(rope: Rope) -> dict[str, object]:
    arguments = msgspec.structs.asdict(rope)
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in arguments.items()
        if value is not None
    }


def _filled(raw: dict[str, object]) -> dict[str, object]:
    """Return the settings; missing settings are derived from others as the library derives them.
    Raises InvalidRunFile.
    """
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
    """Yield a matrix stored as inputs x outputs, as in GPT-2, and its bias."""
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[1:]


def _norm(name: str, width: int) -> Shapes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)
