"""Curves as dots in character cells: every pixel column shows the lowest and highest of its points,
so that no spike is lost.

The number of strokes grows with the width, not with the points. Infinite and NaN points are left
out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

Point: TypeAlias = tuple[float, float]
Column: TypeAlias = tuple[float, float, float, float]  # first, last, lowest, highest


class Alphabet(msgspec.Struct, frozen=True, kw_only=True):
    """Signs with dots: `across` x `down` dots in a cell."""

    across: int
    down: int
    bits: tuple[tuple[int, ...], ...]  # [column][row] of a cell, from the top
    signs: str  # indexed by the sum of the bits of a sign's dots


BRAILLE = Alphabet(
    across=2,
    down=4,
    bits=((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80)),
    signs=" " + "".join(chr(0x2800 + dots) for dots in range(1, 256)),
)
PLAIN = Alphabet(across=1, down=2, bits=((1, 2),), signs=" '.:")


class PlotFrame(msgspec.Struct, frozen=True, kw_only=True):
    """Visible range of both axes."""

    left: float
    right: float
    low: float
    high: float

    def across(self, x: float, pixels: int) -> int:
        return _place(x, self.left, self.right, pixels)

    def up(self, y: float, pixels: int) -> int:
        """Return the pixel row of a value, counted from the bottom."""
        return _place(y, self.low, self.high, pixels)


def _place(value: float, start: float, stop: float, pixels: int) -> int:
    # halved first: the difference of two large floats may overflow
    span = stop / 2 - start / 2
    share = (value / 2 - start / 2) / span if span > 0 else 0.5
    return min(pixels - 1, max(0, round(share * (pixels - 1))))


def finite(points: Iterable[Point]) -> list[Point]:
    """Return the points that can be drawn."""
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def frame(series: Sequence[Sequence[Point]], *, right: float | None = None) -> PlotFrame | None:
    """Return a frame around all points with a small margin; None without points."""
    points = [p for one in series for p in finite(one)]
    if not points:
        return None
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low, high = min(ys), max(ys)
    margin = (high / 2 - low / 2) / 10 or abs(high) * 0.05 or 1.0
    low, high = max(-1e308, low - margin), min(1e308, high + margin)
    end = max(xs) if right is None or not math.isfinite(right) else max(*xs, right)
    return PlotFrame(left=min(xs), right=end, low=low, high=high)


def columns(points: Sequence[Point], view: PlotFrame, pixels: int) -> list[Column | None]:
    """Return first, last, lowest and highest value of every pixel column, None for a column without
    points; `points` are sorted by x.
    """
    spans: list[Column | None] = [None] * pixels
    for x, y in finite(points):
        if not view.left <= x <= view.right:
            continue
        at = view.across(x, pixels)
        old = spans[at]
        spans[at] = (y, y, y, y) if old is None else (old[0], y, min(old[2], y), max(old[3], y))
    return spans


def line_strokes(
    points: Sequence[Point], view: PlotFrame, wide: int, high: int
) -> list[tuple[int, int, int]]:
    """Return vertical strokes (column, from, to) in pixels from the bottom, which form a line
    without gaps.
    """
    strokes: list[tuple[int, int, int]] = []
    before: tuple[int, int] | None = None  # end of the line so far: column, row
    for at, column in enumerate(columns(points, view, wide)):
        if column is None:
            continue
        first, last, low, top = (view.up(value, high) for value in column)
        if before is not None:
            strokes += _joined(before, (at, first))
        strokes.append((at, low, top))
        before = (at, last)
    return strokes


def _joined(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Return the strokes of a straight line between two pixels, without the start."""
    (x0, y0), (x1, y1) = start, end
    steps = x1 - x0
    strokes = []
    previous = y0
    for step in range(1, steps + 1):
        y = y0 + round((y1 - y0) * step / steps)
        if y > previous:
            strokes.append((x0 + step, previous + 1, y))
        elif y < previous:
            strokes.append((x0 + step, y, previous - 1))
        else:
            strokes.append((x0 + step, y, y))
        previous = y
    return strokes


def dots(
    points: Sequence[Point], size: tuple[int, int], view: PlotFrame, alphabet: Alphabet = BRAILLE
) -> list[list[int]]:
    """Return the bits of every cell, [row][column] from the top, for `size` (width, height)."""
    width, height = size
    cells = [[0] * width for _ in range(height)]
    if width <= 0 or height <= 0:
        return cells
    across, down = alphabet.across, alphabet.down
    pixels = height * down
    masks = [_masks(bits) for bits in alphabet.bits]
    for x, low, top in line_strokes(points, view, width * across, pixels):
        column, mask = x // across, masks[x % across]
        start, stop = pixels - 1 - top, pixels - 1 - low  # rows from the top, both inclusive
        for row in range(start // down, stop // down + 1):
            begin = max(start - row * down, 0)
            end = min(stop - row * down, down - 1)
            cells[row][column] |= mask[begin][end]
    return cells


def _masks(bits: tuple[int, ...]) -> list[list[int]]:
    """Return a table, [first row][last row], of a column's bits summed between two rows."""
    return [[sum(bits[a : b + 1]) for b in range(len(bits))] for a in range(len(bits))]


def average(points: Sequence[Point]) -> list[Point]:
    """Return the running mean of a noisy curve over about a fifteenth of its points, 5 to 60."""
    good = finite(points)
    if len(good) < 3:
        return []
    keep = 1 - 2 / (min(60.0, max(5.0, len(good) / 15)) + 1)
    total = weight = 0.0
    smooth = []
    for x, y in good:
        total = total * keep + y * (1 - keep)
        weight = weight * keep + (1 - keep)
        smooth.append((x, total / weight))
    return smooth
