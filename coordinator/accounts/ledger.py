"""Balances of volunteers, and the check of the ledger, as a service.

Other services post credits within their own transactions, with the functions of
`coordinator.database.ledger.payments`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.database.ledger import payments as store
from coordinator.database.ledger import record_tree
from coordinator.database.ledger.ledger_check import check_ledger
from coordinator.database.ledger.payments import Balances

if TYPE_CHECKING:
    from coordinator.database.engine.open_database import Database
    from shared.protocol.listings import LedgerRow

ROWS = 100


class Ledger:
    """Reads and checks the ledger."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def balances(self, volunteer_id: str) -> Balances:
        """Return the balances of a volunteer."""
        return await self._db.read(lambda conn: store.balances(conn, volunteer_id))

    async def history(self, volunteer_id: str, before: int | None = None) -> tuple[LedgerRow, ...]:
        """Return a page of a volunteer's ledger, newest line first; `before` is the id of the last
        line seen.
        """
        rows = await self._db.read(lambda conn: store.history(conn, volunteer_id, before, ROWS))
        return tuple(rows)

    async def check(self) -> tuple[str, ...]:
        """Return a sentence for each breach in the ledger and the record; () without a breach."""
        return await self._db.read(lambda conn: (*check_ledger(conn), *record_tree.check(conn)))
