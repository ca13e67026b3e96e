"""Milestones of a volunteer, counted from the ledger: a week in numbers, and marks that never fall.
Pure.

Personal progress comes before rank: it cannot be gamed by others, and a small machine reaches it
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta

import msgspec

from shared.protocol.accounts import Me
from shared.protocol.listings import LedgerRow
from shared.units import DAY_S
from volunteer.i18n.catalogue import N_

DAYS = 7
CREDITS = N_("credits earned")
HOURS = N_("hours of work given")
_STEPS = (1, 10, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 1_000_000)


class Week(msgspec.Struct, frozen=True, kw_only=True):
    """Last seven days, today last."""

    credits_micro: tuple[int, ...]  # a day
    contributions: int
    streak: int  # days in a row with paid work, up to today or yesterday
    before_micro: int = 0  # the seven days before, as far as they are known

    @property
    def total_micro(self) -> int:
        return sum(self.credits_micro)

    @property
    def active(self) -> int:
        return sum(1 for amount in self.credits_micro if amount > 0)


class Milestone(msgspec.Struct, frozen=True, kw_only=True):
    """Last passed mark, and the next one."""

    name: str
    have: float
    last: int  # 0: none yet
    next: int | None

    @property
    def share(self) -> float:
        """Return the progress to the next mark, 0 to 1."""
        return 1.0 if self.next is None else min(1.0, max(0.0, self.have / self.next))


def recap_since(now: float) -> float:
    """Return the instant from which ledger rows make a recap: this week and the one before."""
    return now - (2 * DAYS + 1) * DAY_S


def week(rows: Sequence[LedgerRow], now: float) -> Week:
    """Return seven days of a ledger, by the local calendar."""
    today = local_day(now)
    by_day: dict[date, int] = {}
    contributions = set()
    for row in rows:
        if row.kind != "earned":
            continue
        day = local_day(row.at)
        by_day[day] = by_day.get(day, 0) + row.amount_micro
        if row.contribution is not None and (today - day).days < DAYS:
            contributions.add(row.contribution)
    days = [today - timedelta(days=back) for back in range(DAYS - 1, -1, -1)]
    earlier = [today - timedelta(days=back) for back in range(DAYS, 2 * DAYS)]
    return Week(
        credits_micro=tuple(by_day.get(day, 0) for day in days),
        contributions=len(contributions),
        streak=_streak(by_day, today),
        before_micro=sum(by_day.get(day, 0) for day in earlier),
    )


def milestones(me: Me) -> tuple[Milestone, ...]:
    """Return a volunteer's place on each ladder."""
    return (
        _milestone(N_("contributions merged"), me.merged),
        _milestone(HOURS, me.device_s / 3600),
        _milestone(CREDITS, me.earned_micro / 1e6),
    )


def _milestone(name: str, have: float) -> Milestone:
    passed = [step for step in _STEPS if step <= have]
    ahead = [step for step in _STEPS if step > have]
    return Milestone(
        name=name,
        have=have,
        last=passed[-1] if passed else 0,
        next=ahead[0] if ahead else None,
    )


def _streak(by_day: dict[date, int], today: date) -> int:
    day = today if by_day.get(today, 0) > 0 else today - timedelta(days=1)
    length = 0
    while by_day.get(day, 0) > 0:
        length += 1
        day -= timedelta(days=1)
    return length


def local_day(at: float) -> date:
    """Return the local day of an instant; one outside the calendar counts as the first day."""
    try:
        return datetime.fromtimestamp(at, tz=UTC).astimezone().date()
    except (OverflowError, OSError, ValueError):
        return date.min
