"""Model of the library transformers with a version's weights, and adapters on its matrices.

Shapes: B windows, T tokens, V vocabulary. Trained weights are float32; autocast is the caller's.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from shared.workloads.base import Weights, fit_weights
from shared.workloads.causal_lm import architectures
from shared.workloads.causal_lm.architectures import CLASSES, Gpt2Shape, Shape
from shared.workloads.causal_lm.config import (
    BasePrecision,
    CausalConfig,
    Lora,
    adapted,
    held_in_few,
    schema,
    trained_whole,
)
from shared.workloads.causal_lm.frozen_matrix import FrozenMatrix
from shared.workloads.data.tokenizer import FIRST, LEARNT, TOKEN_BITS
from shared.workloads.training.dropout import SampleDropout, SampleKeys
from shared.workloads.training.step_loop import StepLoss

IGNORED = -100  # a target that does not count


class Adapter(nn.Module):
    """Frozen matrix plus the product of two small matrices."""

    def __init__(
        self, frozen: nn.Module, size: tuple[int, int], lora: Lora, keys: SampleKeys, place: int
    ) -> None:
        super().__init__()
        outputs, inputs = size
        self.base_layer = frozen
        self.lora_A = nn.Linear(inputs, lora.rank, bias=False)
        self.lora_B = nn.Linear(lora.rank, outputs, bias=False)
        self.drop = SampleDropout(lora.dropout, keys, place)
        self._scale = lora.scale

    @override
    def forward(self, x: Tensor) -> Tensor:
        low = self.lora_A(self.drop(x)) * self._scale  # (B, T, rank)
        out: Tensor = self.base_layer(x) + self.lora_B(low)
        return out


class Past(NamedTuple):
    """Mask (B, 1, T, K) of the keys that each token may see, and each token's own column (B, T)."""

    visible: Tensor
    columns: Tensor


class CausalModel:
    """Language model that wraps `module`, the model object of the library transformers."""

    def __init__(self, module: Any, samples: SampleKeys) -> None:
        self.module = module
        self.samples = samples  # keys of the samples, for dropout

    def logits(self, tokens: Tensor, past: Past | None = None, **more: object) -> Tensor:
        """Return the scores (B, T, V) of tokens (B, T)."""
        if past is not None:
            more["attention_mask"] = self._masks(past)
        logits: Tensor = self.module(input_ids=tokens, use_cache=False, **more).logits
        return logits

    def _masks(self, past: Past) -> Tensor | dict[str, Tensor]:
        """Return one mask for all layers, or a mask for each kind of layer, sliding and full."""
        settings = self.module.config
        window = getattr(settings, "sliding_window", None)
        if window is None:
            return self._mask(past.visible)
        keys = torch.arange(past.visible.shape[-1], device=past.visible.device)
        near = past.columns[:, None, :, None] - keys < window
        sliding = self._mask(past.visible & near)
        if not hasattr(settings, "layer_types"):
            return sliding
        return {"full_attention": self._mask(past.visible), "sliding_attention": sliding}

    def _mask(self, visible: Tensor) -> Tensor:
        if self.module.config._attn_implementation != "eager":
            return visible
        least = torch.finfo(torch.float32).min  # "eager" adds the mask
        return torch.zeros(visible.shape, device=visible.device).masked_fill(~visible, least)

    def loss(self, windows: Tensor, learnt_share: float | None = None) -> StepLoss:
        """Return the mean loss in nats a token of windows (B, T + 1).

        If `learnt_share` is given, the tokens are marked, and the sum of losses is divided by the
        expected number of answer tokens (that share of all targets), so that any division of a
        batch gives the same mean. The returned weight is the actual number over the expected one:
        the loss divided by it is the mean over the answer tokens of these windows.
        """
        losses = self.losses(windows, marked=learnt_share is not None)
        if learnt_share is None:
            return StepLoss(losses.mean())
        usual = losses.numel() * learnt_share
        learnt_tokens = ((windows[:, 1:] & LEARNT) != 0).sum()
        return StepLoss(losses.sum() / usual, weight=learnt_tokens / usual)

    def losses(self, windows: Tensor, *, marked: bool) -> Tensor:
        """Return the loss (B, T) of each target of windows (B, T + 1), in nats. If tokens are
        marked, only targets in answers have a loss, and dialogues do not see each other.
        """
        inputs, targets = windows[:, :-1], windows[:, 1:]
        more: dict[str, Any] = {}
        if marked:
            past, places = _apart((inputs & FIRST) != 0)
            more = {"past": past, "position_ids": places}
            inputs = inputs & TOKEN_BITS
            unlearnt = (targets & LEARNT) == 0
            targets = (targets & TOKEN_BITS).masked_fill(unlearnt, IGNORED)
        logits = self.logits(inputs, **more).flatten(0, 1).float()
        token_losses = F.cross_entropy(
            logits, targets.flatten(), ignore_index=IGNORED, reduction="none"
        )
        return token_losses.view_as(targets)


def _apart(first: Tensor) -> tuple[Past, Tensor]:
    """Return, for windows whose dialogues begin at `first` (B, T), the past that each token may
    see, and its place in its dialogue (B, T).
    """
    T = first.shape[1]
    numbers = first.cumsum(1)
    at = torch.arange(T, device=first.device)
    begins = torch.where(first, at, 0).cummax(1).values
    same = numbers[:, :, None] == numbers[:, None, :]
    visible = (same & (at[:, None] >= at))[:, None]
    return Past(visible, at.expand(first.shape)), at - begins


def library_config(shape: Shape) -> Any:
    """Return the library's settings of a model."""
    library_settings = _library(CLASSES[shape.model_type][0])(**shape.arguments())
    # Gemma 2 caps the scores of attention, which only "eager" supports.
    library_settings._attn_implementation = "eager" if shape.model_type == "gemma2" else "sdpa"
    return library_settings


def build(
    config: CausalConfig,
    weights: Weights,
    frozen: Weights | None,
    device: str,
    base_precision: BasePrecision = "float32",
) -> CausalModel:
    """Build a model on `device` with its own copy of `weights`. Memory of the `frozen` weights is
    shared if possible; the blocks' frozen matrices are stored in `base_precision`.

    Raises InvalidFrame if the weights belong to another model, NotFound if a library is missing.
    """
    tensors = fit_weights(schema(config), weights)
    tensors = {name: value.to(device, torch.float32, copy=True) for name, value in tensors.items()}
    module = _empty(config.shape)
    whole = tensors
    if config.frozen:
        needed = fit_weights(architectures.schema(config.shape), frozen or {})
        if base_precision != "float32":
            _hold(module, config, needed, device, base_precision)
        there = {name for name, _ in module.named_parameters()}
        whole = {
            name: value.to(device, torch.float32)
            for name, value in needed.items()
            if name in there or base_precision == "float32"
        }
        whole |= {name: tensors[name] for name in trained_whole(config)}
    module.load_state_dict(whole, strict=False, assign=True)  # a tied head is in no schema
    if config.shape.tie_word_embeddings:
        module.get_output_embeddings().weight = module.get_input_embeddings().weight
    samples = SampleKeys()
    if config.frozen:
        module.requires_grad_(False)
    for name in trained_whole(config):
        module.get_parameter(name).requires_grad_(True)
    if config.lora is not None:
        _adapt(module, config, config.lora, tensors, samples)
    module.to(device)
    return CausalModel(module, samples)


def _hold(
    module: nn.Module, config: CausalConfig, weights: Weights, device: str, precision: BasePrecision
) -> None:
    """Replace matrices by matrices of few bits, one at a time: float32 may not fit the memory."""
    # the library stores the matrices of GPT-2 transposed
    turned = isinstance(config.shape, Gpt2Shape)
    for name in held_in_few(config.shape):
        weight = weights[f"{name}.weight"].to(device, torch.float32)
        bias = weights.get(f"{name}.bias")
        bias = bias if bias is None else bias.to(device, torch.float32)
        module.set_submodule(name, FrozenMatrix(weight.T if turned else weight, bias, precision))


def _adapt(
    module: nn.Module, config: CausalConfig, lora: Lora, tensors: Weights, keys: SampleKeys
) -> None:
    for place, (name, size) in enumerate(adapted(config).items()):
        parent, _, last = name.rpartition(".")
        holder = module.get_submodule(parent)
        with torch.device("meta"):
            adapter = Adapter(getattr(holder, last), size, lora, keys, place)
        for part in ("lora_A", "lora_B"):
            getattr(adapter, part).weight = nn.Parameter(tensors[f"{name}.{part}.weight"])
        setattr(holder, last, adapter)


def _empty(shape: Shape) -> Any:
    """Return a model without memory for its weights, which are loaded later."""
    settings = library_config(shape)
    with torch.device("meta"):
        module = _library(CLASSES[shape.model_type][1])(settings)
    for name, part in list(module.named_modules()):
        if name.rpartition(".")[2] == "rotary_emb":  # tables that follow from the settings
            module.set_submodule(name, type(part)(config=settings))
        elif hasattr(part, "scalar_embed_scale"):
            part.embed_scale = torch.tensor(part.scalar_embed_scale)
    return module


def _library(name: str) -> Any:
    return getattr(importlib.import_module("transformers"), name)
