"""Many rows in one statement, compiled once for each size.

SQLAlchemy does not cache a statement with VALUES in it, and compiling one for 64 rows took ten
times as long as running it. So a statement is compiled for 1, 2, 4, ... rows and kept as text; what
is left over is filled with rows that match nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from sqlalchemy import (
    CTE,
    ClauseElement,
    ColumnClause,
    Connection,
    CursorResult,
    Dialect,
    bindparam,
    column,
    values,
)
from sqlalchemy.types import TypeEngine

# The statement, its parameters in their order, and those that are constants.
_Text: TypeAlias = tuple[str, tuple[str, ...], dict[str, Any]]


class Lines:
    """A statement over a table of values that is built anew for every size but compiled only once.

    `build` gets the table as a CTE; other values are `bindparam`s, given by name. `blank` is a row
    that matches nothing.
    """

    def __init__(
        self,
        name: str,
        columns: dict[str, TypeEngine[Any]],
        build: Callable[[CTE], ClauseElement],
        blank: Sequence[Any],
    ) -> None:
        self._name = name
        self._columns: list[ColumnClause[Any]] = [
            column(key, kind) for key, kind in columns.items()
        ]
        self._build = build
        self._blank = tuple(blank)
        self._compiled: dict[tuple[str, int], _Text] = {}

    def execute(
        self, conn: Connection, rows: Sequence[Sequence[Any]], **others: Any
    ) -> CursorResult[Any]:
        """Run it for these rows. The result has the driver's plain values."""
        size = 1 << max(0, len(rows) - 1).bit_length()
        text, names, constants = self._text(conn.dialect, size)
        given = constants | others
        for index in range(size):
            row = rows[index] if index < len(rows) else self._blank
            for each, value in zip(self._columns, row, strict=True):
                given[_name(index, each)] = value
        return conn.exec_driver_sql(text, tuple([given[name] for name in names]))

    def _text(self, dialect: Dialect, size: int) -> _Text:
        key = (dialect.name, size)
        if key not in self._compiled:
            data = [
                tuple(bindparam(_name(index, c), type_=c.type) for c in self._columns)
                for index in range(size)
            ]
            table = values(*self._columns, name=self._name).data(data).cte(self._name)
            compiled: Any = self._build(table).compile(dialect=dialect)
            self._compiled[key] = (str(compiled), tuple(compiled.positiontup), compiled.params)
        return self._compiled[key]


def _name(index: int, each: ColumnClause[Any]) -> str:
    return f"line{index}_{each.name}"
