"""Picture of a run for links that people share: its name, its newest figures and its curve.

Messengers and social sites show a PNG of this size beside a link, and no SVG.
"""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw as Canvas

WIDTH, HEIGHT = 1200, 630
MARGIN, CURVE_TOP = 64, 280
GROUND, TEXT, QUIET, STRONG = "#10151a", "#e6ebf0", "#9aa7b3", "#6cb4ff"  # the page's dark theme
CHARS_MAX = 44  # characters of one line


class SharedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Words and curve of the picture."""

    name: str
    server: str
    figures: Sequence[str]  # one line each, the most important first
    points: Sequence[tuple[float, float]]  # curve, 0 to 1 from the left and from the top


def share_picture(run: SharedRun) -> bytes:
    """Return the picture of a run as a PNG."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH, HEIGHT), GROUND)
    draw = ImageDraw.Draw(image)
    lines = [(run.name, 64, TEXT), (run.server, 30, QUIET)]
    lines += [(figure, 34, TEXT) for figure in run.figures[:2]]
    top = MARGIN - 16
    for text, size, colour in lines:
        draw.text((MARGIN, top), _drawable(text), colour, ImageFont.load_default(size))
        top += size + 16
    if run.points:
        _draw_curve(draw, run.points)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _draw_curve(draw: Canvas, points: Sequence[tuple[float, float]]) -> None:
    width, height = WIDTH - 2 * MARGIN, HEIGHT - CURVE_TOP - MARGIN
    places = [(MARGIN + width * x, CURVE_TOP + height * y) for x, y in points]
    draw.line([(MARGIN, HEIGHT - MARGIN), (WIDTH - MARGIN, HEIGHT - MARGIN)], QUIET, 2)
    draw.line(places, STRONG, 6, joint="curve")
    x, y = places[-1]
    draw.ellipse((x - 9, y - 9, x + 9, y + 9), STRONG)


def _drawable(text: str) -> str:
    """Return a text in the letters of Pillow's own font, without accents, cut to one line."""
    bare = unicodedata.normalize("NFKD", text.replace("ß", "ss")).encode("ascii", "ignore")
    letters = " ".join(bare.decode("ascii").split())
    return letters if len(letters) <= CHARS_MAX else f"{letters[: CHARS_MAX - 3]}..."
