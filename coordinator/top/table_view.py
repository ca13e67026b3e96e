"""Table of the monitor on the screen: changed rows are painted, the cursor stays."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.coordinate import Coordinate
from textual.message import Message
from textual.widgets import DataTable, Static

from coordinator.rules.overview import Level
from coordinator.top.tables import Kind, MonitorRow, MonitorTable

STYLES: dict[Level, str] = {"good": "", "watch": "bold", "bad": "bold reverse"}


class TableView(Vertical):
    """Table with a title; `enter` on a row opens its subject."""

    DEFAULT_CSS = """
    TableView { height: auto; margin-bottom: 1; }
    TableView .title { text-style: bold; color: $primary; height: 1; }
    TableView DataTable { height: auto; background: transparent; }
    TableView .empty { color: $text-muted; padding-left: 2; height: auto; }
    """

    class Opened(Message):
        """Message: a row was opened."""

        def __init__(self, kind: Kind, key: str) -> None:
            super().__init__()
            self.kind = kind
            self.key = key

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self._table: MonitorTable | None = None

    def compose(self) -> ComposeResult:
        yield Static(classes="title", markup=False)
        yield Static(classes="empty", markup=False)
        yield _Rows(cursor_type="row", zebra_stripes=False, cell_padding=1)

    def show(self, table: MonitorTable) -> None:
        """Show a table; nothing is painted where it is the same."""
        was, self._table = self._table, table
        if table == was:
            return
        rows = self.query_one(_Rows)
        if was is None or was.title != table.title:
            self.query_one(".title", Static).update(table.title)
        self.query_one(".empty", Static).update(table.empty)
        self.query_one(".empty").display = not table.rows
        rows.display = bool(table.rows)
        if was is None or was.names != table.names or len(was.rows) != len(table.rows):
            rows.rebuild(table, was)
        else:
            rows.repaint(table, was)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        event.stop()
        row = self.chosen
        if row is not None and row.kind:
            self.post_message(self.Opened(row.kind, row.key))

    def take_focus(self) -> bool:
        """Take the focus; False for a table without choices."""
        if self._table is None or not self._table.rows:
            return False
        self.query_one(_Rows).focus()
        return True

    @property
    def chosen(self) -> MonitorRow | None:
        """The row under the cursor."""
        at = self.query_one(_Rows).cursor_row
        if self._table is None or not 0 <= at < len(self._table.rows):
            return None
        return self._table.rows[at]


class _Rows(DataTable[Text]):
    """Rows at their full height: the page scrolls."""

    def rebuild(self, table: MonitorTable, was: MonitorTable | None) -> None:
        """Rebuild columns or rows, with the cursor on the same subject."""
        at = self.cursor_row
        held = was.rows[at] if was is not None and 0 <= at < len(was.rows) else None
        self.clear(columns=True)
        for name, number in zip(table.names, table.numbers, strict=True):
            self.add_column(Text(name.upper(), justify="right" if number else "left"))
        for row in table.rows:
            self.add_row(*_cells(row, table.numbers))
        if held is not None:
            same = (n for n, row in enumerate(table.rows) if (row.kind, row.key) == _what(held))
            self.move_cursor(row=next(same, min(at, len(table.rows) - 1)), animate=False)

    def repaint(self, table: MonitorTable, was: MonitorTable) -> None:
        """Repaint the changed cells of a table with the same number of rows."""
        for number, (row, old) in enumerate(zip(table.rows, was.rows, strict=True)):
            if row == old:
                continue
            for column, cell in enumerate(_cells(row, table.numbers)):
                if row.level != old.level or row.cells[column] != old.cells[column]:
                    self.update_cell_at(Coordinate(number, column), cell, update_width=True)


def _what(row: MonitorRow) -> tuple[Kind, str]:
    return row.kind, row.key


def _cells(row: MonitorRow, numbers: tuple[bool, ...]) -> list[Text]:
    """Return cells as text, never as markup: names are chosen by strangers."""
    return [
        Text(
            cell, style=STYLES[row.level] if at == 0 else "", justify="right" if number else "left"
        )
        for at, (cell, number) in enumerate(zip(row.cells, numbers, strict=True))
    ]
