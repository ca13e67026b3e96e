"""Database in memory that answers at once on the caller's thread, for simulations in virtual time.

No call waits and all state is in memory, so the same calls in the same order give the same answers.
A server never uses it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.pool import StaticPool

from coordinator.database.engine.open_database import Database
from coordinator.database.migrations.upgrade import upgrade

T = TypeVar("T")


class InlineRunner:
    """SQLite in memory behind one connection; see `Runner`."""

    failed = ""

    def __init__(self) -> None:
        self._engine = create_engine(
            "sqlite://",
            connect_args={"isolation_level": None, "check_same_thread": False},
            poolclass=StaticPool,
        )

        @event.listens_for(self._engine, "connect")
        def _prepare(connection: sqlite3.Connection, record: object) -> None:
            connection.execute("PRAGMA foreign_keys=ON").close()

        @event.listens_for(self._engine, "begin")
        def _begin(connection: Connection) -> None:
            connection.exec_driver_sql("BEGIN")

        self._connection = self._engine.connect()

    def apply(self, fn: Callable[[Connection], T]) -> T:
        """Run `fn` in one transaction, which is rolled back if `fn` raises."""
        with self._connection.begin():
            return fn(self._connection)

    async def write(self, fn: Callable[[Connection], T]) -> T:
        return self.apply(fn)

    async def read(self, fn: Callable[[Connection], T]) -> T:
        return self.apply(fn)

    async def bridge(self, deliver: Callable[[str | None], None]) -> Callable[[str], None]:
        return lambda topic: None  # no other process sees this database

    async def close(self) -> None:
        self._connection.close()
        self._engine.dispose()


def in_memory() -> Database:
    """Return a new, empty database with all tables."""
    runner = InlineRunner()
    runner.apply(upgrade)
    return Database(runner, "sqlite")
