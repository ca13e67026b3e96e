"""Statements over many rows at once, compiled once for each number of rows.

SQLAlchemy does not cache a statement with VALUES in it, and compiling one for 64 rows took ten
times as long as running it. A statement is therefore compiled for 1, 2, 4, ... rows and cached as
text; blank rows, which match nothing, fill the rest.
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
    """Compiled statement and the sources of its parameters."""

    statement: str
    others: tuple[str, ...]  # names of the values given besides the rows
    constants: tuple[object, ...]  # constants of the statement itself
    # Returns the parameters in the statement's order, from all cells, the others and the constants.
    picked: Callable[[Sequence[object]], tuple[object, ...]]


class Lines:
    """Statement over a table of values, compiled once for each number of rows.

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
        """Execute the statement with these rows. The result has the driver's plain values."""
        size = 1 << max(0, len(rows) - 1).bit_length()
        text = self._text(conn.dialect, size)
        cells = [*chain.from_iterable(rows), *self._blank * (size - len(rows))]
        if len(cells) != size * len(self._columns):
            raise ValueError(f"a row of {self._name} has {len(self._columns)} columns")
        cells += [constants[name] for name in text.others]
        return conn.exec_driver_sql(text.statement, text.picked([*cells, *text.constants]))

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
        beside = [name for name in compiled.params if name not in set(cells)]
        required = [name for name in beside if compiled.binds[name].required]
        constants = [name for name in beside if name not in required]
        place = {name: index for index, name in enumerate([*cells, *required, *constants])}
        return _CompiledText(
            statement=str(compiled),
            others=tuple(required),
            constants=tuple(compiled.params[name] for name in constants),
            picked=itemgetter(*(place[name] for name in compiled.positiontup)),
        )


def _name(index: int, clause: ColumnClause[object]) -> str:
    return f"line{index}_{clause.name}"
