"""Inner optimiser of local work: AdamW or SGD from torch, or Muon.

A task's optimiser is fresh, so with Muon no parameter has a second moment, which would need many
steps to become accurate: matrices inside blocks take orthogonal steps, and all other parameters
steps whose rows all have the same root mean square.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from shared.workloads.base import TrainSettings, Weights
from shared.workloads.training.lr_schedule import learning_rate as learning_rate

_FUSED = ("cpu", "cuda")  # devices with fused updates, on a CPU 3 to 5 times faster
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOMENTUM = "momentum_buffer"
_KEYS = {
    "muon": (_MOMENTUM, "row_squares"),
    "rows": (_MOMENTUM,),
    "sgd": (_MOMENTUM,),
    "adamw": _MOMENTS,
}


# One odd polynomial, applied five times, brings singular values in (0, 1] to about 0.7 ... 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_TIMES = 5
_MUON_MOMENTUM = 0.95
_ROW_DECAY = 0.95  # decay of the mean square of an orthogonal step's rows (NorMuon, Li et al. 2025)
# Other parameters: momentum, and root mean square of a row's step at rate 1. Rows whose momentum is
# below the floor, a share of the tensor's mean, take smaller steps in proportion; otherwise a token
# that occurs once would move its row for the rest of the task.
_MOMENTUM_OF_ROWS = 0.9
_ROW_RMS = 0.3
_ROW_FLOOR = 0.1
_TINY = 1e-12
# root mean square of an update at rate 1, like AdamW's, so that Muon and AdamW take the same rate
# (Liu et al. 2025)
_RMS = 0.2


@dataclass(frozen=True)
class _Group:
    """Parameters that are moved by the same optimiser with the same weight decay."""

    rule: str  # optimiser: a key of `_KEYS`
    weight_decay: float
    names: tuple[str, ...]


class InnerOptimizer:
    """Optimiser over named parameters; weight decay on matrices only (as in GPT training since
    Radford et al. 2019).

    The state is made at once, not at the first step, so that a lack of memory is noticed before any
    work. The functions of torch's optimisers are called instead of the classes, since the first
    class object of a process imports the compiler: a second of computing and 70 MB.
    """

    def __init__(self, parameters: Mapping[str, Parameter], train: TrainSettings) -> None:
        self._parameters = dict(parameters)
        self._train = train
        self.steps = 0
        self.card = ""  # device for products of matrices; "" = the device of the state
        self._fused = next(iter(self._parameters.values())).device.type in _FUSED
        self._groups = _groups(self._parameters, train)
        self._states: dict[str, dict[str, Tensor]] = {}
        self._keys: dict[str, tuple[str, ...]] = {}
        rules = {name: group.rule for group in self._groups for name in group.names}
        for name, value in self._parameters.items():
            self._keys[name] = _KEYS[rules[name]]
            self._states[name] = {key: _zeros(key, value) for key in self._keys[name]}
        self._count(0)

    @torch.no_grad()
    def begin_with(self, momenta: Weights) -> None:
        """Begin with these momenta, by parameter, of an optimiser that has them."""
        for name, value in momenta.items():
            self._states[name][_MOMENTUM].copy_(value)

    def momenta(self) -> dict[str, Tensor]:
        """Return the momentum of each parameter, without copying it."""
        return {name: state[_MOMENTUM] for name, state in self._states.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Clip the gradients, apply them and drop them."""
        if self._train.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._train.clip_norm)
        for group in self._groups:
            self._apply(group, rate)
        for value in self._parameters.values():
            value.grad = None
        self.steps += 1

    def _apply(self, group: _Group, rate: float) -> None:
        """Move the parameters of a group that have a gradient."""
        moved = [name for name in group.names if self._parameters[name].grad is not None]
        values: list[Tensor] = [self._parameters[name] for name in moved]
        grads = [value.grad for value in values if value.grad is not None]
        if group.rule == "muon":
            changes = self._orthogonal_steps(moved, grads)
            _move(values, changes, rate, group.weight_decay)
        elif group.rule == "rows":
            momenta = self._states_of(moved, _MOMENTUM)
            changes = [
                row_step(grad, momentum) for grad, momentum in zip(grads, momenta, strict=True)
            ]
            _move(values, changes, rate, group.weight_decay)
        elif group.rule == "sgd":
            sgd(
                values,
                grads,
                [*self._states_of(moved, _MOMENTUM)],
                fused=self._fused,
                weight_decay=group.weight_decay,
                momentum=self._train.beta1,
                lr=rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
        else:
            adamw(
                values,
                grads,
                self._states_of(moved, "exp_avg"),
                self._states_of(moved, "exp_avg_sq"),
                [],
                self._states_of(moved, "step"),
                fused=self._fused,
                amsgrad=False,
                beta1=self._train.beta1,
                beta2=self._train.beta2,
                lr=rate,
                weight_decay=group.weight_decay,
                eps=1e-8,
                maximize=False,
            )

    def _orthogonal_steps(self, names: Sequence[str], grads: Sequence[Tensor]) -> list[Tensor]:
        """Return Muon's steps for the gradients of matrices."""
        momenta = self._states_of(names, _MOMENTUM)
        kind = torch.device(self.card or grads[0].device).type
        narrow = self._train.precision == "bfloat16" and kind != "cpu"
        changes = muon(grads, momenta, narrow=narrow, card=self.card)
        squares = self._states_of(names, "row_squares")
        weight = 1.0 - _ROW_DECAY ** (self.steps + 1)
        return [
            balance_rows(change, rows, weight)
            for change, rows in zip(changes, squares, strict=True)
        ]

    def _states_of(self, names: Sequence[str], key: str) -> list[Tensor]:
        return [self._states[name][key] for name in names]

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the state on the CPU: "exp_avg/NAME" and so on, and "steps"."""
        tensors = {
            f"{key}/{name}": self._states[name][key].detach().to("cpu", copy=True)
            for name, keys in self._keys.items()
            for key in keys
        }
        return tensors | {"steps": torch.tensor(self.steps, dtype=torch.int64)}

    def load(self, state: Weights) -> bool:
        """Continue from a snapshot; return False, with nothing changed, for a snapshot of another
        model or optimiser.
        """
        fits = "steps" in state and all(
            f"{key}/{name}" in state and state[f"{key}/{name}"].shape == tensors[key].shape
            for name, tensors in self._states.items()
            for key in self._keys[name]
        )
        if fits:
            for name, keys in self._keys.items():
                for key in keys:
                    self._states[name][key].copy_(state[f"{key}/{name}"])
            self._count(int(state["steps"]))
        return fits

    def move(self, device: str) -> None:
        """Move the state after the parameters have moved."""
        for state in self._states.values():
            for key, tensor in state.items():
                if tensor.ndim or self._fused:  # unfused AdamW counts its steps on the CPU
                    state[key] = tensor.to(device)

    def _count(self, steps: int) -> None:
        self.steps = steps
        for name, value in self._parameters.items():
            if self._keys[name] == _MOMENTS:
                device = value.device if self._fused else "cpu"
                count = torch.tensor(float(steps), dtype=torch.float32, device=device)
                self._states[name]["step"] = count


def _groups(parameters: Mapping[str, Parameter], train: TrainSettings) -> list[_Group]:
    """Group parameters by optimiser and weight decay; a parameter of fewer than two dimensions
    does not decay.
    """
    turned = block_matrices(parameters) if train.optimizer == "muon" else {}
    plain = "rows" if train.optimizer == "muon" else train.optimizer
    rest = {name: value for name, value in parameters.items() if name not in turned}
    matrices = tuple(name for name, value in rest.items() if value.ndim >= 2)
    vectors = tuple(name for name, value in rest.items() if value.ndim < 2)
    groups = [
        _Group("muon", train.weight_decay, tuple(turned)),
        _Group(plain, train.weight_decay, matrices),
        _Group(plain, 0.0, vectors),
    ]
    return [group for group in groups if group.names]


def _zeros(key: str, value: Tensor) -> Tensor:
    return torch.zeros_like(value[:, :1] if key == "row_squares" else value)


def _move(
    values: Sequence[Tensor], changes: Sequence[Tensor], rate: float, weight_decay: float
) -> None:
    """Move parameters against their steps, with decoupled weight decay."""
    for value, change in zip(values, changes, strict=True):
        value.mul_(1.0 - rate * weight_decay)
        value.add_(change, alpha=-rate)


def muon(
    grads: Sequence[Tensor], momenta: Sequence[Tensor], *, narrow: bool, card: str = ""
) -> list[Tensor]:
    """Return steps of rate 1 for the gradients of matrices, with Nesterov momentum, and update the
    momenta. Matrices of one shape are orthogonalised together, or each alone on a `card`.

    Computes in float32 unless `narrow`, unlike torch's own Muon: bfloat16 leaves the directions of
    small singular values undetermined, a hundredth of the update, and two machines would differ.
    """
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, (grad, momentum) in enumerate(zip(grads, momenta, strict=True)):
        momentum.lerp_(grad, 1.0 - _MUON_MOMENTUM)
        by_shape.setdefault(tuple(grad.shape), []).append(index)
    changes = [*grads]
    stacks = [[index] for index in range(len(grads))] if card else by_shape.values()
    for indices in stacks:
        moves = [grads[index].lerp(momenta[index], _MUON_MOMENTUM) for index in indices]
        stacked = torch.stack(moves).to(card or None)  # (n, A, B)
        turned = orthogonalise(stacked.bfloat16() if narrow else stacked)
        for index, change in zip(indices, turned, strict=True):
            step = change.float() * (_RMS * max(change.shape) ** 0.5)
            changes[index] = step.to(grads[index].device)
    return changes


def balance_rows(change: Tensor, squares: Tensor, weight: float) -> Tensor:
    """Return an orthogonal step (A, B) rescaled to rows of about equal length, with the same norm;
    update the decayed mean squares of its rows (A, 1), whose weights so far add up to `weight`.
    """
    squares.lerp_(change.square().mean(1, keepdim=True), 1.0 - _ROW_DECAY)
    even = change / (squares / weight).sqrt().clamp_min(_TINY)
    step: Tensor = even * (change.norm() / even.norm().clamp_min(_TINY))
    return step


def row_step(grad: Tensor, momentum: Tensor) -> Tensor:
    """Return a step of rate 1 whose rows have one root mean square, with Nesterov momentum, and
    update the momentum. A vector is one row.
    """
    momentum.lerp_(grad, 1.0 - _MOMENTUM_OF_ROWS)
    change = grad.lerp(momentum, _MOMENTUM_OF_ROWS)
    rows = change.flatten(1) if change.ndim > 1 else change.unsqueeze(0)
    squares = rows.square().mean(1, keepdim=True)
    least = _ROW_FLOOR * squares.mean().sqrt()
    scales = _ROW_RMS / torch.maximum(squares.sqrt(), least).clamp_min(_TINY)
    return (rows * scales).view_as(change)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return matrices (n, A, B) with the same singular vectors and all singular values near 1."""
    turned = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if turned else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(_TIMES):
        square = torch.bmm(x, x.mT)
        inner = torch.baddbmm(square, square, square, beta=_B, alpha=_C)
        x = torch.baddbmm(x, inner, x, beta=_A)
    result: Tensor = x.mT if turned else x
    return result


def block_matrices(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return the matrices inside a model's blocks, without embeddings and the head."""
    return {
        name: value
        for name, value in parameters.items()
        if value.ndim == 2 and any(part.isdigit() for part in name.split("."))
    }
