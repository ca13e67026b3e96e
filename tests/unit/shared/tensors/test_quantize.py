"""The arithmetic of the block codecs, bit for bit as the formulas say it in one line each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidFrame
from shared.tensors.quantize import SPAN, Blocks, sum_squares, unpack_nibbles
from shared.tensors.slices import float_from_bf16
from tests.support.examples import examples
from tests.support.tensor_samples import numbers

KERNELS = (Blocks(limit=127, block=256), Blocks(limit=7, block=64))
BOTH = pytest.mark.parametrize("kernel", KERNELS, ids=["int8", "int4"])
CUT = st.tuples(st.floats(0, 1), st.floats(0, 1))


def formula(x: np.ndarray, kernel: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Codes, one each, and scales."""
    peaks = np.maximum.reduceat(np.abs(x), np.arange(0, x.size, kernel.block))
    wide = (peaks / np.float32(kernel.limit)).astype("f4").view("u4")
    scales = (wide + np.uint32(0xFFFF) >> 16).astype("u2")  # rounded up
    scales[scales < 0x0080] = 0
    with np.errstate(divide="ignore"):
        inverse = np.where(scales > 0, np.float32(1) / float_from_bf16(scales), np.float32(0))
    return np.rint(x * np.repeat(inverse, kernel.block)[: x.size]).astype(np.int8), scales


def values(codes: np.ndarray, scales: np.ndarray, kernel: Blocks) -> np.ndarray:
    with np.errstate(over="ignore"):
        found: np.ndarray = codes * np.repeat(float_from_bf16(scales), kernel.block)[: codes.size]
    return found


def norm(codes: np.ndarray, scales: np.ndarray, kernel: Blocks) -> float:
    """Of one span: the sum of each block's exact square, in float64."""
    wide = codes.astype("f8")
    sums = np.add.reduceat(wide * wide, np.arange(0, wide.size, kernel.block))
    return float((sums * float_from_bf16(scales).astype("f8") ** 2).sum())


def plain(codes: np.ndarray, kernel: Blocks, size: int) -> np.ndarray:
    return unpack_nibbles(codes)[:size] if kernel.packed else codes


@BOTH
@settings(deadline=None, max_examples=examples(150))
@given(x=numbers(), cut=CUT)
def test_codes_scales_and_numbers_are_those_of_the_formulas(
    kernel: Blocks, x: np.ndarray, cut: tuple[float, float]
) -> None:
    parts = kernel.encode(x)
    codes, scales = formula(x, kernel)
    assert plain(parts[0], kernel, x.size).tobytes() == codes.tobytes()
    assert parts[1].tobytes() == scales.tobytes()
    whole = values(codes, scales, kernel)
    start, stop = sorted(int(edge * x.size) for edge in cut)
    assert kernel.decode(parts, x.size, start, stop).tobytes() == whole[start:stop].tobytes()
    room = np.full(stop - start + 3, np.nan, "f4")
    found = kernel.decode(parts, x.size, start, stop, room)
    assert found.tobytes() == whole[start:stop].tobytes()
    assert np.isnan(room[stop - start :]).all()


@BOTH
@settings(deadline=None, max_examples=examples(60))
@given(seed=st.integers(0, 2**32), size=st.sampled_from([1, 63, 256, 5000, SPAN - 1, SPAN + 70]))
def test_any_codes_and_scales_of_a_hostile_file_decode_as_the_formulas_say(
    kernel: Blocks, seed: int, size: int
) -> None:
    rng = np.random.default_rng(seed)
    stored = rng.integers(0, 256, -(-size // 2) if kernel.packed else size, np.uint8)
    parts = (
        stored.view("u1" if kernel.packed else "i1"),
        rng.integers(0, rng.choice([0x100, 0x3F80, 0x7F80]), -(-size // kernel.block), np.uint16),
    )
    codes = plain(parts[0], kernel, size)
    with np.errstate(over="ignore"):
        found = kernel.decode(parts, size, 0, size)
        square = kernel.square(parts, size, 0, min(size, SPAN))
    assert found.tobytes() == values(codes, parts[1], kernel).tobytes()
    if np.isfinite(found[:SPAN]).all():
        here = parts[1][: SPAN // kernel.block]
        assert square == pytest.approx(norm(codes[:SPAN], here, kernel), rel=1e-12)
    else:
        assert not np.isfinite(square)


@BOTH
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e38])
def test_the_norm_of_a_later_slice_is_that_of_its_numbers(kernel: Blocks, scale: float) -> None:
    """Three spans of different sizes: none may be taken for another."""
    x = np.linspace(1, 3, 2 * SPAN + 70, dtype="f4") * np.float32(scale / 3)
    parts = kernel.encode(x)
    for start, stop in [(SPAN, x.size), (2 * SPAN, x.size), (SPAN, 2 * SPAN), (0, x.size)]:
        wide = kernel.decode(parts, x.size, start, stop).astype("f8")
        found = kernel.square(parts, x.size, start, stop)
        assert found == pytest.approx(float((wide * wide).sum()), rel=1e-12)


@BOTH
def test_every_thread_has_room_of_its_own(kernel: Blocks) -> None:
    x = np.linspace(-1, 1, SPAN + 70, dtype="f4")
    here = kernel.encode(x)
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(kernel.encode, x).result()
        norm_there = pool.submit(sum_squares, x).result()
    assert [part.tobytes() for part in there] == [part.tobytes() for part in here]
    assert norm_there == sum_squares(x)


@BOTH
@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7FC00000])
@pytest.mark.parametrize("place", [0, 255, SPAN - 1, SPAN + 4])
def test_every_infinity_and_nan_is_seen(kernel: Blocks, bits: int, place: int) -> None:
    x = np.linspace(-1, 1, SPAN + 5, dtype="f4")
    x.view("u4")[place] = bits
    with pytest.raises(InvalidFrame, match="NaN or infinite"):
        kernel.encode(x)
