"""Sources of images: folders, image files, and the digits of scikit-learn.

An image that cannot be decoded is skipped and recorded with name and reason; only a missing source
is an error. Limits bound the memory that any file takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import msgspec
import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from shared.errors import BadRequest
from shared.workloads.data.image_files import Format, Pixels, open_image
from shared.workloads.data.skipped_files import Skipped, no_source, walk

IMAGE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"}
)  # suffixes for which folders are searched
_FORMATS: tuple[Format, ...] = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# What to do with files of other kinds, by suffix.
_REMEDIES = {
    **dict.fromkeys((".heic", ".heif", ".avif", ".svg", ".pdf"), "save them as JPEG or PNG"),
    **dict.fromkeys((".zip", ".7z", ".rar", ".tar", ".gz"), "unpack them"),
}
_FILE_BYTES_MAX = 64 << 20
_PIXELS_MAX = 1 << 26
_SIDE_MIN = 2
_DIGITS = 1797  # number of digits in scikit-learn


class SourceImage(msgspec.Struct, frozen=True):
    """One image: pixels (H, W) or (H, W, 3), its name, and its label where known."""

    name: str
    pixels: Pixels
    label: str = ""


def read_pictures(
    sources: Iterable[str | Path | SourceImage], skipped: Skipped, side: int
) -> Iterator[SourceImage]:
    """Yield every image of `sources`, folders in sorted order, labelled by its folder.

    Large images are shrunk, to sides of at least 2 x `side` pixels. Raises InvalidRunFile for a
    missing source.
    """
    for source in sources:
        if isinstance(source, SourceImage):
            yield source
            continue
        path = Path(source)
        if path.is_dir():
            suffixes: Counter[str] = Counter()
            for file in walk(path, skipped=skipped):
                inside = file.relative_to(path)
                if file.suffix.lower() in IMAGE_SUFFIXES:
                    yield from _file(file, inside.as_posix(), skipped, side)
                else:
                    suffixes[file.suffix] += 1
            skipped.add_others(path, suffixes, _REMEDIES)
        elif path.is_file():
            yield from _file(path, path.name, skipped, side)
        else:
            raise no_source(path)


def digit_pictures() -> Iterator[SourceImage]:
    """Yield the 1,797 hand-written digits of 8 x 8 pixels that scikit-learn ships (Alpaydin and
    Kaynak 1998); without scikit-learn, as many digits of a font.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        yield from _drawn_digits()
        return
    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    for index, (image, label) in enumerate(zip(pixels, digits.target.tolist(), strict=True)):
        yield SourceImage(f"digit {index}", image, str(label))


def _drawn_digits() -> Iterator[SourceImage]:
    """Yield digits of a font in fixed sizes, rotations and positions."""
    rng = np.random.default_rng(0)
    fonts = [ImageFont.load_default(size=size) for size in (44, 50, 56)]
    for index in range(_DIGITS):
        label, font = str(index % 10), fonts[index % len(fonts)]
        image = Image.new("L", (64, 64))
        ImageDraw.Draw(image).text((32, 32), label, fill=255, font=font, anchor="mm")
        turn, dx, dy = rng.uniform((-15, -6, -4), (15, 6, 4))
        moved = image.rotate(turn, Image.Resampling.BILINEAR, translate=(round(dx), round(dy)))
        pixels = np.asarray(moved.resize((8, 8), Image.Resampling.BOX), np.uint8)
        yield SourceImage(f"digit {index}", pixels, label)


def _file(path: Path, name: str, skipped: Skipped, side: int) -> Iterator[SourceImage]:
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            skipped.add(f"{name}: larger than {_FILE_BYTES_MAX >> 20} MiB")
            return
        data = path.read_bytes()
    except OSError as error:
        skipped.add(f"{name}: {error.strerror or error}")
        return
    if data.startswith(b"PK"):
        skipped.add(f"{name}: it is an archive: unpack it first")
        return
    yield from _decoded(data, name, skipped, side)


def _decoded(data: bytes, name: str, skipped: Skipped, side: int) -> Iterator[SourceImage]:
    try:
        image = open_image(data, _FORMATS, _PIXELS_MAX, side=2 * side)
        ImageOps.exif_transpose(image, in_place=True)
    except BadRequest as error:
        skipped.add(f"{name}: cannot be decoded ({error.message})")
        return
    except Exception as error:  # damaged EXIF raises any of several errors
        skipped.add(f"{name}: its EXIF cannot be read ({error})")
        return
    if min(image.size) < _SIDE_MIN:
        skipped.add(f"{name}: {image.width} x {image.height} pixels are too few")
        return
    skipped.read += 1
    yield SourceImage(name, _pixels(image, side), PurePosixPath(name).parent.name)


def _pixels(image: Image.Image, side: int) -> Pixels:
    """Return an image in 8 bits, grey or colour, on white, not reduced below 2 x `side`."""
    picture = image
    factor = min(picture.size) // (2 * side)
    if picture.mode.startswith("I;16") or picture.mode == "I":  # 16 bits a pixel
        wide = np.asarray(picture).astype(np.int64)
        picture = Image.fromarray((wide >> 8).clip(0, 255).astype(np.uint8))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture).convert("RGB")
    if picture.mode not in ("L", "RGB"):
        picture = picture.convert("L" if picture.mode in ("1", "LA") else "RGB")
    if factor > 1:
        picture = picture.reduce(factor)
    return np.asarray(picture, np.uint8)
