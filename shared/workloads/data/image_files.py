"""Image files, written and read by Pillow: PNG, JPEG and four other kinds, recognised by their
content.

Files may be hostile. The header is read first, and an image that is too large, or too large for so
short a file, is refused before decoding, so that the length of a file bounds its cost. The formats'
limits: deflate expands a byte to at most 1,032, and a block of 8 x 8 pixels takes at least one bit
of a JPEG file.
"""

from __future__ import annotations

import warnings
from io import BytesIO
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from shared.errors import BadRequest

Pixels = NDArray[np.uint8]  # (H, W) grey or (H, W, 3) colour
Format = Literal["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]

# pixels of the largest shown image: 64 samples of 512 x 512 pixels have 17 million
SHOWN_PIXELS_MAX = 1 << 25
# The other formats come only from the organiser: the number of pixels is limited, not the bytes.
_PIXELS_PER_BYTE = {"PNG": 8 * 1032, "JPEG": 512}
_PIXELS_PER_BYTE_MAX = 1 << 26
_JPEG_SCAN = b"\xff\xda"  # begins a scan; within a scan 0xff is escaped
_JPEG_SCANS_MAX = 100  # progressive files have about ten, and each passes over all pixels
# zlib level. Level 9 makes files 2 % smaller in 3.4 times the time (64 digits of 64 x 64 pixels),
# 16 % smaller in 8 times the time (512 x 512 pixels).
_COMPRESSION = 6

# Pillow only warns of an image with more than 89 million pixels; here it is refused.
warnings.simplefilter("error", Image.DecompressionBombWarning)


def write_png(pixels: Pixels) -> bytes:
    """Return a PNG file of pixels (H, W) or (H, W, 3)."""
    out = BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=_COMPRESSION)
    return out.getvalue()


def read_png(data: bytes) -> Pixels:
    """Return the pixels (H, W) or (H, W, 3) of a PNG, for display. Raises BadRequest."""
    image = open_image(data, ("PNG",), SHOWN_PIXELS_MAX)
    if image.mode not in ("L", "RGB"):
        raise BadRequest("only PNG images of plain 8-bit grey or colour are shown")
    return np.asarray(image, np.uint8)


def open_image(
    data: bytes, formats: tuple[Format, ...], pixels_max: int, *, side: int = 0
) -> Image.Image:
    """Decode an image in one of `formats`, with at most `pixels_max` pixels.

    A JPEG may be scaled down, with both sides at least `side` long, if that is not 0. Raises
    BadRequest, with a sentence, for a file of another format, and for a file that is too large,
    damaged or truncated.
    """
    try:
        image = _open_checked(data, formats, pixels_max)
        if side:
            image.draft(None, (side, side))
        image.load()
    except (BadRequest, MemoryError):
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise BadRequest(f"the image has more than {pixels_max:,} pixels") from error
    except UnidentifiedImageError as error:
        raise BadRequest(f"not a {' or '.join(formats)} image") from error
    except Exception as error:  # decoders raise anything from OSError to struct.error
        reason = str(error) or type(error).__name__
        raise BadRequest(f"the image is damaged or cut off: {reason}") from error
    return image


def _open_checked(data: bytes, formats: tuple[Format, ...], pixels_max: int) -> Image.Image:
    """Return an image, not decoded yet, whose header is within the limits. Raises BadRequest, and
    Pillow's errors.
    """
    image = Image.open(BytesIO(data), formats=formats)
    width, height = image.size
    if width * height > pixels_max:
        raise BadRequest(f"{width} x {height} pixels are more than the {pixels_max:,} allowed")
    if width * height > _PIXELS_PER_BYTE.get(image.format or "", _PIXELS_PER_BYTE_MAX) * len(data):
        raise BadRequest(f"{len(data)} bytes cannot hold the {width} x {height} pixels they claim")
    if image.format == "PNG":
        # checks the sums and the end, which decoding ignores, and closes the image
        image.verify()
        image = Image.open(BytesIO(data), formats=formats)
    elif image.format == "JPEG" and data.count(_JPEG_SCAN) > _JPEG_SCANS_MAX:
        raise BadRequest(f"the image has more than {_JPEG_SCANS_MAX} scans")
    return image
