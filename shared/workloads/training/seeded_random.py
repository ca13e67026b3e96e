"""Random numbers fixed by a seed and a name: the same on every machine and for any threads."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shared.tensors.spec import Schema

if TYPE_CHECKING:
    import torch

_STD = 0.02


def normal(name: str, seed: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return standard normal float32, from a stream of its own for each name (Philox 4x64-10)."""
    return _generator(name, seed).standard_normal(shape, np.float32)


def uniform(name: str, seed: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return float32 in [0, 1), from a stream of its own for each name."""
    return _generator(name, seed).random(shape, np.float32)


def _generator(name: str, seed: int) -> np.random.Generator:
    stream = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    key = np.array([seed & ((1 << 64) - 1), stream], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def transformer(
    schema: Schema, seed: int, layers: int, residual: tuple[str, ...], norms: float = 1.0
) -> dict[str, torch.Tensor]:
    """Return initial weights of a transformer: normal with deviation 0.02, on residual branches
    0.02 / sqrt(2 layers); norms `norms`, biases zero.

    Each tensor has its own stream from the seed and its name, so that its values do not depend
    on threads or other tensors.
    """
    import torch

    tensors: dict[str, torch.Tensor] = {}
    for spec in schema:
        if spec.name.endswith(".bias"):
            value = np.zeros(spec.shape, np.float32)
        elif len(spec.shape) == 1:
            value = np.full(spec.shape, norms, np.float32)
        else:
            std = _STD / (2 * layers) ** 0.5 if spec.name.endswith(residual) else _STD
            value = normal(spec.name, seed, spec.shape) * np.float32(std)
        tensors[spec.name] = torch.from_numpy(value)
    return tensors
