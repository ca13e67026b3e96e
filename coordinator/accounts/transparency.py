"""Record as volunteers check it: signed heads, proofs, receipts of payments."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import structlog

from coordinator.database import record
from coordinator.database.ledger import record_tree as store
from coordinator.database.ledger.ledger_check import check_ledger
from shared.clock import Clock, pause
from shared.errors import BadRequest, VolunteerError
from shared.proofs.signing import SigningKey, canonical
from shared.protocol.transparency import (
    RECEIPTS_MAX,
    HeadPayload,
    Receipt,
    SignedHead,
    SignedReceipt,
    TreeProof,
    credited,
)

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.accounts.accounts import Principal
    from coordinator.database.engine.open_database import Database

SEAL_S = 5.0  # wait between two sealings: a payment has its receipt after the next sealing
BATCHES_MAX = 50  # batches of one call: the leaves of a long history are made by several calls

log = structlog.get_logger("record")


class RecordReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the record, and a sentence for each breach."""

    events: int  # entries of the ledger
    lines: int  # lines of the record
    size: int  # size of the tree over both
    root: str
    waiting: int  # rows that are not in the tree yet
    breaches: tuple[str, ...]


class Transparency:
    """Adds new rows to the Merkle tree and proves rows in it."""

    def __init__(self, db: Database, clock: Clock, key: SigningKey) -> None:
        self._db = db
        self._clock = clock
        self._key = key

    async def run(self, stop: asyncio.Event) -> None:
        """Seal in the background until `stop`; unsealed rows then wait for the next start."""
        while not stop.is_set():
            try:
                await self.seal()
            except VolunteerError as error:
                log.warning("the record was not sealed", error=error.message)
            await pause(self._clock, SEAL_S, stop)

    async def seal(self) -> int:
        """Add new rows of ledger and record to the tree; return their number.

        Writes nothing and locks nothing where nothing is new.
        """
        total = 0
        for _ in range(BATCHES_MAX):
            if not await self._db.read(store.has_backlog):
                break
            total += await self._db.write(store.extend)
        return total

    async def record_lines(self, before: int | None, limit: int) -> tuple[record.RecordLine, ...]:
        """Return lines of the record, newest first."""
        return tuple(await self._db.read(lambda conn: record.entries(conn, before, limit)))

    async def verify(self) -> RecordReport:
        """Compute the tree of ledger and record again; changes nothing."""

        def read(conn: Connection) -> RecordReport:
            tree, (events, lines) = store.head(conn), store.counts(conn)
            return RecordReport(
                events=events,
                lines=lines,
                size=tree.size,
                root=tree.root,
                waiting=max(0, events + lines - tree.size),
                breaches=(*check_ledger(conn), *store.check(conn)),
            )

        return await self._db.read(read)

    async def head(self) -> SignedHead:
        """Return the signed head of the record as it is now."""
        tree = await self._db.read(lambda conn: store.tree_head(conn, self._clock.now()))
        payload = canonical(HeadPayload(tree=tree))
        return SignedHead(payload=payload.decode(), signature=self._key.sign(payload).hex())

    async def consistency(self, old: int | None, new: int | None) -> TreeProof:
        """Prove that the record of `new` entries begins with the record of `old` entries. Raises
        NotFound, BadRequest.
        """
        if old is None or new is None:
            raise BadRequest("a proof of consistency needs two sizes: ?old=3&new=8")
        hashes = await self._db.read(lambda conn: store.consistency(conn, old, new))
        return TreeProof(size=new, hashes=tuple(node.hex() for node in hashes))

    async def receipts(
        self, principal: Principal, cursor: int | None = None
    ) -> tuple[SignedReceipt, ...]:
        """Return signed receipts of a volunteer's payments, oldest first, after entry `cursor`.

        A payment has a receipt as soon as its entry is sealed.
        """

        def read(conn: Connection) -> list[Receipt]:
            tree = store.tree_head(conn, self._clock.now())
            who = principal.volunteer_id
            payments = store.payments(conn, who, cursor or 0, RECEIPTS_MAX)
            places = [payment.place for payment in payments]
            proofs = store.inclusions(conn, places, tree.size)
            return [
                Receipt(
                    volunteer=who,
                    run=payment.run,
                    contribution=payment.entry.contribution_id,
                    version=payment.version,
                    credits_micro=credited(payment.entry, who),
                    entry=payment.entry,
                    leaf=payment.place,
                    proof=tuple(node.hex() for node in proof),
                    tree=tree,
                )
                for payment, proof in zip(payments, proofs, strict=True)
            ]

        return tuple(self._signed(receipt) for receipt in await self._db.read(read))

    def _signed(self, receipt: Receipt) -> SignedReceipt:
        payload = canonical(receipt)
        return SignedReceipt(payload=payload.decode(), signature=self._key.sign(payload).hex())
