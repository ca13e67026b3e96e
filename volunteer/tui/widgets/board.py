"""Board of stones: two terminal cells a field, one for the stone and one for a bracket."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from textual.events import Click
from textual.message import Message
from typing_extensions import override

from shared.workloads.games import COLUMNS
from volunteer.i18n.catalogue import _
from volunteer.tui.text import Glyphs, Line, Span
from volunteer.tui.widgets.panel import Panel, Scene

STONES = {1: ("X", "info"), -1: ("O", "accent")}
LABEL = 3  # cells for the number of a row


class BoardState(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a board. Fields are numbered row by row from above."""

    size: int = 0  # 0 = no board yet
    stones: tuple[int, ...] = ()  # 1, -1, or 0 for none
    cursor: int = 0
    last: int = -1  # newest stone
    row: tuple[int, ...] = ()  # winning row


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Visible part of a board: its first row and column, and how many rows and columns."""

    top: int
    left: int
    high: int
    wide: int


def width_of(size: int) -> int:
    """Return the cells of a whole board with its border."""
    return LABEL + 2 * size + 4


def visible_part(state: BoardState, width: int, height: int) -> Window:
    """Return the part of the board that fits into `width` x `height` and contains the cursor."""
    high = max(1, min(state.size, height - 1))
    wide = max(1, min(state.size, (width - LABEL) // 2))
    row, column = divmod(state.cursor, max(1, state.size))
    return Window(
        top=max(0, min(row - high // 2, state.size - high)),
        left=max(0, min(column - wide // 2, state.size - wide)),
        high=high,
        wide=wide,
    )


def board_lines(state: BoardState, width: int, height: int, glyphs: Glyphs) -> list[Line]:
    """Return the rows with their numbers, then the letters of the columns."""
    if not state.size:
        return [(), ((f"  {_('downloading the version')} …", "dim"),)]
    part = visible_part(state, width, height)
    columns = range(part.left, part.left + part.wide)
    lines: list[Line] = []
    for row in range(part.top, part.top + part.high):
        spans: list[Span] = [(f"{state.size - row:2d}", "dim")]
        for column in columns:
            field = row * state.size + column
            spans += [(_before(state, field, first=column == part.left), "mark")]
            spans += [_field(state, field, glyphs)]
        end = row * state.size + columns[-1]
        spans.append(({state.cursor: "]", state.last: ")"}.get(end, " "), "mark"))
        lines.append(tuple(spans))
    letters = " ".join(COLUMNS[column] for column in columns)
    return [*lines, ((" " * LABEL + letters, "dim"),)]


def field_at(state: BoardState, x: int, y: int, width: int, height: int) -> int:
    """Return the field at a terminal cell; -1 outside the board."""
    if not state.size:
        return -1
    part = visible_part(state, width, height)
    column, row = (x - LABEL + 1) // 2, y
    if not (0 <= row < part.high and 0 <= column < part.wide):
        return -1
    return (part.top + row) * state.size + part.left + column


def _before(state: BoardState, field: int, *, first: bool) -> str:
    """Return the bracket or space between a field and the field to its left."""
    opening = {state.cursor: "[", state.last: "("}.get(field)
    if opening or first:
        return opening or " "
    return {state.cursor: "]", state.last: ")"}.get(field - 1, " ")


def _field(state: BoardState, field: int, glyphs: Glyphs) -> Span:
    stone = state.stones[field]
    if stone:
        sign, role = STONES[stone]
        return sign, "good" if field in state.row else role
    return glyphs.dot, "faint"


class Board(Panel):
    """Board that can be clicked."""

    class Chosen(Message):
        """Message: a field was clicked."""

        def __init__(self, field: int) -> None:
            super().__init__()
            self.field = field

    def __init__(self) -> None:
        super().__init__(id="board", classes="card")
        self.state = BoardState()

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        return board_lines(self.state, width, height, scene.glyphs)

    @override
    def heading(self, scene: Scene) -> tuple[str, str]:
        size = self.state.size
        return _("Board"), f"{size} x {size}" if size else ""

    def on_click(self, event: Click) -> None:
        place = event.get_content_offset(self)
        if place is None:
            return
        field = field_at(self.state, place.x, place.y, *self.content_size)
        if field >= 0:
            self.post_message(self.Chosen(field))
