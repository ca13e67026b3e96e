"""Rows in columns, as wide as their widest cell in any language."""

from __future__ import annotations

from collections.abc import Sequence

from shared.text import cells, left


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row; the last column is as long as it is."""
    wide = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(left(text, width) for text, width in zip(row, wide, strict=True)).rstrip()
        for row in rows
    ]
