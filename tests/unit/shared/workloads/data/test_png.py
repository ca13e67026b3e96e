"""PNG files and what is made of pixels for terminals: exact, bounded, and the same as other
programs see it.
"""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from shared.errors import BadRequest
from shared.workloads.data.png import Pixels, read_png, write_png
from shared.workloads.data.resize import braille, half_blocks, resize, square, tile

SHAPES = st.tuples(st.integers(1, 20), st.integers(1, 20)) | st.tuples(
    st.integers(1, 20), st.integers(1, 20), st.just(3)
)
PIXELS = SHAPES.flatmap(lambda shape: arrays(np.uint8, shape))


@given(PIXELS)
def test_what_is_written_is_read_back(pixels: Pixels) -> None:
    data = write_png(pixels)
    assert np.array_equal(read_png(data), pixels)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels)


def filtered(pixels: Pixels, rule: int) -> bytes:
    """A PNG with one filter on every line, as the specification defines it."""
    wide = pixels.astype(np.int64)
    left = np.zeros_like(wide)
    left[:, 1:] = wide[:, :-1]
    above = np.zeros_like(wide)
    above[1:] = wide[:-1]
    corner = np.zeros_like(wide)
    corner[1:, 1:] = wide[:-1, :-1]
    guess = left + above - corner
    near = np.abs(np.stack([guess - left, guess - above, guess - corner]))
    paeth = np.choose(near.argmin(0), [left, above, corner])
    taken = (0, left, above, (left + above) // 2, paeth)[rule]
    lines = ((wide - taken) % 256).astype(np.uint8).reshape(len(pixels), -1)
    raw = np.concatenate([np.full((len(pixels), 1), rule, np.uint8), lines], axis=1).tobytes()
    head = write_png(pixels)[:33]
    packed = zlib.compress(raw)
    body = struct.pack(">I", len(packed)) + b"IDAT" + packed
    body += struct.pack(">I", zlib.crc32(b"IDAT" + packed))
    return head + body + write_png(pixels)[-12:]


@pytest.mark.parametrize("rule", range(5))
@given(pixels=PIXELS)
def test_files_of_other_programs_are_read(rule: int, pixels: Pixels) -> None:
    data = filtered(pixels, rule)
    assert np.array_equal(read_png(data), pixels)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels)


@given(st.binary(max_size=200), st.integers(0, 120))
def test_hostile_bytes_get_a_sentence(noise: bytes, at: int) -> None:
    good = write_png(np.zeros((5, 5), np.uint8))
    for data in (noise, good[:at], good[:at] + noise + good[at:], good[: at % 60] + noise):
        if data[: len(good)] == good:
            continue
        with pytest.raises(BadRequest):
            read_png(data)


def test_a_small_file_that_claims_a_huge_image_is_refused() -> None:
    head = struct.pack(">IIBBBBB", 1 << 14, 1 << 14, 8, 0, 0, 0, 0)
    data = write_png(np.zeros((1, 1), np.uint8))
    chunk = b"IHDR" + head
    forged = data[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + data[33:]
    with pytest.raises(BadRequest, match="too large to show"):
        read_png(forged)


def test_images_lie_in_rows_on_black() -> None:
    images = np.full((5, 1, 2, 3), 9, np.uint8)
    sheet = tile(images, 2, gap=1)
    assert sheet.shape == (3 * 3 + 1, 2 * 4 + 1)
    assert int((sheet == 9).sum()) == 5 * 6
    assert tile(np.zeros((2, 3, 4, 4), np.uint8), 2).shape == (8, 14, 3)


@given(PIXELS, st.integers(1, 40), st.integers(1, 40))
def test_resizing_stays_within_what_was_there(pixels: Pixels, height: int, width: int) -> None:
    small = resize(pixels, height, width)
    assert small.shape == (height, width, *pixels.shape[2:])
    assert int(small.min()) >= int(pixels.min()) - 1
    assert int(small.max()) <= int(pixels.max()) + 1


def test_resizing_down_is_a_mean_and_not_a_sample() -> None:
    stripes = np.tile(np.array([0, 255], np.uint8), (64, 32))
    assert np.abs(resize(stripes, 8, 8).astype(int) - 127).max() <= 12


def test_the_middle_square() -> None:
    assert square(np.zeros((10, 4), np.uint8)).shape == (4, 4)
    assert square(np.arange(9, dtype=np.uint8)[None]).tolist() == [[4]]


@given(PIXELS, st.integers(1, 30))
def test_terminal_pictures_have_the_width_that_was_asked_for(pixels: Pixels, columns: int) -> None:
    lines = braille(pixels, columns)
    assert {len(line) for line in lines} == {columns}
    cells = half_blocks(pixels, columns)
    assert cells.shape[1:] == (columns, 2, 3)


def test_bright_is_dots_and_dark_is_none() -> None:
    assert braille(np.zeros((8, 8), np.uint8), 4) == ["⠀" * 4] * 2
    assert braille(np.full((8, 8), 255, np.uint8), 4) == ["⣿" * 4] * 2
    upper = half_blocks(np.array([[[255, 0, 0]], [[0, 0, 255]]], np.uint8), 1)
    assert upper.tolist() == [[[[255, 0, 0], [0, 0, 255]]]]
