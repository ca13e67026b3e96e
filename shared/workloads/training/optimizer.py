"""The inner optimiser of local work: AdamW or SGD from torch, or Muon with AdamW beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shared.workloads.base import TrainSettings
from shared.workloads.training.lr_schedule import learning_rate as learning_rate
from shared.workloads.training.muon import Muon, hidden

_FUSED = ("cpu", "cuda")  # measured on a CPU: 3 to 5 times faster than the other forms
_MOMENTUM, _MOMENTS = ("momentum_buffer",), ("exp_avg", "exp_avg_sq")


class InnerOptimizer:
    """One optimiser over named parameters; weight decay on matrices only (as in GPT training since
    Radford et al. 2019).

    Its state is made at once and not at the first step: what does not fit is noticed before any
    work is done.
    """

    def __init__(self, parameters: Mapping[str, Parameter], train: TrainSettings) -> None:
        self._parameters = dict(parameters)
        self._train = train
        self.steps = 0
        self._fused = next(iter(self._parameters.values())).device.type in _FUSED
        turned = hidden(self._parameters) if train.optimizer == "muon" else {}
        rest = {name: p for name, p in self._parameters.items() if name not in turned}
        kept = _MOMENTUM if train.optimizer == "sgd" else _MOMENTS
        self._keys = {name: _MOMENTUM if name in turned else kept for name in self._parameters}
        self._optimizers: list[torch.optim.Optimizer] = []
        if turned:
            self._optimizers.append(Muon(turned.values(), train.lr, train.weight_decay))
        if rest:
            self._optimizers.append(self._plain(list(rest.values())))
        own = {
            id(value): each
            for each in self._optimizers
            for group in each.param_groups
            for value in group["params"]
        }
        self._states: dict[str, dict[str, Tensor]] = {}
        for name, value in self._parameters.items():
            self._states[name] = own[id(value)].state[value]
            self._states[name].update({key: torch.zeros_like(value) for key in self._keys[name]})
        self._count(0)

    def _plain(self, values: Sequence[Parameter]) -> torch.optim.Optimizer:
        """Make torch's optimiser of parameters: matrices decay, all others do not."""
        train = self._train
        groups: list[dict[str, Any]] = [
            {"params": [p for p in values if p.ndim >= 2], "weight_decay": train.weight_decay},
            {"params": [p for p in values if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if train.optimizer == "sgd":
            return torch.optim.SGD(groups, train.lr, train.beta1, fused=self._fused)
        return torch.optim.AdamW(groups, train.lr, (train.beta1, train.beta2), fused=self._fused)

    def step(self, rate: float) -> None:
        """Clip the gradients, apply them and drop them."""
        if self._train.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._train.clip_norm)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.steps += 1

    def state(self) -> dict[str, Tensor]:
        """A copy of the state on the CPU: "exp_avg/NAME" and so on, and "steps"."""
        found = {
            f"{key}/{name}": self._states[name][key].detach().to("cpu", copy=True)
            for name, keys in self._keys.items()
            for key in keys
        }
        return found | {"steps": torch.tensor(self.steps, dtype=torch.int64)}

    def load(self, state: Mapping[str, Tensor]) -> bool:
        """Go on from a kept state.

        False, and nothing changed, when it belongs to another model or optimiser.
        """
        fits = "steps" in state and all(
            f"{key}/{name}" in state and state[f"{key}/{name}"].shape == value.shape
            for name, value in self._parameters.items()
            for key in self._keys[name]
        )
        if fits:
            for name, keys in self._keys.items():
                for key in keys:
                    self._states[name][key].copy_(state[f"{key}/{name}"])
            self._count(int(state["steps"]))
        return fits

    def move(self, device: str) -> None:
        """Take the state along after the parameters have moved."""
        for state in self._states.values():
            for key, held in state.items():
                if held.ndim or self._fused:  # AdamW that is not fused counts on the CPU
                    state[key] = held.to(device)

    def _count(self, steps: int) -> None:
        self.steps = steps
        for name, value in self._parameters.items():
            if self._keys[name] == _MOMENTS:
                device = value.device if self._fused else "cpu"
                count = torch.tensor(float(steps), dtype=torch.float32, device=device)
                self._states[name]["step"] = count
