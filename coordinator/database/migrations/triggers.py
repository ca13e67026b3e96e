"""Database triggers that refuse changes of append-only rows on any connection."""

from __future__ import annotations

from sqlalchemy import Connection

# Tables whose rows are never changed or deleted.
FROZEN = ("postings", "versions", "merkle_leaves", "merkle_nodes", "events", "record")


def _sqlite(table: str) -> list[str]:
    refuse = f"SELECT RAISE(ABORT, 'rows of {table} never change')"
    return [
        f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} BEGIN {refuse}; END",
        f"CREATE TRIGGER {table}_no_update BEFORE UPDATE ON {table} BEGIN {refuse}; END",
    ]


def _postgresql(table: str) -> list[str]:
    refuse = "EXECUTE FUNCTION refuse_change()"
    return [
        f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} FOR EACH ROW {refuse}",
        f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table} {refuse}",
        f"CREATE TRIGGER {table}_no_update BEFORE UPDATE ON {table} FOR EACH ROW {refuse}",
    ]


FUNCTION = """
CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rows of % never change', TG_TABLE_NAME;
END
$$
"""


def create(connection: Connection) -> None:
    """Make the triggers of every guarded table."""
    postgresql = connection.dialect.name == "postgresql"
    if postgresql:
        connection.exec_driver_sql(FUNCTION)
    build = _postgresql if postgresql else _sqlite
    for table in FROZEN:
        for statement in build(table):
            connection.exec_driver_sql(statement)
