"""A ledger longer than one answer of the coordinator."""

from __future__ import annotations

from typing import Any

from shared.protocol.listings import LedgerRow
from tests.support.virtual_clock import VirtualClock
from volunteer.control import commands
from volunteer.control.commands import Command
from volunteer.control.control import Control
from volunteer.control.event_bus import EventBus
from volunteer.control.ledger_pages import ledger

PAGE = 100


class Books:
    """A ledger of `lines`, one a second, told a page at a time; `asked` counts the pages."""

    def __init__(self, lines: int) -> None:
        self.rows = [
            LedgerRow(
                id=n, at=float(n), run="r", kind="earned", amount_micro=1, contribution=n, memo=""
            )
            for n in range(lines)
        ]
        self.asked = 0
        self.control = Control(EventBus(VirtualClock()), self._answer)

    async def _answer(self, command: Command[Any]) -> tuple[tuple[LedgerRow, ...], str]:
        assert isinstance(command, commands.Query)
        self.asked += 1
        below = int(command.args["cursor"] or len(self.rows))
        return tuple(reversed(self.rows[max(0, below - PAGE) : below])), ""

    def grow(self, by: int) -> None:
        last = len(self.rows)
        self.rows += [
            LedgerRow(
                id=n, at=float(n), run="r", kind="earned", amount_micro=1, contribution=n, memo=""
            )
            for n in range(last, last + by)
        ]


async def test_all_lines_come_newest_first_and_each_once() -> None:
    books = Books(365)
    found = await ledger(books.control)
    assert [row.id for row in found] == list(range(364, -1, -1))


async def test_what_is_older_is_not_asked_for() -> None:
    books = Books(1000)
    found = await ledger(books.control, since=850.0)
    assert [row.id for row in found] == list(range(999, 849, -1))
    assert books.asked == 2


async def test_what_is_known_is_not_asked_for_again() -> None:
    books = Books(500)
    known = await ledger(books.control)
    books.grow(7)
    books.asked = 0
    found = await ledger(books.control, since=100.0, older=known)
    assert [row.id for row in found] == list(range(506, 99, -1))
    assert books.asked == 1


async def test_an_empty_ledger_is_empty() -> None:
    assert await ledger(Books(0).control) == ()
