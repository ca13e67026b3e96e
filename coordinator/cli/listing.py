"""Printing of commands: aligned tables for people, one JSON document for machines."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

Columns = Mapping[str, Callable[[Any], object]]

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def as_json(value: Any) -> None:
    """One JSON document on standard output."""
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def table(rows: Sequence[Any], columns: Columns, empty: str) -> None:
    """An aligned table; numbers to the right. `empty` is said when there is nothing."""
    if not rows:
        print(empty)
        return
    cells = [[_text(get(row)) for get in columns.values()] for row in rows]
    right = [all(isinstance(get(row), int | float) for row in rows) for get in columns.values()]
    widths = [
        max(map(len, (name, *column)))
        for name, column in zip(columns, zip(*cells, strict=True), strict=True)
    ]
    for line in ([name.upper() for name in columns], *cells):
        placed = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ]
        print("  ".join(placed).rstrip())


def facts(pairs: Iterable[tuple[str, object]]) -> None:
    """One line each, aligned; what is empty is left out."""
    shown = [(name, _text(value)) for name, value in pairs if value not in (None, "")]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        print(f"{name.ljust(width)}  {value}")


def write_csv(rows: Iterable[Mapping[str, object]], names: Sequence[str]) -> None:
    """CSV on standard output; a cell that a spreadsheet would take for a formula is quoted with an
    apostrophe.
    """
    writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _harmless(row.get(name, "")) for name in names})


def _harmless(value: object) -> object:
    if isinstance(value, str) and value.startswith(_FORMULA):
        return "'" + value
    return value


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "".join(c if c.isprintable() else "?" for c in str(value))


def when(at: float | None, never: str = "-") -> str:
    """An instant as people read it, UTC."""
    return never if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


def credits_of(micro: int) -> str:
    """Micro-credits as credits."""
    return f"{micro / 1e6:,.2f}"


def bytes_of(size: float) -> str:
    """A size as people read it."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
