"""Frozen matrix, stored in few bits and expanded only while used."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from shared.errors import NotFound
from shared.workloads.base import is_here
from shared.workloads.causal_lm.config import LIBRARY, BasePrecision

_BLOCK = 64  # numbers that share a scale
_FETCHES = "kernels"


class FrozenMatrix(nn.Module):
    """y = x W^T + b with W (outputs, inputs) in `precision`.

    The stored bits are buffers, so that they move with the model but are never trained.
    """

    held: Tensor
    scales: Tensor  # scales of the blocks
    levels: Tensor  # levels of the 8-bit codes
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, precision: BasePrecision) -> None:
        super().__init__()
        self._shape, self._precision = tuple(weight.shape), precision
        none = weight.new_empty(0)
        if precision == "bfloat16":
            codes, scales, levels = weight.bfloat16(), none, none
        elif precision == "int8":
            codes, state = library().quantize_blockwise(weight.contiguous(), blocksize=_BLOCK)
            scales, levels = state.absmax, state.code
        else:
            codes, state = library().quantize_4bit(
                weight.contiguous(), blocksize=_BLOCK, quant_type=precision
            )
            scales, levels = state.absmax, none
        for name, value in (("held", codes), ("scales", scales), ("levels", levels)):
            self.register_buffer(name, value)
        self.register_buffer("bias", None if bias is None else bias.detach())

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return out

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return W in a type for computing."""
        if self._precision == "bfloat16":
            return self.held.to(dtype)
        ops: Any = torch.ops.bitsandbytes
        if self._precision == "int8":
            spread = ops.dequantize_blockwise(self.held, self.scales, self.levels, _BLOCK, dtype)
        else:
            spread = ops.dequantize_4bit(
                self.held, self.scales, _BLOCK, self._precision, list(self._shape), dtype
            )
        dense_matrix: Tensor = spread.reshape(self._shape)
        return dense_matrix


class _Product(torch.autograd.Function):
    """Product x W^T + b that keeps only the stored form of W for the backward pass."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, matrix: FrozenMatrix) -> Tensor:
        ctx.matrix, kind = matrix, x.device.type
        ctx.dtype = x.dtype
        if torch.is_autocast_enabled(kind):
            ctx.dtype = torch.get_autocast_dtype(kind)
        bias = None if matrix.bias is None else matrix.bias.to(ctx.dtype)
        ctx.given = x.dtype
        return F.linear(x.to(ctx.dtype), matrix.dense(ctx.dtype), bias)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        back = gradients[0].to(ctx.dtype) @ ctx.matrix.dense(ctx.dtype)
        return back.to(ctx.given), None


_IMPORTING = threading.Lock()  # else one thread would restore the package that another hides


def library() -> Any:
    """Load the library for numbers in 8 and 4 bits. Raises NotFound if it is missing."""
    if not is_here(LIBRARY):
        raise NotFound(
            f"weights of 8 or 4 bits need the library {LIBRARY} (the extra `quantized`), which is"
            " not installed here"
        )
    with _IMPORTING, _no_foreign_code():
        return importlib.import_module(f"{LIBRARY}.functional")


@contextmanager
def _no_foreign_code() -> Iterator[None]:
    """Hide the package `kernels` while the library is imported, because the library would use it to
    download and run compiled code. The library's warning is silenced.
    """
    there = sys.modules.get(_FETCHES)
    log = logging.getLogger(f"{LIBRARY}.backends.cpu.ops")
    level = log.level
    sys.modules[_FETCHES] = None  # type: ignore[assignment]
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
        del sys.modules[_FETCHES]
        if there is not None:
            sys.modules[_FETCHES] = there
