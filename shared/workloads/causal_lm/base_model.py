"""Frozen weights under adapters, and the initial weights of a trained base model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from shared.errors import InvalidRunFile
from shared.workloads.base import Data, Weights
from shared.workloads.causal_lm import architectures
from shared.workloads.causal_lm.architectures import Shape
from shared.workloads.causal_lm.config import (
    BASE,
    CausalConfig,
    folder_of,
    frozen_files,
    schema,
    trained_whole,
)
from shared.workloads.causal_lm.model_folder import own_name, placed, read_folder
from shared.workloads.training.seeded_random import normal, transformer

if TYPE_CHECKING:
    import torch


_RESIDUAL = (
    "o_proj.weight",
    "down_proj.weight",
    "c_proj.weight",
    ".dense.weight",
)  # initial weights that get smaller with the number of layers
BASE_SEED = 0  # seed of a frozen model without files


def frozen_of(config: CausalConfig, data: Data | None) -> Weights | None:
    """Return the frozen weights of a run's model from a worker's data; None if all weights are
    trained.

    Raises NotFound if a file is missing, InvalidRunFile if files are needed and `data` is None.
    """
    if not config.frozen:
        return None
    if config.files and data is None:
        raise InvalidRunFile("this run trains a part of a model, whose files are not here")
    return frozen_in(
        config, {name: data.asset(name) for name in frozen_files(config)} if data else {}
    )


def frozen_in(config: CausalConfig, files: Mapping[str, Path]) -> Weights:
    """Return the frozen weights of a run's model from its files; {} if all weights are trained."""
    if not config.frozen:
        return {}
    if not config.files:
        return from_nothing(config.shape, BASE_SEED)
    return _loaded(config, (files[f"{BASE}/{name}"] for name in config.files))


def from_folder(config: CausalConfig) -> dict[str, Tensor]:
    """Return the weights of the folder that the run was created from. Raises InvalidRunFile if its
    files changed.
    """
    folder = folder_of(config)
    if read_folder(folder)[1] != config.files:
        raise InvalidRunFile(
            f"the files in {folder} are not those that the run was created from: create it again"
        )
    tensors = _loaded(config, (folder / name for name in config.files))
    return {name: value.float() for name, value in tensors.items()}


def _loaded(config: CausalConfig, paths: Iterable[Path]) -> dict[str, Tensor]:
    """Return the tensors of all files, in the order of the schema and their stored types. Raises
    InvalidRunFile.
    """
    from safetensors import SafetensorError, safe_open

    specs = architectures.schema(config.shape)
    shapes = {spec.name: spec.shape for spec in specs}
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                there = {name: tuple(file.get_slice(name).get_shape()) for name in names}
                names_in_file = {own_name(name, shapes): name for name in there}
                for tensor_name in placed(there, specs, path.name):
                    tensors[tensor_name] = file.get_tensor(names_in_file[tensor_name])
        except SafetensorError as error:
            raise InvalidRunFile(f"{path.name} is not a file of tensors: {error}") from error
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise InvalidRunFile(f"no file of weights holds {missing[0]}")
    return {name: tensors[name] for name in shapes}


def initial(config: CausalConfig, seed: int) -> dict[str, torch.Tensor]:
    """Return version 0: weights of the folder, or random weights. Adapters have A normal with
    deviation 1 / sqrt(3 inputs), as in peft, and B zero.
    """
    import torch

    specs, base = schema(config), dict[str, torch.Tensor]()
    if config.files and (config.lora is None or trained_whole(config)):
        base = from_folder(config)
    elif config.lora is None or trained_whole(config):
        base = from_nothing(config.shape, seed if config.lora is None else BASE_SEED)
    tensors: dict[str, torch.Tensor] = {}
    for spec in specs:
        if spec.name in base:
            tensors[spec.name] = base[spec.name]
            continue
        value = np.zeros(spec.shape, np.float32)
        if spec.name.endswith("lora_A.weight"):
            value = normal(spec.name, seed, spec.shape) * np.float32((3 * spec.shape[1]) ** -0.5)
        tensors[spec.name] = torch.from_numpy(value)
    return tensors


def from_nothing(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """Return random weights of a base model."""
    specs = architectures.schema(shape)
    return transformer(specs, seed, shape.layers, _RESIDUAL, shape.norms_begin_at)
