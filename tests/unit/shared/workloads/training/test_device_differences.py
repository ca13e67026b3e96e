"""Differences of devices that workloads smooth over."""

from __future__ import annotations

import torch

from shared.workloads.training import device_differences


def test_products_are_not_made_by_transforms() -> None:
    """NNPACK leaves little in place of zeros, and processors learn different things."""
    assert device_differences.autocast("float32", "cpu") is not None
    assert not torch._C._get_nnpack_enabled()
