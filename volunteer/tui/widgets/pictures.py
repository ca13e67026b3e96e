"""Pictures in a terminal: two pixels a character cell, text colour above, background below."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from rich.cells import cell_len

from volunteer.control.events import Picture
from volunteer.i18n.catalogue import _
from volunteer.tui.text import Line, left, printable_lines, short_number

if TYPE_CHECKING:
    from shared.workloads.data.image_files import Pixels

UPPER = "▀"
CELLS_MIN = 8  # smaller pictures are not recognisable
COARSE = 2.6  # most pixels across a cell; of a larger picture only a part is shown
GAP = 2
SIDE_MAX = 1024  # longer side of a shown picture, in pixels


def decoded(png: bytes) -> Picture:
    """Return a PNG's pixels, its longer side at most `SIDE_MAX`. Raises BadRequest for an unusable
    PNG.
    """
    from shared.workloads.data.image_files import read_png
    from shared.workloads.data.resize import shrunk

    small = shrunk(read_png(png), SIDE_MAX)
    return Picture(width=small.shape[1], height=small.shape[0], pixels=small.tobytes())


def png_of(picture: Picture) -> bytes:
    """Return a picture as a PNG."""
    from shared.workloads.data.image_files import write_png

    return write_png(_pixels(picture))


def _pixels(picture: Picture) -> Pixels:
    import numpy as np

    shape = (picture.height, picture.width, 3)
    return np.frombuffer(picture.pixels, np.uint8).reshape(shape)


def _visible_part(picture: Picture, cells: int, rows: int) -> tuple[Pixels, int, int]:
    """Return the part of a picture that is recognisable within `cells` and `rows`, and the cells
    and rows that it fills.
    """
    from shared.workloads.data.resize import corner

    pixels = _pixels(picture)
    while pixels.shape[1] > COARSE * size_in((pixels.shape[1], pixels.shape[0]), cells, rows)[0]:
        pixels = corner(pixels)
    return pixels, *size_in((pixels.shape[1], pixels.shape[0]), cells, rows)


def size_in(shape: tuple[int, int], cells: int, rows: int) -> tuple[int, int]:
    """Return the most cells and rows that keep the shape (pixels wide, pixels high)."""
    across, down = shape
    wide = max(1, min(cells, round(rows * 2 * across / down)))
    high = max(1, min(rows, round(wide * down / across / 2)))
    return wide, high


@lru_cache(maxsize=32)
def half_blocks(picture: Picture, cells: int, rows: int) -> tuple[Line, ...]:
    """Return the picture in at most `cells` x `rows`, in its shape; a role is the two colours of a
    cell.

    A sheet of many images is cut to the upper left ones, as many as can be told apart.
    """
    from shared.workloads.data import resize  # imported with the first picture

    pixels, wide, high = _visible_part(picture, cells, rows)
    pairs = resize.half_blocks(pixels, high, wide).tolist()
    return tuple(
        tuple((UPPER, f"{_hex(ink)}/{_hex(paper)}") for ink, paper in row) for row in pairs
    )


SHADES = " .:-=+*#%@"  # from black to white


@lru_cache(maxsize=8)
def shades(picture: Picture, cells: int, rows: int) -> tuple[Line, ...]:
    """Return the picture in plain characters, one for each brightness."""
    from shared.workloads.data import resize

    pixels, wide, high = _visible_part(picture, cells, rows)
    small = resize.resize(resize.grey(pixels), high, wide)
    level = small.astype(int) * (len(SHADES) - 1) // 255
    return tuple((("".join(SHADES[n] for n in row), "text"),) for row in level.tolist())


def before_and_after(
    first: tuple[int, Picture] | None, last: tuple[int, Picture], cells: int, rows: int
) -> list[Line]:
    """Return the pictures of the first and the newest version, side by side if there is room."""
    half = (cells - GAP) // 2
    pictures = [last] if first is None or first[0] == last[0] or half < CELLS_MIN else [first, last]
    room = cells if len(pictures) == 1 else half
    columns = [_titled(version, picture, room, rows) for version, picture in pictures]
    high = max(map(len, columns))
    empty: Line = ((" " * room, "text"),)
    lines: list[Line] = []
    for y in range(high):
        cut = [column[y] if y < len(column) else empty for column in columns]
        lines.append(cut[0] if len(cut) == 1 else (*cut[0], (" " * GAP, "text"), *cut[1]))
    return lines


def _titled(version: int, picture: Picture, cells: int, rows: int) -> Sequence[Line]:
    title: Line = ((left(_("version {version}", version=version), cells), "title"),)
    if rows < 2:
        return [title]
    return [
        title,
        *(
            (*line, (" " * (cells - len(line)), "text"))
            for line in half_blocks(picture, cells, rows - 1)
        ),
    ]


def _hex(colour: Sequence[int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def is_drawing(text: str) -> bool:
    """Return True if a text is a drawing (a board, a picture in dots), which is never wrapped: its
    last three lines are equally wide.
    """
    rows = text.splitlines()[-3:]
    return len(rows) == 3 and len({cell_len(row) for row in rows}) == 1


def preview_lines(preview: str, metrics: dict[str, float], cells: int, height: int) -> list[Line]:
    """Return a preview's lines, with the metrics of the task next to or below them."""
    rows = printable_lines(preview)
    facts: list[Line] = [
        ((left(name.replace("_", " "), 17), "dim"), (short_number(value, 4), "value"))
        for name, value in list(metrics.items())[:height]
    ]
    wide = max(cell_len(row) for row in rows)
    if wide + 28 > cells:
        return ([((row, "text"),) for row in rows] + facts)[:height]
    blank_line: Line = ()
    facts += [blank_line] * (len(rows) - len(facts))
    rows += [""] * (len(facts) - len(rows))
    beside = zip(rows[:height], facts[:height], strict=True)
    return [((left(row, wide + 3), "text"), *fact) for row, fact in beside]
