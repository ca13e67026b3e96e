"""Image files and what is made of pixels for terminals: exact, and bounded by the length of a
file.
"""

from __future__ import annotations

import io
import struct
import time
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from PIL import Image

from shared.errors import BadRequest
from shared.workloads.data.image_files import Pixels, open_image, read_png, write_png
from shared.workloads.data.resize import braille, half_blocks, resize, rows_for, square, tile

SHAPES = st.tuples(st.integers(1, 20), st.integers(1, 20)) | st.tuples(
    st.integers(1, 20), st.integers(1, 20), st.just(3)
)
PIXELS = SHAPES.flatmap(lambda shape: arrays(np.uint8, shape))


@given(PIXELS)
def test_what_is_written_is_read_back(pixels: Pixels) -> None:
    data = write_png(pixels)
    assert np.array_equal(read_png(data), pixels)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels)


@given(st.binary(max_size=200), st.integers(0, 120))
def test_hostile_bytes_get_a_sentence(noise: bytes, at: int) -> None:
    good = write_png(np.zeros((5, 5), np.uint8))
    for data in (noise, good[:at], good[:at] + noise + good[at:], good[: at % 60] + noise):
        if data.startswith(good[:-4]):  # whole but for the check sum of its end mark
            continue
        with pytest.raises(BadRequest):
            read_png(data)


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, colour: int, lines: bytes) -> bytes:
    """A file of 8 bits a channel that claims a size, whatever `lines` hold."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(lines, 9))
    return b"\x89PNG\r\n\x1a\n" + head + body + chunk(b"IEND", b"")


def test_a_picture_of_the_three_chunks_that_must_be_there_is_read() -> None:
    grey = png(3, 2, 0, b"\0\1\2\3\0\4\5\6")
    assert read_png(grey).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert read_png(png(1, 1, 2, b"\0\7\x08\x09")).tolist() == [[[7, 8, 9]]]


PAETH = (b"\4" + bytes(600 * 3)) * 600  # the filter that costs most, on every line
PLAIN = png(600, 600, 2, bytes((1 + 600 * 3) * 600))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        pytest.param(png(1 << 14, 1 << 14, 0, b""), "more than", id="dimensions"),
        pytest.param(png(5792, 5792, 2, bytes(1000)), "cannot hold the 5792 x 5792", id="short"),
        pytest.param(png(1 << 11, 1 << 12, 2, bytes(1 << 20)), "cut off", id="deflate"),
        pytest.param(png(600, 600, 2, PAETH), "", id="filters"),
    ],
)
def test_a_small_file_costs_little_whatever_it_claims(data: bytes, sentence: str) -> None:
    """Five honest pictures of 600 x 600 at most, in the CPU time of this thread."""
    assert len(data) < 2000
    honest, took = [], []
    tracemalloc.start()
    for _ in range(5):
        began = time.thread_time()
        if sentence:
            with pytest.raises(BadRequest, match=sentence):
                read_png(data)
        else:
            assert read_png(data).shape == (600, 600, 3)
        took.append(time.thread_time() - began)
    held = tracemalloc.get_traced_memory()[1]
    for _ in took:
        began = time.thread_time()
        read_png(PLAIN)
        honest.append(time.thread_time() - began)
    tracemalloc.stop()
    assert min(took) < 5 * min(honest)
    assert held < 8 << 20


def test_a_file_that_is_cut_off_is_refused_with_a_sentence() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG")
    for whole in (write_png(pixels), out.getvalue()):
        for share in (0.3, 0.6, 0.9):
            with pytest.raises(BadRequest, match="the image is damaged or cut off: "):
                open_image(whole[: int(len(whole) * share)], ("PNG", "JPEG"), 1 << 20)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_other_formats_are_never_decoded(kind: str) -> None:
    out = io.BytesIO()
    Image.new("RGB", (4, 4)).save(out, kind)
    with pytest.raises(BadRequest, match="not a PNG or JPEG image"):
        open_image(out.getvalue(), ("PNG", "JPEG"), 1 << 20)


def test_a_jpeg_of_very_many_scans_is_refused() -> None:
    out = io.BytesIO()
    Image.new("RGB", (64, 64)).save(out, "JPEG", progressive=True)
    data = out.getvalue()
    assert open_image(data, ("JPEG",), 1 << 20).size == (64, 64)
    scan = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(BadRequest, match="more than 100 scans"):
        open_image(data[:-2] + scan * 100 + data[-2:], ("JPEG",), 1 << 20)


@pytest.mark.parametrize("mode", ["1", "P", "RGBA", "LA"])
def test_only_plain_grey_and_colour_are_shown(mode: str) -> None:
    out = io.BytesIO()
    Image.new("RGB", (4, 4)).convert(mode).save(out, "PNG")
    with pytest.raises(BadRequest, match="only PNG images of plain 8-bit grey or colour"):
        read_png(out.getvalue())


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


def by_definition(pixels: Pixels, height: int, width: int) -> NDArray[np.float64]:
    """The triangle filter in exact arithmetic: the pixels of datasets that were built before."""

    def weights(size: int, wanted: int) -> NDArray[np.float64]:
        ratio = size / wanted
        centres = (np.arange(wanted) + 0.5) * ratio - 0.5
        near = np.maximum(0, 1 - np.abs(np.arange(size) - centres[:, None]) / max(1.0, ratio))
        shares: NDArray[np.float64] = near / near.sum(axis=1, keepdims=True)
        return shares

    down = np.tensordot(weights(pixels.shape[0], height), pixels.astype(np.float64), 1)
    both = np.tensordot(weights(pixels.shape[1], width), down, (1, 1))
    return np.moveaxis(both, 0, 1)


@given(PIXELS, st.integers(1, 40), st.integers(1, 40))
def test_resizing_is_the_triangle_filter_but_for_rounding(
    pixels: Pixels, height: int, width: int
) -> None:
    expected = by_definition(pixels, height, width)
    assert np.abs(resize(pixels, height, width) - expected).max() <= 1.01


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
    rows = rows_for(pixels, columns)
    assert len(lines) == rows
    assert half_blocks(pixels, rows, columns).shape == (rows, columns, 2, 3)


def test_bright_is_dots_and_dark_is_none() -> None:
    assert braille(np.zeros((8, 8), np.uint8), 4) == ["⠀" * 4] * 2
    assert braille(np.full((8, 8), 255, np.uint8), 4) == ["⣿" * 4] * 2
    upper = half_blocks(np.array([[[255, 0, 0]], [[0, 0, 255]]], np.uint8), 1, 1)
    assert upper.tolist() == [[[[255, 0, 0], [0, 0, 255]]]]
