"""Balances of volunteers, and the check of the books, as a service.

Credits are posted by those whose transaction they belong to, with the functions of
`coordinator.database.ledger.payments`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.database import record
from coordinator.database.ledger import payments as store
from coordinator.database.ledger import record_tree
from coordinator.database.ledger.payments import Balances

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.engine.open_database import Database
    from shared.protocol.listings import LedgerRow

ROWS = 100


class Ledger:
    """Reads, checks and seals the ledger."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def balances(self, volunteer_id: str) -> Balances:
        """Return the balances of a volunteer."""
        return await self._db.read(lambda conn: store.balances(conn, volunteer_id))

    async def history(
        self, volunteer_id: str, before: int | None = None, limit: int = ROWS
    ) -> tuple[LedgerRow, ...]:
        """Return a page of a volunteer's ledger, newest line first; `before` is the id of the last
        line seen.
        """
        rows = await self._db.read(lambda conn: store.history(conn, volunteer_id, before, limit))
        return tuple(rows)

    async def check(self) -> tuple[str, ...]:
        """Return a sentence for each breach in ledger, record and their tree; empty if none."""

        def read(conn: Connection) -> tuple[str, ...]:
            chains = store.check_ledger(conn) + record.check(conn)
            return (*chains, *record_tree.check(conn))

        return await self._db.read(read)

    async def seal(self) -> int:
        """Chain all unsealed events and record lines; return their number."""
        total = 0
        for seal in (store.seal, record.seal):
            while count := await self._db.write(seal):
                total += count
        return total
