"""Rows that must never change are kept so by the database itself, whoever holds a connection."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

FROZEN = ("postings", "versions")  # no row changes, none goes
TREE = ("merkle_leaves", "merkle_nodes")  # the same, since the sixth revision
SEALED = {  # only the hash chain may be filled in, once
    "events": ("id", "key", "digest", "kind", "run_id", "contribution_id", "memo", "at"),
    "audit": ("id", "at", "actor", "action", "subject", "detail"),
}


def _sqlite(table: str, columns: Sequence[str]) -> list[str]:
    refuse = f"SELECT RAISE(ABORT, 'rows of {table} never change')"
    made = [f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} BEGIN {refuse}; END"]
    when = ""
    if columns:
        same = " AND ".join(f'OLD."{name}" IS NEW."{name}"' for name in columns)
        when = f" WHEN NOT ({same} AND OLD.chain IS NULL AND NEW.chain IS NOT NULL)"
    made.append(
        f"CREATE TRIGGER {table}_no_update BEFORE UPDATE ON {table}{when} BEGIN {refuse}; END"
    )
    return made


def _postgresql(table: str, columns: Sequence[str]) -> list[str]:
    refuse = "EXECUTE FUNCTION refuse_change()"
    made = [
        f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} FOR EACH ROW {refuse}",
        f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table} {refuse}",
    ]
    when = ""
    if columns:
        same = " AND ".join(f'OLD."{name}" IS NOT DISTINCT FROM NEW."{name}"' for name in columns)
        when = f" WHEN (NOT ({same} AND OLD.chain IS NULL AND NEW.chain IS NOT NULL))"
    made.append(
        f"CREATE TRIGGER {table}_no_update BEFORE UPDATE ON {table} FOR EACH ROW{when} {refuse}"
    )
    return made


FUNCTION = """
CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rows of % never change', TG_TABLE_NAME;
END
$$
"""


def freeze(connection: Connection, tables: Sequence[str]) -> None:
    """Let no row of further tables change or go, in a later revision."""
    build = _postgresql if connection.dialect.name == "postgresql" else _sqlite
    for table in tables:
        for statement in build(table, ()):
            connection.exec_driver_sql(statement)


def create(connection: Connection) -> None:
    """Make the triggers of the first revision."""
    postgresql = connection.dialect.name == "postgresql"
    if postgresql:
        connection.exec_driver_sql(FUNCTION)
    build = _postgresql if postgresql else _sqlite
    tables: dict[str, Sequence[str]] = {**dict.fromkeys(FROZEN, ()), **SEALED}
    for table, columns in tables.items():
        for statement in build(table, columns):
            connection.exec_driver_sql(statement)
