"""Muon (Jordan et al. 2024): momentum whose matrices are made orthogonal, so that every direction
that a gradient has moves alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

# One odd polynomial five times brings singular values in (0, 1] to about 0.7 ... 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_TIMES = 5
_MOMENTUM = 0.95
_RMS = 0.2  # of an update at rate 1, as AdamW's is: both take the same rate (Liu et al. 2025)


def muon(
    values: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    rate: float,
    weight_decay: float,
) -> None:
    """Apply gradients to matrices, with Nesterov momentum and decoupled weight decay. Matrices of
    one shape are made orthogonal together.

    Unlike torch's own, it computes in float32 on a CPU: many have no arithmetic for bfloat16, and
    two machines then agree better about the directions of small singular values.
    """
    alike: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
    for value, grad, held in zip(values, grads, momenta, strict=True):
        held.lerp_(grad, 1.0 - _MOMENTUM)
        alike.setdefault(tuple(value.shape), []).append((value, grad.lerp(held, _MOMENTUM)))
    for shape, pairs in alike.items():
        changes = orthogonal(torch.stack([moved for _, moved in pairs]))  # (n, A, B)
        step = rate * _RMS * max(shape) ** 0.5
        for (value, _), change in zip(pairs, changes, strict=True):
            value.mul_(1.0 - rate * weight_decay)
            value.add_(change, alpha=-step)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return matrices (n, A, B) with the same singular vectors and all singular values near 1."""
    x = matrices if matrices.device.type == "cpu" else matrices.bfloat16()
    turned = x.shape[1] > x.shape[2]
    x = x.mT if turned else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(_TIMES):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * square @ square) @ x
    found: Tensor = (x.mT if turned else x).to(matrices.dtype)
    return found


def hidden(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return the matrices inside the blocks of a model, whose names have a number: embeddings and
    the head are AdamW's.
    """
    return {
        name: value
        for name, value in parameters.items()
        if value.ndim == 2 and any(part.isdigit() for part in name.split("."))
    }
