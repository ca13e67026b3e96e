"""Data that members keep: a machine declares its numbers, and withdraws them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.database import runs
from coordinator.database import volunteers as accounts
from coordinator.database.members import member_rows
from coordinator.runs.definition import definition
from shared.errors import BadRequest, Conflict, Forbidden

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.accounts.accounts import Principal
    from coordinator.database.engine.open_database import Database
    from coordinator.signals import Signals
    from shared.clock import Clock
    from shared.protocol.members import MemberData


class MemberDeclarations:
    """Stores the numbers of the data that machines keep for runs."""

    def __init__(self, db: Database, clock: Clock, signals: Signals) -> None:
        self._db = db
        self._clock = clock
        self._signals = signals

    async def declare(self, principal: Principal, run: str, data: MemberData) -> None:
        """Store the numbers of the data of this machine; the same numbers again change nothing.

        Raises NotFound, BadRequest for a run on the organiser's data, Conflict for a run that has
        ended, Forbidden for an account that the organiser did not vouch for.
        """
        owner = principal.volunteer_id, principal.worker_id

        def write(conn: Connection) -> None:
            row = runs.by_id(conn, runs.by_name(conn, run).id, lock=True)
            if not definition(row).at_members:
                raise BadRequest(f'"{run}" trains on data of its organiser: it needs none of yours')
            if row.state in ("completed", "failed"):
                raise Conflict(f'"{run}" has ended')
            if not accounts.existing(conn, principal.volunteer_id).invited:
                raise Forbidden(
                    f'"{run}" is for members whom the organiser vouched for: ask for an invite'
                )
            member_rows.declare(conn, row.id, owner, data, self._clock.now())

        await self._db.write(write)
        self._signals.notify("volunteers")

    async def withdraw(self, principal: Principal, run: str) -> None:
        """Forget that this machine keeps data for a run. Raises NotFound."""

        def write(conn: Connection) -> None:
            row = runs.by_id(conn, runs.by_name(conn, run).id, lock=True)
            member_rows.withdraw(conn, row.id, principal.worker_id, self._clock.now())

        await self._db.write(write)
