"""Pictures in a terminal: two pixels to a character cell, the upper as its ink and the lower as its
paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from rich.cells import cell_len

from volunteer.control.events import Picture
from volunteer.tui.text import Line, count, left, printable_lines

UPPER = "▀"
CELLS_MIN = 8  # a picture in fewer shows nothing
COARSE = 2.6  # pixels in one, at most: rather less of it than a blur
GAP = 2
Rgb = tuple[int, int, int]


def size_in(picture: Picture, cells: int, rows: int) -> tuple[int, int]:
    """The most cells and rows that keep its shape."""
    wide = max(1, min(cells, round(rows * 2 * picture.width / picture.height)))
    high = max(1, min(rows, round(wide * picture.height / picture.width / 2)))
    return wide, high


@lru_cache(maxsize=32)
def corner(picture: Picture) -> Picture:
    """The upper left quarter: of many images side by side, as many as can be told apart."""
    width, height = -(-picture.width // 2), -(-picture.height // 2)
    rows = [picture.pixels[y * picture.width * 3 :][: width * 3] for y in range(height)]
    return Picture(width=width, height=height, pixels=b"".join(rows))


@lru_cache(maxsize=32)
def half_blocks(picture: Picture, cells: int, rows: int) -> tuple[Line, ...]:
    """The picture in `cells` x `rows`, its roles the colours of each cell."""
    points = [
        [_mean(picture, x, y, cells, rows * 2) for x in range(cells)] for y in range(rows * 2)
    ]
    return tuple(
        tuple(
            (UPPER, f"{_hex(ink)}/{_hex(paper)}") for ink, paper in zip(upper, lower, strict=True)
        )
        for upper, lower in zip(points[::2], points[1::2], strict=True)
    )


def before_and_after(
    first: tuple[int, Picture] | None, last: tuple[int, Picture], cells: int, rows: int
) -> list[Line]:
    """Return what the first and the newest version drew, side by side where there is room."""
    half = (cells - GAP) // 2
    shown = [last] if first is None or first[0] == last[0] or half < CELLS_MIN else [first, last]
    room = cells if len(shown) == 1 else half
    columns = [_titled(version, picture, room, rows) for version, picture in shown]
    high = max(map(len, columns))
    empty: Line = ((" " * room, "text"),)
    lines: list[Line] = []
    for y in range(high):
        cut = [column[y] if y < len(column) else empty for column in columns]
        lines.append(cut[0] if len(cut) == 1 else (*cut[0], (" " * GAP, "text"), *cut[1]))
    return lines


def _titled(version: int, picture: Picture, cells: int, rows: int) -> Sequence[Line]:
    title: Line = ((left(f"version {version}", cells), "title"),)
    if rows < 2:
        return [title]
    while picture.width > COARSE * size_in(picture, cells, rows - 1)[0]:
        picture = corner(picture)
    wide, high = size_in(picture, cells, rows - 1)
    margin = (" " * (cells - wide), "text")
    return [title, *((*line, margin) for line in half_blocks(picture, wide, high))]


def _mean(picture: Picture, x: int, y: int, wide: int, high: int) -> Rgb:
    """The mean colour of what one of `wide` x `high` points covers."""
    left_, right = x * picture.width // wide, max(1, (x + 1) * picture.width // wide)
    top, bottom = y * picture.height // high, max(1, (y + 1) * picture.height // high)
    left_, top = min(left_, picture.width - 1), min(top, picture.height - 1)
    right, bottom = max(right, left_ + 1), max(bottom, top + 1)
    sums, count = [0, 0, 0], (right - left_) * (bottom - top)
    for row in range(top, bottom):
        for at in range(row * picture.width + left_, row * picture.width + right):
            for channel in range(3):
                sums[channel] += picture.pixels[3 * at + channel]
    return sums[0] // count, sums[1] // count, sums[2] // count


def _hex(colour: Rgb) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


# Text that is a picture: a board, images in dots. Shown as it is, never wrapped.


def drawn(text: str) -> bool:
    """Return True if a text is a picture or a board: its last lines are all as wide."""
    rows = text.splitlines()[-3:]
    return len(rows) == 3 and len({cell_len(row) for row in rows}) == 1


def picture(preview: str, metrics: dict[str, float], cells: int, height: int) -> list[Line]:
    """Lines as they are, and beside or below them the numbers of the work."""
    rows = printable_lines(preview)
    facts: list[Line] = [
        ((left(name.replace("_", " "), 17), "dim"), (count(value, 4), "value"))
        for name, value in list(metrics.items())[:height]
    ]
    wide = max(cell_len(row) for row in rows)
    if wide + 28 > cells:
        return ([((row, "text"),) for row in rows] + facts)[:height]
    nothing: Line = ()
    facts += [nothing] * (len(rows) - len(facts))
    rows += [""] * (len(facts) - len(rows))
    beside = zip(rows[:height], facts[:height], strict=True)
    return [((left(row, wide + 3), "text"), *fact) for row, fact in beside]
