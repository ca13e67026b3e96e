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
QUIET = 10  # checks after a payment: its entry is sealed within that time

log = logging.getLogger(__name__)


class ReceiptKeeper:
    """Keeps the receipts of one account."""

    def __init__(self, check: RecordCheck, book: ReceiptBook, hub: EventBus, clock: Clock) -> None:
        self._book = book
        self._check = check
        self._hub = hub
        self._clock = clock
        self._told = ""
        self._due = QUIET  # checks left after the last payment
        self._paid: tuple[int, int] | None = None

    async def run(self) -> None:
        """Fetch new receipts after each payment and check the record once an hour; both at the
        start.
        """
        checked_at = float("-inf")
        while True:
            try:
                if self._wanted():
                    await self._say(await self._check.fetch())
                if self._clock.monotonic() - checked_at >= CHECK_S:
                    checked_at = self._clock.monotonic()
                    await self._say(await self._check.check())
            except (VolunteerError, OSError) as error:
                log.info("the record was not checked: %s", error)
            await self._clock.sleep(FETCH_S)

    def _wanted(self) -> bool:
        """Return True for `QUIET` checks after a payment: its receipt comes a moment later."""
        me = self._hub.status.me
        paid = (me.earned_micro, me.escrow_micro) if me is not None else None
        if paid != self._paid:
            self._paid, self._due = paid, QUIET
        self._due -= 1
        return self._due >= 0

    async def _say(self, problem: str) -> None:
        """Alert the owner, not twice in a row; a restore signed by the coordinator is no alert."""
        if problem and (sentence := await self._check.restored()):
            self._hub.notice(sentence, "warning")
            return
        if problem and problem != self._told:
            self._told = problem
            self._hub.notice(
                Sentence(
                    "{problem}; what it signed is kept in {folder} as evidence",
                    problem=problem,
                    folder=self._book.folder,
                ),
                "error",
            )
