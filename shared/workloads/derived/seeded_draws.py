"""Random numbers of torch, fixed by seeds below the operators that draw them.

Dropout, noise and initial weights are the same on every device, whatever the author's code calls.
The numbers drawn for a sample are the same for any micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from shared.errors import InvalidRunFile
from shared.workloads.training import seeded_random
from shared.workloads.training.dropout import (
    LANE_RANGE,
    LANES,
    STEP,
    WORD_MASK,
    mix_words,
    sample_keys,
)

_BITS = 24  # random bits of a float32
_UNIT = 2.0**-_BITS
_LOW = (1 << _BITS) - 1
_OF_STEP = (1 << 62) + 1  # number that stands for all samples of a step
_TURN = 6.283185307179586

Arguments = Mapping[str, Any]
aten = torch.ops.aten


class AttentionDropout(InvalidRunFile):
    """Refusal of a fused attention with dropout, which would draw its own random numbers; attention
    that is computed by its parts does not.
    """


class RandomSource(Protocol):
    """Source of float32 random numbers."""

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor: ...

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor: ...

    def chance(self, share: float, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return booleans, each True with the probability `share`."""


class InitialDraws:
    """Draws of a model's first weights, exact on every machine."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._place = 0

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return torch.from_numpy(seeded_random.uniform(self._name(), self._seed, (*shape,)))

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return torch.from_numpy(seeded_random.normal(self._name(), self._seed, (*shape,)))

    def chance(self, share: float, shape: Sequence[int], device: torch.device) -> Tensor:
        return self.uniform(shape, device) < share

    def _name(self) -> str:
        self._place += 1
        return f"initial/{self._place}"


class SampleDraws:
    """Draws of samples `first`, `first` + 1, ... of a step. If the number of a tensor's rows is a
    multiple of the number of samples, each row is drawn for its sample; otherwise the tensor is
    drawn for the step, the same for any samples.
    """

    def __init__(self, seed: int, step: int, first: int, count: int) -> None:
        self._count = count
        self._keys = sample_keys(seed, step, first, count)
        self._key = sample_keys(seed, step, _OF_STEP, 1)
        self._place = 0

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        words = self._words(shape, device).view(*shape)
        return ((words >> 4) & _LOW).float().mul_(_UNIT)

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
        words = self._words(shape, device).view(*shape)
        first = ((words >> 4) & _LOW).float().add_(1).mul_(_UNIT)
        radius = first.log_().mul_(-2).sqrt_()
        return radius * ((words >> 30) & _LOW).float().mul_(_UNIT * _TURN).cos_()

    def chance(self, share: float, shape: Sequence[int], device: torch.device) -> Tensor:
        words = self._words(shape, device, LANES)
        size = torch.Size(shape).numel() // len(words)
        lanes = words.view(torch.int16)[:, :size].view(*shape)
        if share >= 1:
            return torch.ones_like(lanes, dtype=torch.bool)
        return lanes < round(share * LANE_RANGE) - (LANE_RANGE >> 1)

    def _words(self, shape: Sequence[int], device: torch.device, lanes: int = 1) -> Tensor:
        """Return words of 64 bits, by sample or for the step; each word is for `lanes` elements."""
        self._place += 1
        of_samples = bool(shape) and shape[0] > 0 and shape[0] % self._count == 0
        keys = (self._keys if of_samples else self._key).to(device)
        place = (self._place * 0xD1B54A32D192ED03 & WORD_MASK) - (1 << 63)
        size = torch.Size(shape).numel() // len(keys)
        counter = torch.arange(-(-size // lanes), device=device) * STEP
        return mix_words(counter + mix_words(keys + place)[:, None])


class SeededDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager: operators that draw random numbers take them from `draws`."""

    def __init__(self, draws: RandomSource) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    @classmethod
    @override
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch's compiler, as slow as torch

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Arguments | None = None,
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        parameters = func._schema.arguments
        named: dict[str, Any] = {p.name: p.default_value for p in parameters}
        named |= dict(zip((p.name for p in parameters), args, strict=False))
        named |= kwargs or {}
        operator = _OPERATORS.get(func.overloadpacket)
        if operator is not None:
            return operator(self._draws, named)
        if "attention" in func._schema.name:
            if not named.get("dropout_p"):
                return func(*args, **(kwargs or {}))
            raise AttentionDropout("dropout within a fused attention: set it to 0")
        raise InvalidRunFile(
            f"{func._schema.name} draws random numbers that differ from machine to machine: use"
            " torch.rand, torch.randn, torch.randint or dropout"
        )


def _fill(target: Tensor, value: Tensor) -> Tensor:
    filled: Tensor = target.copy_(value.view(target.shape))
    return filled


def _uniform_(draws: RandomSource, named: Arguments) -> Tensor:
    target, low, high = named["self"], named["from"], named["to"]
    return _fill(target, draws.uniform(target.shape, target.device) * (high - low) + low)


def _normal_(draws: RandomSource, named: Arguments) -> Tensor:
    target = named["self"]
    drawn = draws.normal(target.shape, target.device)
    return _fill(target, drawn * named["std"] + named["mean"])


def _normal(draws: RandomSource, named: Arguments) -> Tensor:
    mean, std = named["mean"], named["std"]
    shape = named.get("size") or (torch.as_tensor(mean) + torch.as_tensor(std)).shape
    device = next((v.device for v in (mean, std) if isinstance(v, Tensor)), torch.device("cpu"))
    drawn: Tensor = draws.normal(shape, named.get("device") or device) * std + mean
    return drawn


def _chance(draws: RandomSource, share: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(share, Tensor):
        return draws.uniform(like.shape, like.device) < share
    return draws.chance(share, like.shape, like.device)


def _bernoulli_(draws: RandomSource, named: Arguments) -> Tensor:
    target = named["self"]
    return _fill(target, _chance(draws, named["p"], target))


def _bernoulli(draws: RandomSource, named: Arguments) -> Tensor:
    target = named["self"]
    return _chance(draws, named.get("p", target), target).to(target.dtype)


def _dropout(draws: RandomSource, named: Arguments) -> tuple[Tensor, Tensor]:
    value, share = named["input"], named["p"]
    if named["train"] is False:
        return value.clone(), torch.ones_like(value, dtype=torch.bool)
    mask = draws.chance(1 - share, value.shape, value.device)
    return value * mask / max(1 - share, _UNIT), mask


def _device_of(named: Arguments) -> torch.device:
    like = named.get("self")
    default = like.device if isinstance(like, Tensor) else torch.device("cpu")
    return torch.device(named.get("device") or default)


def _shape_of(named: Arguments) -> Sequence[int]:
    shape: Sequence[int] = named["size"] if "size" in named else named["self"].shape
    return shape


def _cast(value: Tensor, named: Arguments) -> Tensor:
    like = named.get("self")
    default = like.dtype if isinstance(like, Tensor) else torch.get_default_dtype()
    return value.to(named.get("dtype") or default)


def _integer(named: Arguments) -> torch.dtype:
    dtype, like = named.get("dtype"), named.get("self")
    if isinstance(dtype, torch.dtype):  # a default value is the number of a type instead
        return dtype
    return like.dtype if isinstance(like, Tensor) else torch.int64


def _rand(draws: RandomSource, named: Arguments) -> Tensor:
    return _cast(draws.uniform(_shape_of(named), _device_of(named)), named)


def _randn(draws: RandomSource, named: Arguments) -> Tensor:
    return _cast(draws.normal(_shape_of(named), _device_of(named)), named)


def _randint(draws: RandomSource, named: Arguments) -> Tensor:
    low, high = named.get("low", 0), named["high"]
    drawn: Tensor = draws.uniform(_shape_of(named), _device_of(named)).double() * (high - low) + low
    return drawn.floor().to(_integer(named))


def _random_(draws: RandomSource, named: Arguments) -> Tensor:
    target, low = named["self"], named.get("from", 0)
    high = named.get("to") or low + (1 << _BITS)
    drawn = draws.uniform(target.shape, target.device).double() * (high - low) + low
    return _fill(target, drawn.floor())


def _randperm(draws: RandomSource, named: Arguments) -> Tensor:
    drawn = draws.uniform((named["n"],), _device_of(named))
    return drawn.argsort(stable=True).to(_integer(named))


def _exponential_(draws: RandomSource, named: Arguments) -> Tensor:
    target = named["self"]
    drawn = draws.uniform(target.shape, target.device)
    return _fill(target, drawn.neg_().log1p_().neg_().div_(named["lambd"]))


_OPERATORS: Mapping[object, Callable[[RandomSource, Arguments], object]] = {
    aten.uniform_: _uniform_,
    aten.normal_: _normal_,
    aten.normal: _normal,
    aten.bernoulli_: _bernoulli_,
    aten.bernoulli: _bernoulli,
    aten.native_dropout: _dropout,
    aten.rand: _rand,
    aten.rand_like: _rand,
    aten.randn: _randn,
    aten.randn_like: _randn,
    aten.randint: _randint,
    aten.randint_like: _randint,
    aten.random_: _random_,
    aten.randperm: _randperm,
    aten.exponential_: _exponential_,
}
