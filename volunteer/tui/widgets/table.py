"""Table with columns and a cursor; only changed rows are painted.

The least important columns disappear in a narrow room. Enter or a second click chooses a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import msgspec
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Blur, Click, Focus, MouseScrollDown, MouseScrollUp
from textual.message import Message
from textual.strip import Strip
from typing_extensions import override

from volunteer.i18n.catalogue import _, pgettext
from volunteer.tui.text import Line, Span, fit, paragraph
from volunteer.tui.widgets.panel import Panel, Scene

GAP = 2
WHEEL_ROWS = 3


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """Column of a table, `cells` wide (0: a share of the room left), shown from a table width of
    `least` cells on.
    """

    title: str
    context: str = ""  # context of the title in the catalogue
    cells: int = 0
    align: Literal["left", "right"] = "left"
    least: int = 0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Row of a table: a line of spans for each column; `dim` draws it as old."""

    key: str
    cells: tuple[Line, ...]
    dim: bool = False
    heading: bool = False  # heading of the rows below it; the cursor skips it


class Filling(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a table: rows, the text that is shown if there are none, and border titles."""

    rows: tuple[Row, ...] = ()
    empty: str = ""
    title: str = ""
    subtitle: str = ""


def fitted(line: Line, cells: int, align: str, ellipsis: str) -> Line:
    """Return spans in exactly `cells`."""
    spans: list[Span] = []
    room = cells
    for text, role in line:
        cut = fit(text, room, ellipsis)
        if cut:
            spans.append((cut, role))
            room -= cell_len(cut)
        if cut != text:
            break
    blank = (" " * room, "text")
    return tuple([blank, *spans] if align == "right" else [*spans, blank])


def column_title(column: Column) -> str:
    """Return the title of a column in the current language."""
    return pgettext(column.context, column.title) if column.context else _(column.title)


def lay_out(columns: Sequence[Column], width: int) -> list[tuple[int, int]]:
    """Return number and width of every column that fits in `width` cells."""
    visible = [n for n, column in enumerate(columns) if column.least <= width]
    wide = [
        max(column.cells, cell_len(column_title(column))) if column.cells else 0
        for column in columns
    ]
    fixed = sum(wide[n] for n in visible) + GAP * max(0, len(visible) - 1)
    elastic = [n for n in visible if columns[n].cells == 0]
    extra, rest = divmod(max(0, width - fixed), max(1, len(elastic)))
    places = []
    for n in visible:
        cells = wide[n]
        if not cells:
            cells = extra + (1 if elastic.index(n) < rest else 0)
        if cells:
            places.append((n, cells))
    return places


def _selectable(rows: Sequence[Row], at: int, step: int) -> int:
    """Return the nearest row from `at` on that is no heading, first in the direction of `step`."""
    for direction in (step, -step):
        place = at
        while 0 <= place < len(rows):
            if not rows[place].heading:
                return place
            place += direction
    return at


class Listing(Panel):
    """Table of rows with a cursor.

    `filling` returns the rows of a scene; `Moved` and `Chosen` report the cursor. A row is chosen
    by a second click and, unless `by_enter` is False, by enter.
    """

    can_focus = True
    COMPONENT_CLASSES: ClassVar[set[str]] = {"listing--cursor"}
    DEFAULT_CSS = """
    Listing > .listing--cursor { background: $primary 12%; }
    Listing:focus > .listing--cursor { background: $primary 22%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "edge(-1)", show=False),
        Binding("end,G", "edge(1)", show=False),
        Binding("enter", "choose", show=False),
    ]

    class Moved(Message):
        """Message: the cursor moved to another row."""

        def __init__(self, listing: Listing, key: str) -> None:
            super().__init__()
            self.listing = listing
            self.key = key

        @property
        @override
        def control(self) -> Listing:
            return self.listing

    class Chosen(Moved):
        """Message: the row under the cursor was chosen by enter or a click."""

    class Ended(Moved):
        """Message: the cursor reached the last row, so more rows may be queried."""

    def __init__(
        self,
        columns: Sequence[Column],
        filling: Callable[[Scene], Filling],
        *,
        id: str | None = None,
        classes: str | None = "card",
        by_enter: bool = True,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._by_enter = by_enter
        self._columns = tuple(columns)
        self._filling = filling
        self._filled = Filling()
        self._top = 0
        self.key = ""  # key of the row under the cursor; "" without rows
        self._at = 0
        self._cursor_style: Style | None = None
        self._last = ""  # last row when `Ended` was posted
        self._cursor_moved = False  # True once a key or click moved the cursor

    # Drawing.

    @override
    def heading(self, scene: Scene) -> tuple[str, str]:
        self._filled = self._filling(scene)
        return self._filled.title, self._filled.subtitle

    @property
    def rows(self) -> tuple[Row, ...]:
        return self._filled.rows

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        rows = self._filled.rows
        if not rows:
            self._report_row("")
            return paragraph(self._filled.empty, width, height, "dim")
        self._keep_cursor(rows)
        titled = self._titled(height)
        room = max(1, height - titled)
        first = self._at - int(self._at > 0 and rows[self._at - 1].heading)
        self._top = max(0, min(self._top, first, len(rows) - room))
        self._top = max(self._top, self._at - room + 1)
        places = lay_out(self._columns, width - 2)
        ellipsis = scene.glyphs.ellipsis
        head: list[Span] = [("  ", "text")]
        for n, cells in places:
            column = self._columns[n]
            head += [
                *fitted(((column_title(column), "dim"),), cells, column.align, ellipsis),
                (" " * GAP, "text"),
            ]
        lines: list[Line] = [tuple(head)] if titled else []
        range_shown = range(self._top, min(len(rows), self._top + room))
        return [*lines, *(self._row(rows[n], n == self._at, places, scene) for n in range_shown)]

    def _titled(self, height: int) -> int:
        """Return 1 if the first line has the column titles, else 0."""
        return int(height > 1 and any(column.title for column in self._columns))

    def _row(self, row: Row, here: bool, places: Sequence[tuple[int, int]], scene: Scene) -> Line:
        spans: list[Span] = [(f"{scene.glyphs.run} " if here else "  ", "info")]
        for n, cells in places:
            line = row.cells[n] if n < len(row.cells) else ()
            spans += fitted(line, cells, self._columns[n].align, scene.glyphs.ellipsis)
            spans.append((" " * GAP, "text"))
        if row.dim:
            spans = [(text, "dim") for text, _ in spans]
        return tuple(spans)

    def _keep_cursor(self, rows: tuple[Row, ...]) -> None:
        """Keep the cursor on its row when rows come and go; on the first row until a key moves
        it.
        """
        place = self.place(rows)
        if place is not None:
            self._at = place
            self._report_row(rows[place].key)
            return
        for number, row in enumerate(rows) if self._cursor_moved else ():
            if row.key == self.key:
                self._at = number
                return
        self._at = _selectable(rows, min(self._at, len(rows) - 1) if self._cursor_moved else 0, 1)
        self._report_row(rows[self._at].key)

    def place(self, rows: Sequence[Row]) -> int | None:
        """Return the row on which the cursor must stand; None if the keys alone move it."""
        return None

    @override
    def render_line(self, y: int) -> Strip:
        strip = super().render_line(y)
        head = self._titled(self.content_size.height)
        if self._filled.rows and y - head + self._top == self._at and y >= head:
            return Strip(Segment.apply_style(strip, post_style=self._cursor()))
        return strip

    def _cursor(self) -> Style:
        if self._cursor_style is None:
            tint = self.get_component_styles("listing--cursor").background
            _, ground = self.background_colors
            self._cursor_style = Style(bgcolor=(ground + tint).rich_color)
        return self._cursor_style

    @override
    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._cursor_style = None

    def on_focus(self, event: Focus) -> None:
        self._restyle()

    def on_blur(self, event: Blur) -> None:
        self._restyle()

    def _restyle(self) -> None:
        self._cursor_style = None
        self.refresh()

    # The cursor.

    def go(self, number: int) -> None:
        """Move the cursor to a row."""
        rows = self._filled.rows
        if not rows:
            return
        self._cursor_moved = True
        target = max(0, min(number, len(rows) - 1))
        self._at = _selectable(rows, target, 1 if target >= self._at else -1)
        self._report_row(rows[self._at].key)
        self.draw()
        if self._at == len(rows) - 1 and self._last != self.key:
            self._last = self.key
            self.post_message(self.Ended(self, self.key))

    def _report_row(self, key: str) -> None:
        if key != self.key:
            self.key = key
            self.post_message(self.Moved(self, key))

    def action_move(self, by: int) -> None:
        self.go(self._at + by)

    def action_page(self, by: int) -> None:
        self.go(self._at + by * max(1, self.content_size.height - 2))

    def action_edge(self, to: int) -> None:
        self.go(len(self._filled.rows) - 1 if to > 0 else 0)

    @override
    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return False for enter if the page has its own use of the key, and Textual's answer for
        any other action.
        """
        if action == "choose" and not self._by_enter:
            return False
        return super().check_action(action, parameters)

    def action_choose(self) -> None:
        if self._filled.rows:
            self.post_message(self.Chosen(self, self.key))

    def on_click(self, event: Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None or not self._filled.rows:
            return
        head = self._titled(self.content_size.height)
        number = offset.y - head + self._top
        if head <= offset.y and number < len(self._filled.rows):
            same_row = number == self._at
            self.go(number)
            if same_row or event.chain > 1:
                self.action_choose()

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        self.go(self._at + WHEEL_ROWS)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        self.go(self._at - WHEEL_ROWS)
