"""Single values of the installation, by name."""

from __future__ import annotations

from sqlalchemy import Connection, insert, select, update

from coordinator.store.ledger_tables import meta

ADDRESS = "address"  # where the server was last reached, for join links


def get(conn: Connection, key: str) -> str | None:
    return conn.execute(select(meta.c.value).where(meta.c.key == key)).scalar()


def put(conn: Connection, key: str, value: str) -> None:
    if conn.execute(update(meta).where(meta.c.key == key).values(value=value)).rowcount == 0:
        conn.execute(insert(meta).values(key=key, value=value))
