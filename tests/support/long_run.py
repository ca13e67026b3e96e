"""A long run: its newest round again and again, as rows, and the cost of an operation.

Only the newest of the new versions has files; the others were pruned, as retention would have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Table,
    event,
    insert,
    select,
    text,
    update,
)

from coordinator.database.engine.dump import reset_sequences
from coordinator.database.ledger import record_tree
from coordinator.database.tables.contributions import contributions, verdicts
from coordinator.database.tables.ledger import events, postings
from coordinator.database.tables.merges import merges
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import tasks
from coordinator.database.tables.versions import evaluations, versions

GAP = 10_000  # between the numbers of a row and of its copy
READ = "SELECT coalesce(sum(seq_tup_read + idx_tup_fetch), 0) FROM pg_stat_xact_user_tables"
BATCH = 2_000  # rounds copied at once
STEPS = 20  # of SQLite's virtual machine, counted at once

Change = Callable[[int, Any], Any]  # of a column's value in copy k


def grow(conn: Connection, run_id: int, rounds: int) -> None:
    """Repeat the newest round of a run so many times."""
    head = conn.execute(select(runs.c.head).where(runs.c.id == run_id)).scalar_one()
    merged = select(contributions.c.id).where(contributions.c.version == head)
    numbers = list(conn.execute(merged).scalars())
    worked = select(contributions.c.task_id).where(contributions.c.id.in_(numbers))
    done = list(conn.execute(worked).scalars())
    posted = select(events.c.id).where(events.c.contribution_id.in_(numbers))
    told = list(conn.execute(posted).scalars())

    def beside(k: int, number: int | None) -> int | None:
        return None if number is None else number + k * GAP

    def later(k: int, number: int | None) -> int | None:
        return None if number is None else number + k

    def other(k: int, sha256: str) -> str:
        return sha256 if k == rounds else hashlib.sha256(f"{sha256} {k}".encode()).hexdigest()

    def copy(table: Table, which: ColumnElement[bool], **changes: Change) -> None:
        found = [dict(row) for row in conn.execute(select(table).where(which)).mappings()]
        for first in range(1, rounds + 1, BATCH):
            made = [
                row | {name: change(k, row[name]) for name, change in changes.items()}
                for k in range(first, min(rounds + 1, first + BATCH))
                for row in found
            ]
            conn.execute(insert(table), made)

    copy(tasks, tasks.c.id.in_(done), id=beside, claim_id=lambda k, was: None, base_version=later)
    copy(
        contributions,
        contributions.c.id.in_(numbers),
        id=beside, task_id=beside, sha256=other, version=later, base_version=later,
    )  # fmt: skip
    copy(
        verdicts, verdicts.c.contribution_id.in_(numbers),
        id=beside, contribution_id=beside, version=later,
    )  # fmt: skip
    copy(
        events, events.c.id.in_(told),
        id=beside, key=lambda k, key: f"{key}-{k}", contribution_id=beside,
    )  # fmt: skip
    copy(postings, postings.c.event_id.in_(told), id=beside, event_id=beside)
    at_head = (versions.c.run_id == run_id) & (versions.c.version == head)
    copy(
        versions, at_head, version=later, parent=later, published_sha256=other, master_sha256=other
    )
    measured = (evaluations.c.run_id == run_id) & (evaluations.c.version == head)
    copy(evaluations, measured, version=later, pruned=lambda k, was: k < rounds)
    begun = (merges.c.run_id == run_id) & (merges.c.base == head - 1)
    copy(merges, begun, id=beside, base=later)
    conn.execute(update(runs).where(runs.c.id == run_id).values(head=head + rounds))
    reset_sequences(conn)
    while record_tree.extend(conn, 5000):
        pass


def look_again(conn: Connection) -> None:
    """Let PostgreSQL see how large its tables are, as it does by itself in time."""
    if conn.dialect.name == "postgresql":
        conn.execute(text("ANALYZE"))


class Effort:
    """Work of the database: steps of SQLite's virtual machine, or rows that PostgreSQL read."""

    def __init__(self) -> None:
        self.spent = 0


@contextmanager
def effort() -> Iterator[Effort]:
    """Counted on all connections that are opened meanwhile."""
    counted = Effort()

    def step() -> int:
        counted.spent += STEPS
        return 0

    def connected(connection: Any, record: object) -> None:
        if hasattr(connection, "set_progress_handler"):
            connection.execute("SELECT count(*) FROM sqlite_master").fetchall()  # reads the schema
            connection.set_progress_handler(step, STEPS)

    def ends(conn: Connection) -> None:
        if conn.dialect.name == "postgresql":
            counted.spent += int(conn.exec_driver_sql(READ).scalar_one())
            conn.exec_driver_sql("SELECT pg_stat_force_next_flush()")  # else counted once more

    event.listen(Engine, "connect", connected)
    event.listen(Engine, "commit", ends)
    event.listen(Engine, "rollback", ends)  # how a look ends
    try:
        yield counted
    finally:
        event.remove(Engine, "connect", connected)
        event.remove(Engine, "commit", ends)
        event.remove(Engine, "rollback", ends)
