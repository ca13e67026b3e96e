"""PNG files of 8-bit grey or colour pixels, written and read with nothing but zlib.

Samples of a version are drawn on the coordinator and shown in terminals, where no image library is
wanted. What is read may come from anywhere: sizes are bounded and every byte is accounted for.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shared.errors import BadRequest

Pixels = NDArray[np.uint8]  # (H, W) grey or (H, W, 3) colour

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOUR_TYPES = {0: 1, 2: 3}  # of the format -> channels
_SIDE_MAX = 1 << 14
_PIXELS_MAX = 1 << 24


def write_png(pixels: Pixels) -> bytes:
    """A PNG file of pixels (H, W) or (H, W, 3)."""
    height, width = pixels.shape[:2]
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    kind = next(kind for kind, count in _COLOUR_TYPES.items() if count == channels)
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # each line begins with its filter
    lines[:, 1:] = pixels.reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 9)
    return _SIGNATURE + b"".join(
        _chunk(name, data) for name, data in ((b"IHDR", head), (b"IDAT", body), (b"IEND", b""))
    )


def read_png(data: bytes) -> Pixels:
    """Pixels (H, W) or (H, W, 3) of a PNG with 8 bits a channel.

    Raises BadRequest for anything else.
    """
    if not data.startswith(_SIGNATURE):
        raise BadRequest("this is no PNG image")
    width = height = channels = 0
    packed = bytearray()
    for name, body in _chunks(data):
        if name == b"IHDR":
            width, height, channels = _size(body)
        elif name == b"IDAT":
            packed += body
    if not channels:
        raise BadRequest("this PNG image does not say how large it is")
    return _pixels(_unpack(bytes(packed), height * (1 + width * channels)), height, width, channels)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = len(_SIGNATURE)
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        end = at + 12 + length
        if end > len(data):
            break
        name, body = data[at + 4 : at + 8], data[at + 8 : end - 4]
        if zlib.crc32(name + body) != int.from_bytes(data[end - 4 : end], "big"):
            raise BadRequest("this PNG image is damaged")
        yield name, body
        if name == b"IEND":
            return
        at = end
    raise BadRequest("this PNG image ends too early")


def _size(head: bytes) -> tuple[int, int, int]:
    if len(head) != 13:
        raise BadRequest("this PNG image does not say how large it is")
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", head)
    if depth != 8 or kind not in _COLOUR_TYPES or interlaced:
        raise BadRequest("only PNG images of plain 8-bit grey or colour are shown")
    if not (0 < width <= _SIDE_MAX and 0 < height <= _SIDE_MAX and width * height <= _PIXELS_MAX):
        raise BadRequest(f"an image of {width} x {height} pixels is too large to show")
    return width, height, _COLOUR_TYPES[kind]


def _unpack(packed: bytes, size: int) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        lines = unpacker.decompress(packed, size)
    except zlib.error as error:
        raise BadRequest(f"this PNG image is damaged: {error}") from error
    if len(lines) != size:
        raise BadRequest("this PNG image has fewer pixels than it says")
    return lines


def _pixels(lines: bytes, height: int, width: int, channels: int) -> Pixels:
    """Undo the filter of each line (PNG specification, section 9)."""
    raw = np.frombuffer(lines, np.uint8).reshape(height, 1 + width * channels)
    out = np.zeros((height, width, channels), np.uint8)
    above: Pixels = np.zeros((width, channels), np.uint8)
    for y in range(height):
        filtered = raw[y, 1:].reshape(width, channels)
        match int(raw[y, 0]):
            case 0:
                out[y] = filtered
            case 1:
                out[y] = np.cumsum(filtered, axis=0, dtype=np.uint8)
            case 2:
                out[y] = filtered + above
            case 3 | 4 as rule:
                _from_neighbours(filtered, above, out[y], average=rule == 3)
            case other:
                raise BadRequest(f"this PNG image has a line of the unknown kind {other}")
        above = out[y]
    return out[:, :, 0] if channels == 1 else out


def _from_neighbours(filtered: Pixels, above: Pixels, line: Pixels, *, average: bool) -> None:
    """The two filters that need the pixel to the left, pixel by pixel."""
    left = corner = np.zeros(filtered.shape[1], np.int64)
    for x, value in enumerate(filtered):
        up = above[x].astype(np.int64)
        if average:
            guess = (left + up) // 2
        else:
            near = np.abs(np.stack([up - corner, left - corner, left + up - 2 * corner]))
            guess = np.where(
                (near[0] <= near[1]) & (near[0] <= near[2]),
                left,
                np.where(near[1] <= near[2], up, corner),
            )
        line[x] = (value + guess) & 0xFF
        left, corner = line[x].astype(np.int64), up
