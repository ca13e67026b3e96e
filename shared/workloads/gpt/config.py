"""Shape of a GPT: its config, the schema of its weights, its cost.

This module does not import torch, so a command line may use it.

Names of tensors never change (old checkpoints stay readable): tok_emb, pos_emb, blocks.{i}, ln_f,
head.

Two architectures: `gpt2` (Radford et al. 2019) with learned positions, LayerNorm and GELU; `llama`
(Touvron et al. 2023) with rotary positions (Su et al. 2021), RMSNorm (Zhang and Sennrich 2019),
SwiGLU (Shazeer 2020) and optionally several heads for one key (Ainslie et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from msgspec import Meta

from shared.errors import InvalidRunFile
from shared.settings import Table
from shared.tensors.spec import Schema, TensorSpec, streamed_nbytes
from shared.workloads.base import DatasetManifest
from shared.workloads.data.windows import check_lengths

# Default sizes for datasets with fewer tokens than this: layers, heads, width.
_SIZES = ((3_000_000, (4, 4, 128)), (30_000_000, (6, 6, 192)))
_SIZED = ("n_layer", "n_head", "n_embd")
_STEP = 32  # the hidden width of a gated MLP is a multiple of this


class GptConfig(Table, frozen=True, kw_only=True):
    """Table `[model]`. The default has about 11 million parameters plus the vocab's rows,
    fewer for a small dataset (`config_for`).
    """

    vocab_size: Annotated[int, Meta(ge=2, le=1 << 20)]
    block_size: Annotated[int, Meta(ge=1, le=1 << 16)] = 256  # tokens of context
    n_layer: Annotated[int, Meta(ge=1, le=512)] = 6
    n_head: Annotated[int, Meta(ge=1, le=512)] = 6
    n_embd: Annotated[int, Meta(ge=1, le=1 << 15)] = 384
    # dropout of embeddings and residual branches, not of attention weights, so that fused kernels
    # stay usable
    dropout: float = 0.1
    tie_head: bool = True  # the head is the token embedding
    bias: bool = False
    architecture: Literal["gpt2", "llama"] = "gpt2"
    n_kv_head: int | None = None  # heads of keys and values of a llama; None = as many as n_head
    # Tasks begin with the merged momentum of the last ones, which doubles a version's bytes; `run
    # create` sets it where the model is small and the merge that of `diloco`.
    shared_momentum: bool = False

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise InvalidRunFile(
                f"[model] n_embd {self.n_embd} must be a multiple of n_head {self.n_head}"
            )
        if not 0 <= self.dropout < 1:
            raise InvalidRunFile(f"[model] dropout {self.dropout} must be at least 0 and below 1")
        if self.architecture == "llama":
            self._check_llama()
        elif self.n_kv_head is not None:
            raise InvalidRunFile('[model] n_kv_head is for architecture = "llama": leave it out')

    def _check_llama(self) -> None:
        if self.bias:
            raise InvalidRunFile(
                '[model] bias = true is for architecture = "gpt2": a llama has no biases'
            )
        if self.head_width % 2:
            raise InvalidRunFile(
                f"[model] n_embd / n_head is {self.head_width}, but rotary positions turn pairs:"
                " it must be even"
            )
        if self.key_heads < 1 or self.n_head % self.key_heads:
            raise InvalidRunFile(
                f"[model] n_head {self.n_head} must be a multiple of n_kv_head {self.key_heads}"
            )

    @property
    def head_width(self) -> int:
        return self.n_embd // self.n_head

    @property
    def key_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def mlp_width(self) -> int:
        """Return the MLP's width: four times the model's, or two thirds of that for a gated MLP,
        which has three matrices.
        """
        if self.architecture == "gpt2":
            return 4 * self.n_embd
        return -(-8 * self.n_embd // (3 * _STEP)) * _STEP


def config_for(raw: Mapping[str, object], manifest: DatasetManifest | None) -> GptConfig:
    """Return the config of a run on this dataset, with the vocab filled in and the block size
    checked against the chunks. Raises InvalidRunFile.
    """
    if manifest is None:
        return GptConfig.from_dict(raw)
    if manifest.kind != "tokens":
        raise InvalidRunFile(
            f'the dataset "{manifest.name}" holds {manifest.kind}, but gpt learns from tokens:'
            " make one with `coordinator dataset add NAME --text PATH`"
        )
    vocab = int(manifest.meta.get("vocab_size", 0))
    config = GptConfig.from_dict({"vocab_size": vocab, **_fitting(raw, manifest)} if vocab else raw)
    if config.vocab_size < vocab:
        raise InvalidRunFile(
            f"[model] vocab_size {config.vocab_size} is below the {vocab} tokens of the dataset"
            f' "{manifest.name}": leave it out'
        )
    check_lengths(manifest, config.block_size)
    return config


def _fitting(raw: Mapping[str, object], manifest: DatasetManifest) -> Mapping[str, object]:
    """Return the table, with default sizes for a small dataset unless it has sizes."""
    tokens = sum(chunk.items for chunk in manifest.chunks)
    sizes = next((size for most, size in _SIZES if tokens < most), None)
    if sizes is None or raw.keys() & {*_SIZED, "n_kv_head"}:
        return raw
    return {**dict(zip(_SIZED, sizes, strict=True)), **raw}


def schema(config: GptConfig) -> Schema:
    """Return every tensor of a version, in the order of the model's own parameters."""
    return tuple(TensorSpec(name, shape) for name, shape in _shapes(config))


def _shapes(config: GptConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    C, M = config.n_embd, config.mlp_width

    def layer(name: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", shape
        if config.bias:
            yield f"{name}.bias", shape[:1]

    yield "tok_emb.weight", (config.vocab_size, C)
    if config.architecture == "gpt2":
        yield "pos_emb.weight", (config.block_size, C)
    for index in range(config.n_layer):
        block = f"blocks.{index}"
        yield from layer(f"{block}.ln1", C)
        yield from layer(f"{block}.attn.qkv", C + 2 * config.key_heads * config.head_width, C)
        yield from layer(f"{block}.attn.proj", C, C)
        yield from layer(f"{block}.ln2", C)
        if config.architecture == "llama":
            yield from layer(f"{block}.mlp.gate", M, C)
        yield from layer(f"{block}.mlp.up", M, C)
        yield from layer(f"{block}.mlp.down", C, M)
    yield from layer("ln_f", C)
    if not config.tie_head:
        yield "head.weight", (config.vocab_size, C)


def flops_per_sample(config: GptConfig) -> float:
    """Return the FLOPs, forward and backward, of one window of `block_size` tokens: 6 N T of the
    matrices and 12 L C T^2 of attention.
    """
    T, C, L = config.block_size, config.n_embd, config.n_layer
    shapes = (shape for name, shape in _shapes(config) if name.startswith("blocks."))
    matrices = sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
    matrices += config.vocab_size * C  # the head
    return 6.0 * matrices * T + 12.0 * L * C * T * T


def streamed_bytes(config: GptConfig) -> int:
    """Return the bytes of a device for one window while the weights stay on the host: copies of one
    block's weights and of those outside blocks, their gradients, the inputs of all blocks, and the
    larger of two needs: one block's activations, recomputed, or two and a half times the logits.
    """
    T, C = config.block_size, config.n_embd
    first = [shape for name, shape in _shapes(config) if name.startswith("blocks.0.")]
    inside = sum(sum(shape) for shape in first if len(shape) == 2)
    numbers = config.n_layer * C + max(2 * inside, 5 * config.vocab_size // 2)
    return 2 * streamed_nbytes(schema(config)) + 4 * T * numbers
