"""Hours of a week as people write them: `mon-fri 18:00-08:00`, `sat-sun`, `22:00-06:00`.

An entry without days means every day, one without hours the whole day. Hours that end before they
begin last until the next morning and belong to the day on which they begin. All times are the local
wall clock. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from shared.errors import BadRequest
from shared.sentences import Sentence
from volunteer.i18n.formats import DAYS as SHORT_DAYS

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_FULL = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
DAY_MIN = 24 * 60
WEEK_MIN = 7 * DAY_MIN
_EXAMPLE = Sentence('write it like "mon-fri 18:00-08:00", "sat-sun" or "22:00-06:00"')
_HOURS = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})")
_CLOCK = re.compile(r"([0-9]{1,2}):([0-9]{2})")
_LENGTH = re.compile(r"(?:([0-9]{1,3})d)?(?:([0-9]{1,3})h)?(?:([0-9]{1,4})m)?")
LONGEST_PAUSE = timedelta(days=30)
_SPAN = re.compile(r"([a-z]+)(?:-([a-z]+))?")


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Times of allowed work: sorted, separate spans [start, stop) in minutes of the week. No span
    means never.
    """

    spans: tuple[tuple[int, int], ...]

    def allows(self, moment: datetime) -> bool:
        """Return True if a local wall-clock time lies inside a span."""
        minute = _minute(moment)
        return any(start <= minute < stop for start, stop in self.spans)

    def changes(self, moment: datetime) -> datetime | None:
        """Return the next minute at which work becomes allowed or disallowed; None if never."""
        starts = {start % WEEK_MIN for start, _ in self.spans}
        edges = starts ^ {stop % WEEK_MIN for _, stop in self.spans}  # touching spans are one
        if not edges:
            return None
        minute = _minute(moment)
        wait = min((edge - minute - 1) % WEEK_MIN + 1 for edge in edges)
        return moment.replace(second=0, microsecond=0) + timedelta(minutes=wait)


def end_of_pause(length: str, until: str, now: datetime) -> datetime | None:
    """Return the end of a pause: after `length` ("2h", "1h30m", "45m", "1d"), or at the time
    `until` ("22:00", today or tomorrow); None if neither is given.

    Raises BadRequest.
    """
    if length and until:
        raise BadRequest(Sentence("give either --for or --until, not both"))
    if length:
        match = _LENGTH.fullmatch(length.strip().lower())
        days, hours, minutes = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
        wait = timedelta(days=days, hours=hours, minutes=minutes)
        if not timedelta() < wait <= LONGEST_PAUSE:
            raise BadRequest(
                Sentence(
                    '"{length}" is not a time: write it like 45m, 2h, 1h30m or 1d', length=length
                )
            )
        return now + wait
    if not until:
        return None
    clock = _CLOCK.fullmatch(until.strip())
    if clock is None or int(clock[1]) > 23 or int(clock[2]) > 59:
        raise BadRequest(
            Sentence('"{until}" is not a time of day: write it like 22:00', until=until)
        )
    wall = now.replace(tzinfo=None)  # the zone's offset may change before then
    end = wall.replace(hour=int(clock[1]), minute=int(clock[2]), second=0, microsecond=0)
    end = end if end > wall else end + timedelta(days=1)
    return end.astimezone() if now.tzinfo else end


def moment_words(moment: datetime, now: datetime) -> str:
    """Return a future moment in words: "22:00", "tomorrow 07:00", "2026-11-28 07:00"."""
    days = (moment.date() - now.date()).days
    clock = f"{moment:%H:%M}"
    if days == 1:
        return Sentence("tomorrow {time}", time=clock)
    return clock if days == 0 else f"{moment:%Y-%m-%d} {clock}"


ALWAYS = Schedule(spans=((0, WEEK_MIN),))


def parse_schedule(entries: Sequence[str]) -> Schedule:
    """Return the schedule of all entries; without entries, work is always allowed. Raises
    ValueError with a sentence.
    """
    if not entries:
        return ALWAYS
    spans: list[tuple[int, int]] = []
    for entry in entries:
        days, start, stop = _entry(entry)
        for day in days:
            begin = day * DAY_MIN + start
            end = day * DAY_MIN + (stop if stop > start else stop + DAY_MIN)
            spans.append((begin, min(end, WEEK_MIN)))
            if end > WEEK_MIN:  # Sunday night is also Monday morning
                spans.append((0, end - WEEK_MIN))
    return Schedule(spans=_merged(spans))


def weekday_words(moment: datetime, now: datetime) -> str:
    """Return a moment within a week in words: `18:00` today, `Mon 18:00` on another day."""
    clock = f"{moment:%H:%M}"
    if moment.date() == now.date():
        return clock
    return Sentence("{day} {time}", day=Sentence(SHORT_DAYS[moment.weekday()]), time=clock)


def _minute(moment: datetime) -> int:
    return moment.weekday() * DAY_MIN + moment.hour * 60 + moment.minute


def _entry(entry: str) -> tuple[Sequence[int], int, int]:
    words = entry.lower().split()
    days: Sequence[int] = range(7)
    if words and words[0][0].isalpha():
        days = _days(words.pop(0), entry)
    if not words:
        return days, 0, DAY_MIN
    match = _HOURS.fullmatch(words.pop(0))
    if match is None or words:
        raise ValueError(
            Sentence(
                '"{entry}" is not a time of the week: {example}', entry=entry, example=_EXAMPLE
            )
        )
    hour, minute, to_hour, to_minute = map(int, match.groups())
    start, stop = hour * 60 + minute, to_hour * 60 + to_minute
    if max(minute, to_minute) > 59 or start >= DAY_MIN or stop > DAY_MIN:
        raise ValueError(
            Sentence(
                '"{entry}" names a time that no clock shows: {example}',
                entry=entry,
                example=_EXAMPLE,
            )
        )
    if start == stop:
        raise ValueError(
            Sentence(
                '"{entry}" begins when it ends: leave the hours out for the whole day', entry=entry
            )
        )
    return days, start, stop


def _days(word: str, entry: str) -> Sequence[int]:
    """Return the numbers of the days (0 = Monday) that a word such as `fri`, `friday` or `fri-mon`
    names. Raises ValueError, which quotes `entry`, for another word.
    """
    match = _SPAN.fullmatch(word)
    names = [name for name in (match.groups() if match else (word,)) if name]
    numbers = [
        number
        for name in names
        for number, day in enumerate(_FULL)
        if len(name) >= 3 and day.startswith(name)
    ]
    if len(numbers) != len(names):
        raise ValueError(
            Sentence(
                '"{word}" in "{entry}" is not a day ({days}): {example}',
                word=word,
                entry=entry,
                days=", ".join(DAYS),
                example=_EXAMPLE,
            )
        )
    first, last = numbers[0], numbers[-1]
    return [day % 7 for day in range(first, last + (1 if last >= first else 8))]


def _merged(spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the spans sorted, with touching or overlapping ones joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)
