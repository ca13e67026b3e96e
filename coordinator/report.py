"""The report of a run as a table for a spreadsheet. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.database.statistics import Person

MICRO = 1_000_000  # micro-credits in a credit
_HEAD = ("name", "nickname", "state", "machines", "first_seen", "last_seen", "accepted", "merged")
_TAIL = ("device_seconds", "credits", "credits_pending")


def table(people: Sequence[Person]) -> list[list[str]]:
    """A header and a row for each person; one column for each reason that anything was rejected
    for. Instants are UTC.
    """
    reasons = sorted({reason for person in people for reason in person.work.rejected})
    header = [*_HEAD, *(f"rejected_{reason}" for reason in reasons), *_TAIL]
    return [header, *(_row(person, reasons) for person in people)]


def as_csv(people: Sequence[Person]) -> str:
    """The table as CSV; no cell can be taken for a formula."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([[_plain(cell) for cell in row] for row in table(people)])
    return text.getvalue()


def _row(person: Person, reasons: Sequence[str]) -> list[str]:
    work = person.work
    return [
        person.label,
        person.nickname,
        person.state,
        str(person.machines),
        _instant(person.first_seen),
        _instant(person.last_seen),
        str(work.accepted),
        str(work.merged),
        *(str(work.rejected.get(reason, 0)) for reason in reasons),
        f"{work.device_s:.0f}",
        _credits(person.earned_micro),
        _credits(person.pending_micro),
    ]


def _instant(at: float | None) -> str:
    return "" if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"


def _credits(micro: int) -> str:
    """Exact: six decimals, whatever the size."""
    sign = "-" if micro < 0 else ""
    return f"{sign}{abs(micro) // MICRO}.{abs(micro) % MICRO:06d}"


def _plain(cell: str) -> str:
    """Spreadsheets run what begins like a formula; names come from people."""
    return f"'{cell}" if cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell
