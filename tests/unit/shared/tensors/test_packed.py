"""Packed weights: the same numbers in fewer bytes, and damage refused."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shared.errors import InvalidFrame
from shared.tensors.shuffle import byte_planes, from_planes, pack_bytes, unpack_bytes
from shared.tensors.slices import bf16_from_float

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from tests.support.examples import examples


def packed(array: NDArray[Any]) -> bytes:
    return pack_bytes(b"".join(byte_planes(array)))


def unpacked(data: bytes, dtype: str, count: int) -> NDArray[Any]:
    kind = np.dtype(dtype)
    planes = unpack_bytes(data, count * kind.itemsize)
    cuts = range(0, count * kind.itemsize, max(1, count))
    return from_planes([planes[at : at + count] for at in cuts], kind, count)


@settings(deadline=None, max_examples=examples(100))
@given(st.sampled_from(["f4", "u2", "i8", "u1"]), st.binary(max_size=800))
@example("f4", b"")
@example("f4", b"\x00" * 8)
@example("u2", b"\xff" * 16)
@example("u1", bytes(range(256)))
def test_packed_floats_come_back_bit_by_bit(dtype: str, raw: bytes) -> None:
    array = np.frombuffer(raw[: len(raw) // 8 * 8], dtype)
    back = unpacked(packed(array), dtype, array.size)
    assert (back.dtype, back.tobytes()) == (array.dtype, array.tobytes())


def test_packing_makes_weights_smaller() -> None:
    weights = (np.random.default_rng(0).standard_normal(200_000) * 0.02).astype("f4")
    assert len(packed(weights)) < 0.88 * weights.nbytes
    assert len(packed(bf16_from_float(weights))) < 0.72 * weights.nbytes / 2


def test_packed_data_that_is_not_what_was_announced_is_refused() -> None:
    good = packed(np.arange(100, dtype="f4"))
    bomb = zstd.compress(bytes(1 << 28))
    for bad in (good[:-1], good + b"x", good + good, b"", b"noise", bomb):
        with pytest.raises(InvalidFrame):
            unpacked(bad, "f4", 100)
    for size in (99, 101):
        with pytest.raises(InvalidFrame):
            unpacked(good, "f4", size)
