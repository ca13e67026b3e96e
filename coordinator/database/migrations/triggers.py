"""Database triggers that refuse changes of append-only rows on any connection."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

# Tables whose rows are never changed or deleted.
FROZEN = ("postings", "versions", "merkle_leaves", "merkle_nodes")
SEALED = {  # only the hash chain may be filled in, once
    "events": ("id", "key", "digest", "kind", "run_id", "contribution_id", "memo", "at"),
    "record": ("id", "at", "actor", "action", "subject", "detail"),
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


def create(connection: Connection) -> None:
    """Make the triggers of every guarded table."""
    postgresql = connection.dialect.name == "postgresql"
    if postgresql:
        connection.exec_driver_sql(FUNCTION)
    build = _postgresql if postgresql else _sqlite
    tables: dict[str, Sequence[str]] = {**dict.fromkeys(FROZEN, ()), **SEALED}
    for table, columns in tables.items():
        for statement in build(table, columns):
            connection.exec_driver_sql(statement)
