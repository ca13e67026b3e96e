"""Differences between devices that training handles: copies between host and device, bfloat16 and
inexact convolutions.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# PyTorch without oneDNN (macOS) convolves by NNPACK, whose transforms turn zeros into small
# numbers: an untrained Gomoku network was off by a third after 30 steps.
torch.backends.nnpack.set_flags(False)  # type: ignore[no-untyped-call]
# TF32 of newer cards keeps ten bits of a convolution's factors, which changes an update by a
# hundredth compared with older cards; `precision = "bfloat16"` is the setting for speed.
torch.backends.cudnn.allow_tf32 = False


def to_host(value: Tensor) -> Tensor:
    """Return a copy on the CPU: float32, or int64 for integers."""
    dtype = torch.float32 if value.dtype.is_floating_point else torch.int64
    return value.detach().to("cpu", dtype, copy=True)


def to_device(value: Tensor, device: str) -> Tensor:
    """Return a host tensor on `device`; with CUDA the caller does not wait for the copy."""
    if device.startswith("cuda"):
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)


def has_own_memory(device: str) -> bool:
    """Return True for a device whose memory is not that of the host."""
    return device not in ("cpu", "mps")


def has_bfloat16(device: str) -> bool:
    """Return True if a device computes faster in bfloat16 than in float32."""
    kind = torch.device(device).type
    if kind == "cuda":  # older cards only emulate bfloat16
        return torch.cuda.get_device_capability(device)[0] >= 8 or torch.version.hip is not None
    if kind == "cpu":
        return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())
    return kind in ("mps", "xpu")


def autocast(precision: str, device: str) -> AbstractContextManager[object]:
    """Return the context for bfloat16 where requested and supported, else for float32."""
    if precision == "bfloat16" and has_bfloat16(device):
        return torch.autocast(torch.device(device).type, torch.bfloat16)
    return nullcontext()
