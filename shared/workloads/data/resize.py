"""Conversions of images: tiling, resizing, grey and colour, and characters for a terminal."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shared.workloads.data.image_files import Pixels

_BLANK = 0x2800  # a braille sign without dots
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])  # 4 rows of 2
# Ordered dithering (Bayer 1973): the brightness, in sixteenths, above which each dot is set.
_BAYER = np.array([[0, 8, 2, 10], [12, 4, 14, 6], [3, 11, 1, 9], [15, 7, 13, 5]])
_GREY = np.array([0.299, 0.587, 0.114], np.float32)


def tile(images: Pixels, columns: int, gap: int = 2) -> Pixels:
    """Return images (N, C, H, W) in rows of `columns` on black, as (H', W') or (H', W', 3)."""
    N, C, H, W = images.shape
    rows = -(-N // columns)
    sheet = np.zeros((C, rows * (H + gap) + gap, columns * (W + gap) + gap), np.uint8)
    for index, image in enumerate(images):
        y = gap + index // columns * (H + gap)
        x = gap + index % columns * (W + gap)
        sheet[:, y : y + H, x : x + W] = image
    return sheet[0] if C == 1 else np.ascontiguousarray(sheet.transpose(1, 2, 0))


def grey(pixels: Pixels) -> Pixels:
    """Return the brightness (H, W) of grey or colour pixels."""
    return pixels if pixels.ndim == 2 else (pixels[..., :3] @ _GREY).astype(np.uint8)


def resize(pixels: Pixels, height: int, width: int) -> Pixels:
    """Resize by a triangle filter, which widens as the image shrinks: enlarged images are smooth,
    reduced ones have no aliasing.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    image = Image.fromarray(pixels)
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR), np.uint8)


def coloured(pixels: Pixels) -> Pixels:
    """Return grey or colour pixels as red, green and blue."""
    return np.repeat(pixels[..., None], 3, axis=-1) if pixels.ndim == 2 else pixels


def shrunk(pixels: Pixels, side: int) -> Pixels:
    """Return an image in colour, scaled down if its longer side is longer than `side`."""
    scale = min(1.0, side / max(pixels.shape[:2]))
    height, width = (max(1, round(side_length * scale)) for side_length in pixels.shape[:2])
    return coloured(resize(pixels, height, width))


def square(pixels: Pixels) -> Pixels:
    """Return the middle square of an image."""
    height, width = pixels.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return pixels[top : top + side, left : left + side]


def corner(pixels: Pixels) -> Pixels:
    """Return the upper left quarter of a sheet of images, for terminals, which are small."""
    return pixels[: -(-pixels.shape[0] // 2), : -(-pixels.shape[1] // 2)]


def rows_for(pixels: Pixels, columns: int) -> int:
    """Return an image's height in cells, which are twice as high as wide, at this number of
    columns.
    """
    height, width = map(int, pixels.shape[:2])
    return max(1, round(columns * height / width / 2))


def braille(pixels: Pixels, columns: int) -> list[str]:
    """Return an image in dots, two by four a character, dithered, for text without colour."""
    rows = rows_for(pixels, columns)
    small = resize(grey(pixels), rows * 4, columns * 2)
    threshold = np.tile((_BAYER + 0.5) * 16, (rows, -(-columns // 2)))[:, : columns * 2]
    dots = (small > threshold).reshape(rows, 4, columns, 2)
    signs = _BLANK + np.einsum("yrxc,rc->yx", dots, _DOTS)
    return ["".join(map(chr, line)) for line in signs.tolist()]


def half_blocks(pixels: Pixels, rows: int, columns: int) -> NDArray[np.uint8]:
    """Return colours for a terminal: (rows, columns, 2, 3), an upper and lower pixel a cell."""
    colour = coloured(resize(pixels, rows * 2, columns))
    return colour.reshape(rows, 2, columns, 3).transpose(0, 2, 1, 3)
