"""Reversals by the organiser: of one contribution, or of a volunteer's since an instant.

A volunteer's contributions are reversed in batches, each in one transaction with its line in the
record; after an interruption, the same command reverses the remaining contributions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from coordinator.accounts.suspension import reason_of
from coordinator.database import contributions, record, verdicts
from coordinator.database import volunteers as store
from coordinator.database.ledger import payments
from coordinator.database.ledger.payments import Payment
from coordinator.database.ledger.reversal import TakenBack, take_back
from coordinator.rules import nicknames
from shared.errors import Conflict, NotFound

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.contributions import ContributionRow
    from coordinator.database.engine.open_database import Database
    from shared.clock import Clock

BATCH = 500  # contributions in one transaction
UNMERGED = "taken back by the organiser: neither merged nor paid"


class Reversal(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts taken back from a volunteer of this name."""

    name: str
    taken: TakenBack


class Reversals:
    """Takes credits back, with a reason that the record and the volunteer's history keep."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock

    async def of_volunteer(self, who: str, since: float, reason: str) -> Reversal:
        """Reverse the pay of contributions received since `since`. Raises NotFound, BadRequest."""
        why = reason_of(reason)
        key = nicknames.skeleton(who[:256])
        volunteer = await self._db.read(lambda conn: store.find(conn, who[:256], key))
        totals, after = TakenBack(), 0

        def batch(conn: Connection) -> tuple[TakenBack, int]:
            return self._batch(conn, volunteer.id, since, after, why)

        while True:
            more, after = await self._db.write(batch)
            totals += more
            if not after:
                return Reversal(name=volunteer.nickname, taken=totals)

    async def of_contribution(self, number: int, reason: str) -> Reversal:
        """Reverse the pay of one contribution.

        Raises NotFound for an unknown contribution, BadRequest for an empty reason, Conflict if
        nothing was paid for it or the pay was taken back before.
        """
        why = reason_of(reason)

        def change(conn: Connection) -> Reversal:
            row = _paid(conn, number)
            now, stored_reason = self._clock.now(), record.reason(conn, row.volunteer_id, why)
            totals = take_back(conn, [Payment.of(row)], stored_reason, now)
            detail = {"reason": stored_reason, **msgspec.structs.asdict(totals)}
            record.append(conn, "organiser", "contribution.reverse", str(number), detail, now)
            return Reversal(name=store.existing(conn, row.volunteer_id).nickname, taken=totals)

        return await self._db.write(change)

    def _batch(
        self, conn: Connection, volunteer_id: str, since: float, after: int, why: str
    ) -> tuple[TakenBack, int]:
        """Reverse the next contributions; return the number of the last, 0 if no contribution is
        left.
        """
        now = self._clock.now()
        store.locked(conn, volunteer_id)
        rows = contributions.good_of(conn, volunteer_id, since, after, BATCH)
        for row in rows:
            if row.state == "accepted":
                verdicts.decide(conn, row, "superseded", now=now, weight=0.0, message=UNMERGED)
        stored_reason = record.reason(conn, volunteer_id, why)
        totals = take_back(conn, [Payment.of(row) for row in rows], stored_reason, now)
        if totals.contributions:
            detail = {"reason": stored_reason, "since": since, **msgspec.structs.asdict(totals)}
            record.append(conn, "organiser", "volunteer.reverse", volunteer_id, detail, now)
        return totals, rows[-1].id if len(rows) == BATCH else 0


def _paid(conn: Connection, number: int) -> ContributionRow:
    """Return a contribution that was paid, its account locked. Raises NotFound, Conflict."""
    try:
        row = contributions.by_id(conn, number)
        store.locked(conn, row.volunteer_id)
        row = contributions.by_id(conn, number, lock=True)
    except NotFound:
        raise NotFound(f"there is no contribution {number}") from None
    steps = payments.steps_of(conn, [number])[number]
    if "reverse" in steps or "forfeit" in steps:
        raise Conflict(f"contribution {number} was taken back already")
    if steps & {"earn", "escrow"} and row.price_micro:
        return row
    if steps == {"pending"} and row.price_micro:
        raise Conflict(
            f"contribution {number} is not paid yet, it waits for a merge: suspend its sender"
            " with `coordinator volunteer suspend`, or reverse it when it is merged"
        )
    raise Conflict(f"contribution {number} is {row.state}, and nothing was paid for it")
