"""Printing of commands: aligned tables for people, one JSON document for machines."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from shared.sentences import encode_english
from shared.text import ascii_json, cells, csv_cell, left, table_lines

T = TypeVar("T")
Columns = Mapping[str, Callable[[T], object]]


def as_json(value: object) -> None:
    """Print one JSON document."""
    import msgspec

    document = msgspec.json.format(msgspec.json.encode(value, enc_hook=encode_english))
    sys.stdout.write(ascii_json(document.decode()) + "\n")


def as_json_line(value: object) -> None:
    """Print one JSON document as one line, and flush it."""
    import msgspec

    sys.stdout.write(
        ascii_json(msgspec.json.encode(value, enc_hook=encode_english).decode()) + "\n"
    )
    sys.stdout.flush()


def table(rows: Sequence[T], columns: Columns[T], empty: str) -> None:
    """Print a table aligned by terminal cells, numbers to the right; without rows print `empty`."""
    if not rows:
        print(empty)
        return
    cells_of_rows = [[_text(get(row)) for get in columns.values()] for row in rows]
    numbers = [
        at
        for at, get in enumerate(columns.values())
        if all(isinstance(get(row), int | float) for row in rows)
    ]
    print("\n".join(table_lines([*columns], cells_of_rows, numbers)))


def facts(pairs: Iterable[tuple[str, object]]) -> None:
    """Print one line for each pair, aligned; empty values are left out."""
    texts = [(name, _text(value)) for name, value in pairs if value not in (None, "")]
    width = max((cells(name) for name, _ in texts), default=0)
    for name, value in texts:
        print(f"{left(name, width)}  {value}")


def write_csv(rows: Iterable[Mapping[str, object]], names: Sequence[str]) -> None:
    """Print CSV; cells that a spreadsheet would take for formulas get an apostrophe."""
    writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: csv_cell(row.get(name, "")) for name in names})


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        text = f"{value:.4g}"
        return f"{value:,.0f}" if "e+" in text else text
    return "".join(c if c.isprintable() else "?" for c in str(value))


def when(at: float | None, never: str = "-") -> str:
    """Return a Unix time as date and minute in UTC; `never` for None."""
    return never if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def breach_state(breaches: Sequence[str]) -> str:
    """Print the breaches that a check found, and return their count in words."""
    for breach in breaches:
        print(f"BREACH  {breach}")
    if not breaches:
        return "all is well"
    return "1 breach" if len(breaches) == 1 else f"{len(breaches):,} breaches"
