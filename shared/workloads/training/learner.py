"""Learner: applies the gradients of a task to its parameters by an inner optimiser ("delta"), or
sums them up to their mean ("gradient").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from shared.tensors.spec import MOMENTUM
from shared.workloads.base import Job, Weights
from shared.workloads.training.device_differences import to_host
from shared.workloads.training.lr_schedule import learning_rate, rewarm_factor
from shared.workloads.training.optimizer import InnerOptimizer


def momenta(weights: Weights) -> dict[str, Tensor]:
    """Return the momenta that a version holds, by parameter."""
    return {
        name.removeprefix(MOMENTUM): value
        for name, value in weights.items()
        if name.startswith(MOMENTUM)
    }


class Learner:
    """Named parameters during one task, with an inner optimiser that is fresh in each task, or
    begins with the `momenta` of the base version and adds its own to the result.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], job: Job, momenta: Weights | None = None
    ) -> None:
        self._parameters = dict(parameters)
        self._job = job
        self._inner: InnerOptimizer | None = None
        self._sums: dict[str, Tensor] = {}  # sums of the gradient, in a "gradient" job
        self._base: dict[str, Tensor] = {}  # weights towards which FedProx pulls
        self._has_momenta = bool(momenta)
        if job.update == "delta":
            self._inner = InnerOptimizer(self._parameters, job.train)
            self._inner.begin_with(momenta or {})
            if job.train.prox_mu > 0:
                self._base = {name: p.detach().clone() for name, p in self._parameters.items()}
        else:
            self._sums = {name: torch.zeros_like(p) for name, p in self._parameters.items()}

    @property
    def parameters(self) -> Iterable[Parameter]:
        return self._parameters.values()

    def gradients(self) -> list[Tensor]:
        """Return the gradient of every parameter, zeros for a parameter without a gradient."""
        for value in self._parameters.values():
            if value.grad is None:
                value.grad = torch.zeros_like(value)
        return [value.grad for value in self._parameters.values() if value.grad is not None]

    def finish(self, step: int, share: float) -> None:
        """Apply the gradients of a step, or add them to the task's mean, weighted by the step's
        `share` of the task's samples; then drop them.
        """
        if self._inner:
            self._pull()
            self._inner.step(self.rate(step))
            return
        for name, value in self._parameters.items():
            if value.grad is not None:
                self._sums[name].add_(value.grad, alpha=share)
        self.drop()

    def drop(self) -> None:
        """Drop the gradients of a step that starts over."""
        for value in self._parameters.values():
            value.grad = None

    def rate(self, step: int) -> float:
        """Return the learning rate of a step of this task."""
        job = self._job
        rate = learning_rate(job.train, job.global_step + step, job.total_steps)
        return rate if self._has_momenta else rate * rewarm_factor(step, job.steps)

    def result(self) -> dict[str, Tensor]:
        """Return the result of the task, on the CPU: the weights and the momenta that the version
        holds, or the mean gradient.
        """
        tensors: Weights = self._sums or self._parameters
        result = {name: to_host(value) for name, value in tensors.items()}
        if self._inner and self._has_momenta:
            ends = self._inner.momenta()
            result |= {MOMENTUM + name: to_host(value) for name, value in ends.items()}
        return result

    def snapshot(self) -> dict[str, Tensor]:
        """Return the state that `restore` needs, between two steps."""
        tensors = {name: to_host(value) for name, value in self._own().items()}
        state = self._inner.state() if self._inner else {}
        return tensors | {f"inner/{name}": value for name, value in state.items()}

    def restore(self, snapshot: Weights) -> bool:
        """Continue from a `snapshot`.

        Return False, with nothing changed, if its tensors do not fit.
        """
        tensors = self._own()
        inner = {name[6:]: value for name, value in snapshot.items() if name.startswith("inner/")}
        fits = all(
            name in snapshot and snapshot[name].shape == value.shape
            for name, value in tensors.items()
        )
        if not fits or (self._inner and not self._inner.load(inner)):
            return False
        for name, value in tensors.items():
            value.copy_(snapshot[name])
        self.drop()
        return True

    def move(self, device: str) -> None:
        """Move all state to another device, each gradient along with its parameter."""
        for value in self._parameters.values():
            gradient, value.grad = value.grad, None  # parameter and gradient share a device
            value.data = value.data.to(device)
            value.grad = gradient.to(device) if gradient is not None else None
        if self._inner:
            self._inner.move(device)
        self._base = {name: value.to(device) for name, value in self._base.items()}
        self._sums = {name: value.to(device) for name, value in self._sums.items()}

    def compute_on(self, device: str) -> None:
        """Compute products of the optimiser on `device`, from state on the host."""
        if self._inner:
            self._inner.card = device

    def _own(self) -> dict[str, Tensor]:
        """Return the tensors of the state, except the optimiser's, without copying them."""
        tensors = {f"weights/{name}": value.data for name, value in self._parameters.items()}
        tensors |= {f"base/{name}": value for name, value in self._base.items()}
        return tensors | {f"sums/{name}": value for name, value in self._sums.items()}

    @torch.no_grad()
    def _pull(self) -> None:
        """Add the gradient of mu / 2 |w - base|^2 (FedProx, Li et al. 2020)."""
        mu = self._job.train.prox_mu
        for name, base in self._base.items():
            value = self._parameters[name]
            if value.grad is not None:
                value.grad.add_(value, alpha=mu).sub_(base, alpha=mu)
