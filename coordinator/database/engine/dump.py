"""Export and import of all rows, the same on both databases: a backup restores into either."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Integer, Table, func, insert, select, text
from sqlalchemy.sql.sqltypes import Boolean, LargeBinary

from coordinator.database.engine.postgres import allow_long_read
from coordinator.database.engine.sqlite import CLOCK_KEY
from coordinator.database.engine.statements import deletion
from coordinator.database.tables.schema import metadata
from shared.errors import Configuration

BATCH_ROWS = 1000


def begin_snapshot(conn: Connection) -> None:
    """Make all statements of a read transaction see one instant; must be its first statement."""
    if conn.dialect.name == "postgresql":
        conn.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
    allow_long_read(conn)


def names() -> tuple[str, ...]:
    """Return the names of all tables, in foreign-key order."""
    return tuple(table.name for table in metadata.sorted_tables)


def rows(conn: Connection, name: str) -> Iterator[dict[str, object]]:
    """Yield all rows of a table, in the order of its key."""
    table = metadata.tables[name]
    result = conn.execution_options(yield_per=BATCH_ROWS).execute(
        select(table).order_by(*table.primary_key.columns)
    )
    for row in result.mappings():
        yield dict(row)


def check_empty(conn: Connection, place: str) -> None:
    """Raise Configuration, which names the database's place, unless all tables but `meta` are
    empty.
    """
    for name in names():
        if name != "meta" and conn.execute(select(metadata.tables[name]).limit(1)).first():
            raise Configuration(
                f"{place} is not empty, and a backup fills an empty database alone: name another "
                "--data-dir, or another --database"
            )


def load(conn: Connection, name: str, batch: Sequence[Mapping[str, object]]) -> None:
    """Insert rows of a backup. Raises Configuration for an unknown table or column."""
    table = metadata.tables.get(name)
    if table is None or any(set(row) - set(table.columns.keys()) for row in batch):
        raise Configuration(
            "the backup was made by another version; use that version to restore it"
        )
    if name == "meta":  # the new database has its own clock
        conn.execute(deletion(table, "replaced").where(table.c.key != CLOCK_KEY))
        batch = [row for row in batch if row["key"] != CLOCK_KEY]
    if batch:
        conn.execute(insert(table), [_typed(table, row) for row in batch])


def _typed(table: Table, row: Mapping[str, object]) -> dict[str, object]:
    """Return a row of JSON with the columns' types: booleans for numbers, bytes for base64."""
    return {key: _value(table.columns[key].type, value) for key, value in row.items()}


def _value(kind: object, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(kind, Boolean):
        return bool(value)
    return b64decode(value) if isinstance(kind, LargeBinary) else value


def reset_sequences(conn: Connection) -> None:
    """Restart numbering above the loaded rows (SQLite does so by itself)."""
    if conn.dialect.name != "postgresql":
        return
    for table in metadata.sorted_tables:
        column = table.autoincrement_column
        if column is None or not isinstance(column.type, Integer):
            continue
        highest = conn.execute(select(func.max(column))).scalar()
        if highest is not None:
            sequence = func.pg_get_serial_sequence(table.name, column.name)
            conn.execute(select(func.setval(sequence, highest)))
