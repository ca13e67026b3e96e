"""All ledger rows of one account, over as many pages as needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from shared.protocol import endpoints
from shared.protocol.endpoint import Endpoint
from shared.protocol.listings import LedgerRow

T = TypeVar("T")

PAGES_MAX = 10_000  # pages of 100 rows that one call reads at most


class Asks(Protocol):
    """Method of `Control` that the ledger reader needs."""

    async def query(self, endpoint: Endpoint[T], **args: str | int) -> T: ...


async def ledger(
    control: Asks, since: float = 0.0, older: Sequence[LedgerRow] = ()
) -> tuple[LedgerRow, ...]:
    """Return ledger rows from `since` (epoch seconds) on, newest first; pages older than the newest
    `older` row are not fetched.

    `older` is the complete result of an earlier call. Raises VolunteerError if the coordinator does
    not answer.
    """
    newest = older[0].id if older else -1
    fresh: list[LedgerRow] = []
    below: int | None = None
    for _ in range(PAGES_MAX):
        page = await control.query(endpoints.LEDGER, cursor="" if below is None else str(below))
        rows = [row for row in page if below is None or row.id < below]
        fresh += [row for row in rows if row.id > newest and row.at >= since]
        if not rows or rows[-1].id <= newest or rows[-1].at < since:
            break
        below = rows[-1].id
    return (*fresh, *(row for row in older if row.at >= since))
