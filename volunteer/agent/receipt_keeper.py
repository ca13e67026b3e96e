"""Keeper of receipts: fetches them and checks that the coordinator's record only grows.

Work never waits for receipts.
"""

from __future__ import annotations

import logging

from shared.clock import Clock
from shared.errors import VolunteerError
from shared.sentences import Sentence
from volunteer.account.record_check import RecordCheck
from volunteer.control.event_bus import EventBus
from volunteer.storage.receipts import ReceiptBook

FETCH_S = 60.0  # interval of checks for new payments
CHECK_S = 3600.0  # interval of checks of the record
QUIET = 10  # fetches after a payment, within which its ledger entry gets a receipt

log = logging.getLogger(__name__)


class ReceiptKeeper:
    """Keeps the receipts of one account."""

    def __init__(self, check: RecordCheck, book: ReceiptBook, bus: EventBus, clock: Clock) -> None:
        self._book = book
        self._check = check
        self._bus = bus
        self._clock = clock
        self._last_problem = ""
        self._checks_left = QUIET  # checks left after the last payment
        self._paid: tuple[int, int] | None = None

    async def run(self) -> None:
        """Fetch new receipts after each payment and check the record once an hour; both at the
        start.
        """
        checked_at = float("-inf")
        while True:
            try:
                if self._awaits_receipt():
                    await self._alert(await self._check.fetch())
                if self._clock.monotonic() - checked_at >= CHECK_S:
                    checked_at = self._clock.monotonic()
                    await self._alert(await self._check.check())
            except (VolunteerError, OSError) as error:
                log.info("the record was not checked: %s", error)
            await self._clock.sleep(FETCH_S)

    def _awaits_receipt(self) -> bool:
        """Return True for the `QUIET` fetches after a payment, whose receipt comes later."""
        me = self._bus.status.me
        paid = (me.earned_micro, me.escrow_micro) if me is not None else None
        if paid != self._paid:
            self._paid, self._checks_left = paid, QUIET
        self._checks_left -= 1
        return self._checks_left >= 0

    async def _alert(self, problem: str) -> None:
        """Alert the owner of a problem, but not of the same problem twice in a row. A restore that
        the coordinator signed is a warning instead.
        """
        if problem and (sentence := await self._check.accept_restore()):
            self._bus.notice(sentence, "warning")
            return
        if problem and problem != self._last_problem:
            self._last_problem = problem
            self._bus.notice(
                Sentence(
                    "{problem}; what it signed is kept in {folder} as evidence",
                    problem=problem,
                    folder=self._book.folder,
                ),
                "error",
            )
