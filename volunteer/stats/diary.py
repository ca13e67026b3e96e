"""Diary of an account as this machine saw it: credits and rank by day, and the marks that were
celebrated. Bounded, and pure.

The coordinator's ledger has every payment, but reading a year of it takes thousands of requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date, timedelta

import msgspec

from shared.protocol.accounts import Me
from volunteer.i18n.catalogue import N_, _, ngettext
from volunteer.stats.milestones import CREDITS, HOURS, local_day, milestones

DAYS_MAX = 400  # kept: more than a year


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """One day of this machine's calendar."""

    day: str  # ISO date
    earned_micro: int  # of the account since its beginning, when it was seen last that day
    merged: int = 0
    rank: int | None = None


class Diary(msgspec.Struct, frozen=True, kw_only=True):
    """Days on which the account was seen, oldest first, and the last mark of each ladder."""

    days: tuple[Day, ...] = ()
    marks: dict[str, int] | None = None  # None: nobody has looked yet


_CONTRIBUTION = N_("your first contribution is merged")
_FIRST = {
    CREDITS: N_("your first credit is earned"),
    HOURS: N_("your first hour of work is given"),
}


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A milestone that was just passed."""

    name: str
    value: int

    @property
    def sentence(self) -> str:
        """Return it as a sentence for a person."""
        if self.value == 1:
            return _(_FIRST.get(self.name, _CONTRIBUTION))
        if self.name == CREDITS:
            return ngettext("{n} credit earned", "{n} credits earned", self.value)
        if self.name == HOURS:
            return ngettext("{n} hour of work given", "{n} hours of work given", self.value)
        return ngettext("{n} contribution merged", "{n} contributions merged", self.value)


def noted(diary: Diary, me: Me, now: float) -> tuple[Diary, tuple[Mark, ...]]:
    """Return the diary after the account was seen, and the marks that it passed since the last
    time. An account that comes with a past passes none.
    """
    today = Day(
        day=local_day(now).isoformat(), earned_micro=me.earned_micro, merged=me.merged, rank=me.rank
    )
    others = tuple(day for day in diary.days if day.day < today.day)
    reached = {goal.name: goal.last for goal in milestones(me)}
    before = reached if diary.marks is None else diary.marks
    passed = tuple(
        Mark(name=name, value=value)
        for name, value in reached.items()
        if value > before.get(name, 0)
    )
    highest = {name: max(value, before.get(name, 0)) for name, value in reached.items()}
    return Diary(days=(*others, today)[-DAYS_MAX:], marks=highest), passed


def by_day(diary: Diary, exact: Mapping[date, int], since: date | None) -> dict[date, int]:
    """Return the credits of each day: from `since` on what the ledger says, before that what the
    account grew by. What came while nobody looked counts on the day it was seen.
    """
    found: dict[date, int] = {}
    for before, after in zip(diary.days, diary.days[1:], strict=False):
        day = _date(after.day)
        grown = max(0, after.earned_micro - before.earned_micro)
        if day is not None and (since is None or day < since):
            found[day] = grown
    if since is not None:
        found |= {day: micro for day, micro in exact.items() if day >= since}
    return found


def weeks(amounts: Mapping[date, int], today: date, count: int) -> list[list[int | None]]:
    """Return the last weeks, Monday first, this one last; None for the days to come."""
    monday = today - timedelta(days=today.weekday())
    found: list[list[int | None]] = []
    for back in range(count - 1, -1, -1):
        start = monday - timedelta(weeks=back)
        days = [start + timedelta(days=n) for n in range(7)]
        found.append([amounts.get(day, 0) if day <= today else None for day in days])
    return found


def ranks(diary: Diary) -> tuple[tuple[date, int], ...]:
    """Return the place on the leaderboard by day, oldest first."""
    found = ((_date(day.day), day.rank) for day in diary.days)
    return tuple((day, rank) for day, rank in found if day is not None and rank is not None)


def level(micro: int, amounts: Iterable[int]) -> int:
    """Return how much a day was, 0 to 4, beside the best of them."""
    top = max(amounts, default=0)
    if micro <= 0 or top <= 0:
        return 0
    return min(4, 1 + int(micro / top * 3.999))


def _date(text: str) -> date | None:
    try:
        return date.fromisoformat(text)
    except ValueError:
        return None
