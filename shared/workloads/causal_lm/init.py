"""Weights that a seed fixes: of a model from nothing, and of adapters that change nothing yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shared.workloads.causal_lm import architectures
from shared.workloads.causal_lm.architectures import Shape
from shared.workloads.causal_lm.config import HEAD, CausalConfig, schema
from shared.workloads.training.seeded_random import normal

if TYPE_CHECKING:
    import torch

_STD = 0.02
_RESIDUAL = ("o_proj.weight", "down_proj.weight", "c_proj.weight")  # scaled down with depth
BASE_SEED = 0  # of a frozen model that no file brings


def initial(config: CausalConfig, seed: int) -> dict[str, torch.Tensor]:
    """Version 0. Adapters: A normal with deviation 1 / sqrt(3 inputs), as peft draws it, B zero.
    A head beside a model that no file brings is as random as the model.
    """
    import torch

    if config.head:
        return {HEAD: from_nothing(config.shape, seed)[HEAD]}
    if config.lora is None:
        return from_nothing(config.shape, seed)
    found: dict[str, torch.Tensor] = {}
    for spec in schema(config):
        value = np.zeros(spec.shape, np.float32)
        if spec.name.endswith("lora_A.weight"):
            value = normal(spec.name, seed, spec.shape) * np.float32((3 * spec.shape[1]) ** -0.5)
        found[spec.name] = torch.from_numpy(value)
    return found


def from_nothing(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """Normal with deviation 0.02, on residual branches 0.02 / sqrt(2 layers); norms one, biases
    zero. Each tensor has a stream of its own from the seed and its name.
    """
    import torch

    found: dict[str, torch.Tensor] = {}
    for spec in architectures.schema(shape):
        if spec.name.endswith(".bias"):
            value = np.zeros(spec.shape, np.float32)
        elif len(spec.shape) == 1:
            value = np.ones(spec.shape, np.float32)
        else:
            std = _STD / (2 * shape.layers) ** 0.5 if spec.name.endswith(_RESIDUAL) else _STD
            value = normal(spec.name, seed, spec.shape) * np.float32(std)
        found[spec.name] = torch.from_numpy(value)
    return found
