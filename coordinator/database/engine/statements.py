"""Conditions for statements that are built once, at import.

SQLAlchemy takes 0.2 ms to build a statement, 0.05 ms to run a built one (SQLite, 2 virtual cores of
an Intel Xeon).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Connection,
    Delete,
    Dialect,
    Insert,
    String,
    Table,
    TypeDecorator,
    bindparam,
    column,
    delete,
    func,
    literal_column,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.base import ReadOnlyColumnCollection
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import KeyedColumnElement
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import NullType
from typing_extensions import override

from shared.files.deletions import Reason

Incoming = ReadOnlyColumnCollection[str, KeyedColumnElement[Any]]  # columns of an inserted row
Changes = Callable[[Table, Incoming], Mapping[str, object]]


def deletion(table: Table, reason: Reason) -> Delete:
    """Return the statement that deletes rows; every deletion names the reason that permits it."""
    return delete(table)


def insert_new(conn: Connection, table: Table, conflict: str, *returning: str) -> Insert:
    """Return an INSERT that skips rows which collide in the columns `conflict`, or in any key if
    `conflict` is "", and returns the columns `returning` of the new rows.
    """
    return _insert_new(conn.dialect.name, table, conflict, *returning)


@cache
def _insert_new(dialect: str, table: Table, conflict: str, *returning: str) -> Insert:
    elements = conflict.split(",") if conflict else None
    statement = _insert(dialect, table).on_conflict_do_nothing(index_elements=elements)
    return statement.returning(*(table.c[name] for name in returning)) if returning else statement


def upsert(conn: Connection, table: Table, changes: Changes) -> Insert:
    """Return an INSERT that makes `changes` to the row that has the primary key already."""
    return _upsert(conn.dialect.name, table, changes)


@cache
def _upsert(dialect: str, table: Table, changes: Changes) -> Insert:
    statement = _insert(dialect, table)
    key = [column.name for column in table.primary_key]
    values = changes(table, statement.excluded)
    return statement.on_conflict_do_update(index_elements=key, set_=values)


def sums(table: Table, incoming: Incoming) -> dict[str, ColumnElement[Any]]:
    """Return the changes of `upsert` that add the inserted numbers to the numbers of the row."""
    numbers = [column for column in table.c if not column.primary_key]
    return {column.name: column + incoming[column.name] for column in numbers}


def replacement(table: Table, incoming: Incoming) -> dict[str, ColumnElement[Any]]:
    """Return the changes of `upsert` that put the inserted row in place of the old one."""
    return {column.name: incoming[column.name] for column in table.c if not column.primary_key}


def _insert(dialect: str, table: Table) -> postgresql.Insert | sqlite.Insert:
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


def equals(column: KeyedColumnElement[object]) -> ColumnElement[bool]:
    """Return the condition `column = :where_<column>`.

    The value is given when the statement runs; the prefix separates it from an UPDATE's new values.
    """
    return column == bindparam(f"where_{column.key}", type_=column.type)


def one_of(column: KeyedColumnElement[object], words: Sequence[str]) -> ColumnElement[bool]:
    """Return `column IN ('one', 'another')`, with the program's own words written into the
    statement.

    A list of bound values would be expanded at each run, in 50 us. SQLite would also plan the query
    anew for a bound value that decides whether a partial index serves: with written words two
    queries took 5 us instead of 28, and 7 instead of 224. Raises ValueError for a word that is no
    identifier.
    """
    if not all(word.isidentifier() for word in words):
        raise ValueError(f"these are not names of the program: {words}")
    written = [literal_column(f"'{word}'", column.type) for word in words]
    if len(written) == 1:  # SQLite uses a partial index for `=`, not for IN with one word
        return column == written[0]
    return column.in_(written)


class _JsonList(TypeDecorator[Sequence[object]]):
    """List that is bound as one JSON text."""

    impl = String
    cache_ok = True

    @override
    def process_bind_param(self, value: Sequence[object] | None, dialect: Dialect) -> str:
        return msgspec.json.encode(list(value or ())).decode()


class _Among(FunctionElement[Any]):
    """Condition of `among`; its clauses are the column and the list."""

    inherit_cache = True
    name = "among"
    type = NullType()  # a Boolean would become `... = 1` on SQLite, which then uses no index


@compiles(_Among)
def _in_list(element: _Among, compiler: SQLCompiler, **options: object) -> str:
    clause, values = element.clauses
    listed = func.json_each(bindparam(values.key, type_=_JsonList()))
    return compiler.process(clause.in_(select(column("value")).select_from(listed)), **options)


@compiles(_Among, "postgresql")
def _any_of_array(element: _Among, compiler: SQLCompiler, **options: object) -> str:
    column, values = (compiler.process(clause, **options) for clause in element.clauses)
    return f"{column} = ANY ({values})"


def among(column: KeyedColumnElement[Any], name: str) -> ColumnElement[bool]:
    """Return `column IN (:name)`, with the list given at execution.

    PostgreSQL gets an array and SQLite a JSON text, so that one prepared statement serves lists of
    all lengths; expanding a list takes longer than the rest of a short statement.
    """
    return _Among(column, bindparam(name, type_=ARRAY(column.type, dimensions=1)))
