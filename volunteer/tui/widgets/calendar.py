"""Days of work as a calendar: a column a week, a sign a day, taller for more; and this week beside
the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, timedelta

from shared.text import counted, credit
from volunteer.stats.diary import level, weeks
from volunteer.tui.text import Glyphs, Line, Span, fit, left, ordinal, spark
from volunteer.tui.widgets.panel import Scene

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
LABEL = 4  # cells of the name of a day
CELL = 2
WEEKS_MAX = 53
ROWS = 8  # months, and seven days
NAME_CELLS = 11


def weeks_in(cells: int) -> int:
    """Return how many weeks fit into so many cells."""
    return max(1, min(WEEKS_MAX, (cells - LABEL) // CELL))


def sign(amount: int | None, step: int, glyphs: Glyphs) -> Span:
    """Return the sign of a day: nothing for one to come, a dot for one without work."""
    if amount is None:
        return " ", "text"
    if step == 0:
        return glyphs.dot, "faint"
    columns = glyphs.columns
    return columns[min(len(columns) - 1, 2 * step)], "good" if step > 2 else "fill"


def calendar_lines(
    amounts: Mapping[date, int], today: date, scene: Scene, cells: int
) -> list[Line]:
    """Return the months and the seven days of as many weeks as there is room for."""
    grid = weeks(amounts, today, weeks_in(cells))
    seen = [amount or 0 for week in grid for amount in week]
    monday = today - timedelta(days=today.weekday())
    months, before = " " * LABEL, 0
    for column in range(len(grid)):
        first = monday - timedelta(weeks=len(grid) - 1 - column)
        place = LABEL + column * CELL
        if first.month != before and len(months) <= place and place + 3 <= cells:
            months = months.ljust(place) + MONTHS[first.month - 1]
        before = first.month
    lines: list[Line] = [((months, "dim"),)]
    for day in range(7):
        spans: list[Span] = [(left(DAYS[day] if day % 2 == 0 else "", LABEL), "dim")]
        for week in grid:
            text, role = sign(week[day], level(week[day] or 0, seen), scene.glyphs)
            spans.append((text.ljust(CELL), role))
        lines.append(tuple(spans))
    return lines


def summary_lines(amounts: Mapping[date, int], today: date, scene: Scene, cells: int) -> list[Line]:
    """Return this week beside the last, and the number of days with work."""
    before, now = weeks(amounts, today, 2)
    far = today.weekday() + 1
    here, there = sum(filter(None, now)), sum(filter(None, before[:far]))
    active = [day for day, micro in amounts.items() if micro > 0]
    lines: list[Line] = [
        _week("this week", now, here, scene, cells),
        _week("last week", before, sum(filter(None, before)), scene, cells),
    ]
    if there > 0:
        change = here / there - 1
        arrow = scene.glyphs.up if change >= 0 else scene.glyphs.down
        until = f"than last week until {DAYS[today.weekday()]}"
        text = f"{arrow} {abs(change):.0%} {'more' if change >= 0 else 'less'} {until}"
        lines.append(
            _fact("so far", fit(text, cells - NAME_CELLS), "good" if change >= 0 else "text")
        )
    if active:
        best = max(active, key=lambda day: amounts[day])
        named = f"{best.day} {MONTHS[best.month - 1]}"
        text = f"{counted(len(active), 'day')} with work, the best {named}: {credit(amounts[best])}"
        lines.append(_fact("in all", fit(text, cells - NAME_CELLS)))
    return lines


def rank_line(places: Sequence[tuple[date, int]], scene: Scene, cells: int) -> Line:
    """Return the place on the leaderboard by day, the first place highest."""
    if not places:
        return _fact("rank", "your place appears here day by day", "dim")
    worst = max(rank for _, rank in places)
    said = f" {ordinal(places[-1][1])} now"
    day, rank = places[0]
    if rank != places[-1][1]:
        said += f", {ordinal(rank)} on {day.day} {MONTHS[day.month - 1]}"
    room = max(1, min(60, cells - NAME_CELLS - len(said)))
    drawn = spark([worst + 1 - rank for _, rank in places], room, scene.glyphs)
    return ((left("rank", NAME_CELLS), "dim"), (drawn, "model"), (fit(said, cells), "value"))


def _week(name: str, days: Sequence[int | None], total: int, scene: Scene, cells: int) -> Line:
    best = max((day or 0 for day in days), default=0)
    spans: list[Span] = [(left(name, NAME_CELLS), "dim")]
    for number, amount in enumerate(days):
        text, role = sign(amount, level(amount or 0, [best]), scene.glyphs)
        wide = f"{DAYS[number][0]}{text} " if cells >= 60 else f"{text} "
        spans.append((wide, role))
    spans.append((f" {credit(total)}", "value"))
    return tuple(spans)


def _fact(name: str, text: str, role: str = "text") -> Line:
    return ((left(name, NAME_CELLS), "dim"), (text, role))
