"""Image chunks on disk: raw 8-bit pixels, image after image, each (C, H, W)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidRunFile
from shared.workloads.base import Data, DatasetManifest
from shared.workloads.data.image_files import Pixels


def images_of(manifest: DatasetManifest, shape: tuple[int, int, int]) -> list[int]:
    """Return the number of images of `shape` (C, H, W) in each chunk.

    Raises InvalidRunFile for a chunk whose bytes cannot hold the claimed number of images: memory
    is allocated by that number before a chunk is opened.
    """
    for index, chunk in enumerate(manifest.chunks):
        _check_size(manifest, index, chunk.size, shape)
    return [chunk.items for chunk in manifest.chunks]


def _check_size(
    manifest: DatasetManifest, index: int, size: int, shape: tuple[int, int, int]
) -> None:
    count, (channels, height, width) = manifest.chunks[index].items, shape
    expected = count * math.prod(shape)
    if count < 0 or size != expected:
        raise InvalidRunFile(
            f"chunk {index} of {manifest.name} has {size} bytes, but {count} images of"
            f" {height} x {width} pixels with {channels} channels have {expected}"
        )


class Images:
    """List of images, each (chunk, number in the chunk), read from memory-mapped chunks."""

    def __init__(self, data: Data, shape: tuple[int, int, int], rows: NDArray[np.int64]) -> None:
        self._data = data
        self._shape = shape
        self._rows = rows
        self._open: dict[int, Pixels] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, start: int, stop: int) -> Pixels:
        """Return images [start, stop) of the list, (B, C, H, W). Raises InvalidRunFile for bad
        chunks.
        """
        rows = self._rows[start:stop]
        out = np.empty((len(rows), *self._shape), np.uint8)
        for chunk in np.unique(rows[:, 0]).tolist():
            images = self._open.get(chunk)
            if images is None:
                images = self._open[chunk] = self._chunk(chunk)
            here = rows[:, 0] == chunk
            out[here] = images[rows[here, 1]]
        return out

    def _chunk(self, index: int) -> Pixels:
        manifest, path = self._data.manifest, self._data.chunk(index)
        _check_size(manifest, index, path.stat().st_size, self._shape)
        return np.memmap(path, np.uint8, "r", shape=(manifest.chunks[index].items, *self._shape))


def unit_range(pixels: Pixels) -> NDArray[np.float32]:
    """Convert 0 ... 255 to -1 ... 1."""
    floats: NDArray[np.float32] = pixels.astype(np.float32) / np.float32(127.5) - np.float32(1)
    return floats


def to_pixels(images: NDArray[np.float32]) -> Pixels:
    """Convert -1 ... 1 to 0 ... 255; NaN is black."""
    wide = np.nan_to_num((images + 1) * 127.5, nan=0.0)
    rounded: Pixels = np.clip(np.rint(wide), 0, 255).astype(np.uint8)
    return rounded
