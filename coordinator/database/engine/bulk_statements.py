"""Statements over many rows at once, compiled once for each number of rows.

SQLAlchemy does not cache a statement with VALUES in it, and compiling one for 64 rows took ten
times as long as running it. A statement is therefore compiled for 1, 2, 4, ... rows and cached as
text; blank rows, which match nothing, fill up to that number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

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


class _CompiledText(NamedTuple):
    """Compiled statement, and how its parameters are put in order."""

    statement: str
    names: tuple[str, ...]  # names of the values given beside the rows
    constants: tuple[object, ...]  # constants of the statement itself
    # Puts all cells, the named values and the constants into the statement's order.
    in_order: Callable[[Sequence[object]], tuple[object, ...]]


class BulkStatement:
    """Statement over a table of values, compiled once for each power of two of rows.

    `build` gets the table as a CTE of two columns or more; other values are `bindparam`s, given by
    name. `blank` is a row that matches nothing.
    """

    def __init__(
        self,
        name: str,
        columns: dict[str, TypeEngine[Any]],
        build: Callable[[CTE], ClauseElement],
        blank: Sequence[object],
    ) -> None:
        self._name = name
        self._columns: list[ColumnClause[Any]] = [
            column(key, kind) for key, kind in columns.items()
        ]
        self._build = build
        self._blank = tuple(blank)
        self._compiled: dict[tuple[str, int], _CompiledText] = {}

    def execute(
        self, conn: Connection, rows: Sequence[Sequence[object]], **constants: object
    ) -> CursorResult[Any]:
        """Execute the statement with these rows. The result has the driver's plain values. Raises
        ValueError for a row of another length.
        """
        size = 1 << max(0, len(rows) - 1).bit_length()
        text = self._text(conn.dialect, size)
        cells = [*chain.from_iterable(rows), *self._blank * (size - len(rows))]
        if len(cells) != size * len(self._columns):
            raise ValueError(f"a row of {self._name} has {len(self._columns)} columns")
        cells += [constants[name] for name in text.names]
        return conn.exec_driver_sql(text.statement, text.in_order([*cells, *text.constants]))

    def _text(self, dialect: Dialect, size: int) -> _CompiledText:
        key = (dialect.name, size)
        if key not in self._compiled:
            self._compiled[key] = self._compile(dialect, size)
        return self._compiled[key]

    def _compile(self, dialect: Dialect, size: int) -> _CompiledText:
        names = [[_name(index, clause) for clause in self._columns] for index in range(size)]
        data = [
            tuple(
                bindparam(name, type_=c.type) for name, c in zip(line, self._columns, strict=True)
            )
            for line in names
        ]
        table = values(*self._columns, name=self._name).data(data).cte(self._name)
        compiled: Any = self._build(table).compile(dialect=dialect)
        cells = list(chain.from_iterable(names))
        other_names = [name for name in compiled.params if name not in set(cells)]
        required = [name for name in other_names if compiled.binds[name].required]
        constants = [name for name in other_names if name not in required]
        place = {name: index for index, name in enumerate([*cells, *required, *constants])}
        return _CompiledText(
            statement=str(compiled),
            names=tuple(required),
            constants=tuple(compiled.params[name] for name in constants),
            in_order=itemgetter(*(place[name] for name in compiled.positiontup)),
        )


def _name(index: int, clause: ColumnClause[object]) -> str:
    return f"line{index}_{clause.name}"
