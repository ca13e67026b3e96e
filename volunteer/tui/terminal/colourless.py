"""`NO_COLOR`: no colour reaches the terminal, neither of text nor of background, so that a light
terminal stays light. Bold, dim and reversed text replace the colours.
"""

from __future__ import annotations

from rich.color import Color as RichColor
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter
from typing_extensions import override

GROUND = 0.12  # a background that differs more from the page's becomes reversed text
DIM = 0.35  # text with less contrast to its background becomes dim


class Colourless(LineFilter):
    """Removes the colours from every line."""

    @override
    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        ground = background.brightness
        return [
            Segment(segment.text, _plain(segment.style, ground), segment.control)
            for segment in segments
        ]


def _plain(style: Style | None, ground: float) -> Style | None:
    """Return a style without colours; None for None. `ground` is the brightness, 0..1, of the
    page's background.
    """
    if style is None:
        return None
    paper = _brightness(style.bgcolor)
    ink = _brightness(style.color)
    inverted = paper is not None and abs(paper - ground) > GROUND
    faint = ink is not None and abs(ink - (ground if paper is None else paper)) < DIM
    return Style(
        bold=style.bold,
        dim=((style.dim or faint) and not inverted) or None,
        italic=style.italic,
        underline=style.underline,
        strike=style.strike,
        reverse=bool(style.reverse) != inverted or None,
        meta=style.meta or None,
    )


def _brightness(colour: RichColor | None) -> float | None:
    """Return the brightness of a colour, 0..1; None for the terminal's own."""
    if colour is None or colour.is_default:
        return None
    return Color.from_rich_color(colour).brightness
