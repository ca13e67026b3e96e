"""The one order in which transactions of the coordinator lock rows; see `volunteers.lock`.

Each test on PostgreSQL holds every transaction of the product to it: a statement that locks a row
out of order fails its transaction, whether or not another transaction is there to wait for.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sqlalchemy import Connection, Engine, event

import coordinator

PRODUCT = str(Path(coordinator.__file__).parent)
ENGINE = str(Path(PRODUCT, "database", "engine", "postgres.py"))
BEFORE = {
    "runs": frozenset[str](),
    "volunteers": frozenset({"runs"}),
    "tasks": frozenset({"runs", "volunteers"}),
    "accounts": frozenset({"runs", "volunteers", "tasks"}),
}
JOB = frozenset({"runs", "volunteers"})  # of any other table
LOCKED = re.compile(r"\bFOR (?:NO KEY )?UPDATE(?: OF (?P<table>\w+))?")
CHANGED = re.compile(r"\b(?:(?<!KEY )(?<!FOR )(?<!DO )UPDATE|DELETE FROM) (?P<table>\w+)")
UPSERT = re.compile(r"\bINSERT INTO (?P<table>\w+).*\bDO UPDATE\b", re.DOTALL)
# rows of these are no job of anybody, or of one transaction at a time
OTHERS = frozenset({"blobs", "codes", "api_keys", "meta", "unreferenced_blobs", "workers"})


def tables(statement: str) -> list[str]:
    """Return the tables of which a statement locks rows."""
    names = [match["table"] for match in CHANGED.finditer(statement)]
    names += [match["table"] for match in UPSERT.finditer(statement)]
    if (match := LOCKED.search(statement)) is not None:
        before = re.findall(r"\bFROM (\w+)", statement[: match.start()])
        is_joined = statement.lstrip().startswith(("UPDATE", "WITH"))
        names.append(match["table"] or before[-1 if is_joined else 0])
    return names


def is_of_product() -> bool:
    """Return True if the transaction's function is the coordinator's, and no test's."""
    name, frame = "", sys._getframe().f_back
    while frame is not None and frame.f_code.co_filename != ENGINE:
        name, frame = frame.f_code.co_filename, frame.f_back
    return frame is not None and name.startswith(PRODUCT)


@event.listens_for(Engine, "begin")
def _begin(conn: Connection) -> None:
    conn.info["locked tables"] = {}


@event.listens_for(Engine, "after_cursor_execute")
def _lock(
    conn: Connection,
    cursor: object,
    statement: str,
    parameters: object,
    context: object,
    many: bool,
) -> None:
    if conn.dialect.name != "postgresql" or getattr(cursor, "rowcount", 0) == 0:
        return
    locked: dict[str, str] = conn.info.setdefault("locked tables", {})
    for table in tables(statement):
        if table in locked or table in OTHERS:
            continue
        late = [name for name in locked if table in BEFORE.get(name, JOB)]
        if late and is_of_product():
            first = "\n".join(f"{name}: {locked[name]}" for name in late)
            raise AssertionError(f"{table} is locked too late\n{statement}\nafter\n{first}")
        locked[table] = statement
