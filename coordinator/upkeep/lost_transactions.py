"""Loss of transactions while servers run: a standby database that lagged was promoted, or the
database was replaced by an earlier state.

Versions and the record only grow. A server remembers the newest state that it read, and reports a
loss if the database holds an earlier one, until the organiser signs the present state (`coordinator
migrate --recovered`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import structlog

from coordinator.accounts import bearer_tokens
from coordinator.accounts.server_identity import restored_at
from coordinator.database import key_values, versions
from coordinator.database.ledger import record_tree
from coordinator.platform import PlatformService
from shared.clock import pause
from shared.errors import VolunteerError

if TYPE_CHECKING:
    from sqlalchemy import Connection

LOOK_S = 5.0
REST_S = 1.0  # shortest time between two comparisons

log = structlog.get_logger("losses")


class NewestState(msgspec.Struct, frozen=True, kw_only=True):
    """Newest state of the database that this process read."""

    restored_at: float  # time of the last signed statement of a restore
    record: int  # leaves of the record's tree
    heads: Mapping[int, versions.HeadRow]  # by run


class LostTransactions(PlatformService):
    """Compares the database with its newest state that this process has read."""

    _former: NewestState | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Compare after each new version and every few seconds, until `stop`."""
        watch = self._signals.watch("versions")
        while not stop.is_set():
            with suppress(VolunteerError):  # while the database is unreachable, nothing is compared
                await self.look()
            await watch.wait(LOOK_S)
            await pause(self._clock, REST_S, stop)

    async def look(self) -> str:
        """Store and return the losses since the last look; "" = no loss."""
        former = self._former
        await self._db.check_schema()
        state, lost = await self._db.read(lambda conn: _compare(conn, former))
        if lost:
            await self._db.write(lambda conn: _note(conn, lost))
            log.error("the database lost its newest transactions", lost=lost)
            self._signals.deliver(None)
        self._former = state
        return lost


def _compare(conn: Connection, former: NewestState | None) -> tuple[NewestState, str]:
    """Return the present state, and the missing parts of the former state in words; "" = none is
    missing.
    """
    state = NewestState(
        restored_at=restored_at(conn),
        record=record_tree.head(conn).size,
        heads=versions.heads(conn),
    )
    if former is None or state.restored_at > former.restored_at:
        return state, ""
    return state, ", ".join(_lost(conn, former, state))


def _lost(conn: Connection, former: NewestState, state: NewestState) -> Iterator[str]:
    for run_id, head in former.heads.items():
        present = state.heads.get(run_id)
        if present is None:
            yield f"{head.name} is gone"
        elif present.version < head.version:
            yield f"{head.name} is at version {present.version} and was at {head.version}"
        elif _signature(conn, run_id, head.version, present) != head.signature:
            yield f"{head.name} has another version {head.version} than before"
    if state.record < former.record:
        yield f"the record has {state.record:,} rows and had {former.record:,}"
    if state.restored_at < former.restored_at:
        yield "the statement of the last restore is gone"


def _signature(conn: Connection, run_id: int, version: int, head: versions.HeadRow) -> str:
    """Return the signature of a version of a run with this head."""
    if version == head.version:
        return head.signature
    return versions.get(conn, run_id, version).signature


def _note(conn: Connection, lost: str) -> None:
    key_values.put(conn, key_values.LOST, lost)
    bearer_tokens.renew_stamp(conn)  # processes drop their cached accounts, which may be lost
