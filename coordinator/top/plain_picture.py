"""The picture as text, for `--once`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from coordinator.rules.overview import Overview
from coordinator.top import tables
from coordinator.top.tables import MonitorTable
from shared.text import cells, left, printable, right

ROWS_MAX = 20  # of a table


def lines(seen: Overview) -> Iterator[str]:
    """Return the lines of the picture: verdict, facts, tables."""
    at = datetime.fromtimestamp(seen.at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    yield f"{printable(seen.server, 60)}  {at}"
    yield tables.verdict_line(seen)
    yield ""
    facts = [(name, value) for name, value in tables.facts(seen) if value]
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        yield f"{left(name, width)}  {value}"
    for table in tables.EVERY:
        yield ""
        yield from table_lines(table(seen))


def table_lines(table: MonitorTable) -> Iterator[str]:
    """Return the lines of one table, aligned by cells."""
    yield table.title
    if not table.rows:
        yield f"  {table.empty}"
        return
    shown = [table.names, *(row.cells for row in table.rows[:ROWS_MAX])]
    widths = [max(map(cells, column)) for column in zip(*shown, strict=True)]
    for number, row in enumerate(shown):
        placed = [
            right(cell, width) if is_number else left(cell, width)
            for cell, width, is_number in zip(row, widths, table.numbers, strict=True)
        ]
        line = "  " + "  ".join(placed).rstrip()
        yield line.upper() if number == 0 else line
    if len(table.rows) > ROWS_MAX:
        yield f"  ... {len(table.rows) - ROWS_MAX} more"
