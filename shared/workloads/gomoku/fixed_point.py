"""Trunk of a Gomoku player in fixed-point numbers: the same bits on every device.

Activations are integers from 0 to LEVELS with at most eight significant bits, weights and biases
are such integers times a power of two that each output channel has of its own. bfloat16 holds all
of them, float32 holds every sum of their products: a sum is exact, in whatever order a device adds.
So a processor with bfloat16 arithmetic and a device that has only float32 give the same result, and
a search that is repeated elsewhere gives the same visits.

A convolution's sums are rounded to bfloat16, clipped to 0 ... LEVELS and rounded to integers. The
units of the integers are a function of the weights alone: each layer's output on fixed positions,
computed with the layers before it in fixed point, fills the range up to a margin. Shapes:
B positions, S side, C channels.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

LEVELS = 510  # largest activation: eight significant bits
# Measured: without a margin the value errs three times as much on boards that were not measured.
_MARGIN = 1.25
# Bounds of the sum of a channel's products and of its bias: float32 holds integers to 2^24, and
# rounding to bfloat16 enlarges both by 2^-8 at most.
_PRODUCTS_MAX = 3 * 2**22
_BIAS_MAX = 2**21
_EXPONENT_MAX = 24
_UNIT_MIN = 2.0**-60  # unit of a layer whose output is zero


class FixedConv(nn.Module):
    """Convolution of integers from 0 to LEVELS, in units of `unit_in`, to units of `unit_out`."""

    weight: Tensor
    bias: Tensor
    grain: Tensor  # (C, 1, 1): number of which all sums of a channel are multiples

    def __init__(self, conv: nn.Conv2d, unit_in: float, unit_out: float, kind: torch.dtype) -> None:
        super().__init__()
        if conv.bias is None:
            raise ValueError("a convolution of the trunk needs a bias")
        weight = conv.weight.double() * (unit_in / unit_out)
        bias = conv.bias.double() / unit_out
        scale = _scale(weight, bias)
        rounded = _rounded(weight, scale.view(-1, 1, 1, 1)).to(kind)
        self.register_buffer("weight", rounded.contiguous(memory_format=torch.channels_last))
        self.register_buffer("bias", _rounded(bias, scale).to(kind))
        self.register_buffer("grain", (1 / scale).float().view(-1, 1, 1))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution's sums (B, C, S, S) over integers `x`, rounded to bfloat16."""
        sums = F.conv2d(x, self.weight, self.bias, padding=1)
        if sums.device.type != "cpu":
            # Transforms such as Winograd's are not exact, but err by less than half a grain.
            sums = sums.div_(self.grain).round_().mul_(self.grain)
        return _narrowed(sums)


class FixedBlock(nn.Module):
    """Residual block; the unit of its input is `shrink`, a power of two, times its output's
    unit.
    """

    def __init__(self, one: FixedConv, two: FixedConv, shrink: float) -> None:
        super().__init__()
        self.one = one
        self.two = two
        self.shrink = shrink

    @override
    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.two(_levels(self.one(x)))
        return _levels(_narrowed(branch.add_(x, alpha=self.shrink)))


class FixedTrunk(nn.Module):
    """Trunk whose convolutions are `stem` and the pairs of `blocks`.

    The constructor measures the units on `planes` (B, PLANES, S, S). `native` chooses bfloat16
    arithmetic of a CPU that has it; the results are the same without it.
    """

    def __init__(
        self,
        stem: nn.Conv2d,
        blocks: Iterable[tuple[nn.Conv2d, nn.Conv2d]],
        planes: Tensor,
        *,
        native: bool,
    ) -> None:
        super().__init__()
        self._kind = torch.bfloat16 if native else torch.float32
        x = planes.to(self._kind)
        unit = self._unit(stem, x, 1.0)
        self.stem = FixedConv(stem, 1.0, unit, self._kind)
        x = _levels(self.stem(x))
        fixed_blocks = []
        for one, two in blocks:
            inner = self._unit(one, x, unit)
            first = FixedConv(one, unit, inner, self._kind)
            branch = FixedConv(two, inner, unit, self._kind)(_levels(first(x)))
            largest = _MARGIN * float(_narrowed(branch.add_(x)).max())
            shrink = 1.0
            while largest * shrink > LEVELS and shrink > _UNIT_MIN:
                shrink /= 2
            unit /= shrink
            second = FixedConv(two, inner, unit, self._kind)
            fixed_blocks.append(FixedBlock(first, second, shrink))
            x = fixed_blocks[-1](x)
        self.blocks = nn.ModuleList(fixed_blocks)
        self.unit = unit

    @override
    def forward(self, planes: Tensor) -> Tensor:
        """Return the trunk's output, (B, C, S, S) in float32, of planes of zeros and ones."""
        x = _levels(self.stem(planes.to(self._kind)))
        for block in self.blocks:
            x = block(x)
        return x.float() * self.unit

    def _unit(self, conv: nn.Conv2d, x: Tensor, unit: float) -> float:
        """Return the unit in which the layer's output on `x` fills the range up to the margin."""
        sums: Tensor = FixedConv(conv, unit, unit, self._kind)(x)
        return max(_MARGIN * float(sums.max()) * unit / LEVELS, _UNIT_MIN)


def _narrowed(numbers: Tensor) -> Tensor:
    """Round `numbers` in place to numbers of bfloat16."""
    return numbers if numbers.dtype == torch.bfloat16 else numbers.copy_(numbers.bfloat16())


def _levels(sums: Tensor) -> Tensor:
    return sums.clamp_(0, LEVELS).round_()


def _scale(weight: Tensor, bias: Tensor) -> Tensor:
    """Return for each output channel the largest power of two (C,) by which weights and bias may be
    multiplied so that no sum of products with activations exceeds what float32 counts exactly.
    """
    sizes = weight.abs().sum((1, 2, 3)) * (LEVELS / _PRODUCTS_MAX)
    most = torch.maximum(sizes, bias.abs() / _BIAS_MAX)
    # The estimate is too high by at least 1, so that the order of this sum does not matter.
    exponent = (1 - most.log2()).ceil().clamp_(max=_EXPONENT_MAX)
    while True:
        scale = exponent.exp2()
        products = (weight * scale.view(-1, 1, 1, 1)).round().abs().sum((1, 2, 3)) * LEVELS
        over = (products > _PRODUCTS_MAX) | ((bias * scale).round().abs() > _BIAS_MAX)
        if not over.any():
            return scale
        exponent -= over.double()


def _rounded(values: Tensor, scale: Tensor) -> Tensor:
    """Return `values` rounded to integers of eight significant bits over `scale`, in float64."""
    return (values * scale).round().float().bfloat16().double() / scale
