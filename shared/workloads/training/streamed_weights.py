"""Weights that stay in the memory of the host and are copied to a card while they are used.

A block is recomputed in the backward pass (`gradient_checkpointing_enable`), so that its weights
are copied twice. In the forward pass each copy exists for one product; in the backward pass all
copies of the block exist together. The copy is an operation of the graph: the gradient of a copy
goes to the weight on the host.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, register_parametrization
from typing_extensions import override


class CardCopy(nn.Module):
    """Copy of a weight on `device`; `check` gets every copy."""

    def __init__(self, device: str, check: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._device = device
        self._check = check

    @override
    def forward(self, weight: Tensor) -> Tensor:
        return self._check(weight.to(self._device, copy=True))


def stream(model: nn.Module, device: str, check: Callable[[Tensor], Tensor]) -> None:
    """Copy each weight of a model to `device` at each use. Weights are the parameters and the
    buffers that belong to a checkpoint, such as frozen matrices; computed tables stay where they
    are.
    """
    copying = CardCopy(device, check)
    for path in model.state_dict(keep_vars=True):
        place, _, name = path.rpartition(".")
        register_parametrization(model.get_submodule(place), name, copying, unsafe=True)


def move(model: nn.Module, *, weights: str, tables: str) -> None:
    """Move the frozen weights of a model to the device `weights`, and the buffers that are no
    weights to the device `tables`; both are one device unless the weights are streamed. A learner
    moves the trained weights.
    """
    for frozen in model.parameters():
        if not frozen.requires_grad:
            frozen.data = frozen.data.to(weights)
    for part in model.modules():
        device = weights if isinstance(part, ParametrizationList) else tables
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
