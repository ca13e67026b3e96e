"""The picture of a run for who shares a link to it (OpenGraph): name, figures and curve."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

from PIL import Image, ImageDraw, ImageFont

from shared.text import printable

SIZE = (1200, 630)
MARGIN = 70
PAPER, INK, QUIET, STRONG = "#10151a", "#e6ebf0", "#9aa7b3", "#6cb4ff"
NAME_CHARS, LINE_CHARS, LINES = 30, 58, 2
CURVE = (MARGIN, 400, 1200 - MARGIN, 630 - MARGIN)  # left, top, right, bottom


def card(name: str, about: str, figures: Sequence[str], curve: Sequence[float]) -> bytes:
    """Draw a PNG of 1200 x 630: `figures` in one line, `curve` from the first version on."""
    image = Image.new("RGB", SIZE, PAPER)
    draw = ImageDraw.Draw(image)
    draw.text((MARGIN, 60), _cut(name, NAME_CHARS), INK, ImageFont.load_default(72))
    for number, line in enumerate(_lines(about)):
        draw.text((MARGIN, 165 + 48 * number), line, QUIET, ImageFont.load_default(36))
    draw.text((MARGIN, 300), " · ".join(figures), STRONG, ImageFont.load_default(40))
    places = _places(curve)
    if len(places) > 1:
        draw.line(places, STRONG, 6, joint="curve")
    out = BytesIO()
    image.quantize(64).save(out, "PNG", optimize=True)
    return out.getvalue()


def _cut(text: str, most: int) -> str:
    """Text that the built-in font can draw, so long at most."""
    plain = printable(text, most).encode("latin-1", "replace").decode("latin-1")
    return " ".join(plain.split())


def _lines(text: str) -> list[str]:
    lines = [""]
    for word in _cut(text, LINE_CHARS * LINES).split():
        if len(lines[-1]) + len(word) + 1 > LINE_CHARS and len(lines) < LINES:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return [line[: LINE_CHARS + 10] for line in lines]


def _places(curve: Sequence[float]) -> list[tuple[float, float]]:
    if len(curve) < 2:
        return []
    left, top, right, bottom = CURVE
    low, high = min(curve), max(curve)
    step = (right - left) / (len(curve) - 1)
    span = (high - low) or 1.0
    return [
        (left + n * step, top + (bottom - top) * (high - y) / span) for n, y in enumerate(curve)
    ]
