"""Hash chains over append-only rows: a changed, dropped or swapped sealed row breaks the chain.

Sealing is done afterwards, in order, a batch at a time, so that writers never wait for each other's
hash. The end of the chain is kept in `meta`, so that a cut-off tail is noticed as well; a backup
signs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from sqlalchemy import Column, Connection, Table, bindparam, func, select, text, update

from coordinator.database.ledger.postings import insert_new
from coordinator.database.tables.record import meta
from shared.decoding import decode

START = "0" * 64
SEAL_BATCH = 1000
READ_BATCH = 2000


class End(msgspec.Struct, frozen=True, kw_only=True):
    """The last sealed row and its hash; id 0 before the first."""

    id: int = 0
    chain: str = START


def link(previous: str, said: Sequence[Any]) -> str:
    """Return the hash of a row with content `said` after a row with hash `previous`."""
    return hashlib.sha256(previous.encode() + b"\n" + msgspec.json.encode(said)).hexdigest()


def end(conn: Connection, table: Table) -> End:
    """Return the last sealed row of a table."""
    stored = conn.execute(select(meta.c.value).where(meta.c.key == f"chain.{table.name}")).scalar()
    return End() if stored is None else decode(stored, End)


def seal(
    conn: Connection, table: Table, columns: Sequence[Column[Any]], limit: int = SEAL_BATCH
) -> int:
    """Chain the next rows; return their number. Must be the first statement of its transaction."""
    at = _held_end(conn, table)  # first: another that seals must not wait where writers queue
    settled = _settled(conn, table)
    query = (
        select(table.c.id, *columns)
        .where(table.c.id > at.id, table.c.id <= settled, table.c.chain.is_(None))
        .order_by(table.c.id)
        .limit(limit)
    )
    rows = []
    for row in conn.execute(query):
        at = End(id=row[0], chain=link(at.chain, list(row)))
        rows.append({"row_id": at.id, "hash": at.chain})
    if rows:
        fill = update(table).where(table.c.id == bindparam("row_id"), table.c.chain.is_(None))
        conn.execute(fill.values(chain=bindparam("hash")), rows)
        _set_end(conn, table, at)
    return len(rows)


def _settled(conn: Connection, table: Table) -> int:
    """Return the id up to which no row can appear any more, 0 for an empty table.

    PostgreSQL gives numbers before a transaction commits, so a lower one could still appear. The
    table is closed to writers for this one look, which waits for those under way; rolling back to
    the savepoint opens it again.
    """
    newest = select(func.coalesce(func.max(table.c.id), 0))
    if conn.dialect.name != "postgresql":
        return int(conn.execute(newest).scalar_one())
    point = conn.begin_nested()
    conn.execute(text(f'LOCK TABLE "{table.name}" IN SHARE ROW EXCLUSIVE MODE'))
    settled = int(conn.execute(newest).scalar_one())
    point.rollback()
    return settled


def _held_end(conn: Connection, table: Table) -> End:
    """Return the last sealed row, locked: no other transaction can continue the chain before this
    one ends.
    """
    key = f"chain.{table.name}"
    fresh = msgspec.json.encode(End()).decode()
    conn.execute(insert_new(conn, meta, "key").values(key=key, value=fresh))
    stored = select(meta.c.value).where(meta.c.key == key).with_for_update()
    return decode(conn.execute(stored).scalar_one(), End)


def _set_end(conn: Connection, table: Table, at: End) -> None:
    value = msgspec.json.encode(at).decode()
    conn.execute(update(meta).where(meta.c.key == f"chain.{table.name}").values(value=value))


def check(conn: Connection, table: Table, columns: Sequence[Column[Any]]) -> Iterator[str]:
    """Verify the whole chain; return a sentence for the first broken row."""
    goal, at, count = end(conn, table), End(), 0
    while at.id < goal.id:
        query = select(table.c.chain, table.c.id, *columns).order_by(table.c.id).limit(READ_BATCH)
        rows = conn.execute(query.where(table.c.id > at.id, table.c.id <= goal.id)).all()
        for row in rows:
            if row[0] != link(at.chain, list(row[1:])):
                yield (
                    f"{table.name} {row[1]}: this row, or one just before it, was changed or "
                    "removed after it was sealed"
                )
                return
            at = End(id=row[1], chain=row[0])
        count += len(rows)
        if not rows:
            break
    if at != goal:
        yield (
            f"{table.name}: the chain ends at row {at.id}, but row {goal.id} was sealed: rows "
            "were removed"
        )
    query = (
        select(func.count())
        .select_from(table)
        .where(table.c.chain.is_not(None), table.c.id > goal.id)
    )
    if goal == end(conn, table) and conn.execute(query).scalar_one():
        yield (
            f"{table.name}: rows behind row {goal.id} say they were sealed, but the end of "
            "the "
            "chain says no"
        )
