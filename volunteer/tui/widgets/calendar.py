"""Days of work as a calendar: a column a week, a sign a day, taller for more; and this week beside
the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, timedelta

from rich.cells import cell_len

from volunteer.i18n.catalogue import _, ngettext, number
from volunteer.i18n.formats import (
    credit,
    day_and_month,
    day_initials,
    day_names,
    month_names,
    ordinal,
)
from volunteer.stats.diary import level, weeks
from volunteer.tui.text import Glyphs, Line, Span, fit, left, spark
from volunteer.tui.widgets.panel import Scene

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
    names, days = month_names(), day_names()
    for column in range(len(grid)):
        first = monday - timedelta(weeks=len(grid) - 1 - column)
        place = LABEL + column * CELL
        if (
            first.month != before
            and len(months) <= place
            and place + cell_len(names[first.month - 1]) <= cells
        ):
            months = months.ljust(place) + names[first.month - 1]
        before = first.month
    lines: list[Line] = [((months, "dim"),)]
    for day in range(7):
        spans: list[Span] = [(left(days[day] if day % 2 == 0 else "", LABEL), "dim")]
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
        _week(_("this week"), now, here, scene, cells),
        _week(_("last week"), before, sum(filter(None, before)), scene, cells),
    ]
    if there > 0:
        change = here / there - 1
        arrow = scene.glyphs.up if change >= 0 else scene.glyphs.down
        day, share = day_names()[today.weekday()], number(abs(change), ".0%")
        more = _("{share} more than last week until {day}", share=share, day=day)
        less = _("{share} less than last week until {day}", share=share, day=day)
        text = f"{arrow} {more if change >= 0 else less}"
        lines.append(
            _fact(_("so far"), fit(text, cells - NAME_CELLS), "good" if change >= 0 else "text")
        )
    if active:
        best = max(active, key=lambda day: amounts[day])
        text = ngettext(
            "{n} day with work, the best {day}: {credits}",
            "{n} days with work, the best {day}: {credits}",
            len(active),
            day=day_and_month(best),
            credits=credit(amounts[best]),
        )
        lines.append(_fact(_("in all"), fit(text, cells - NAME_CELLS)))
    return lines


def rank_line(places: Sequence[tuple[date, int]], scene: Scene, cells: int) -> Line:
    """Return the place on the leaderboard by day, the first place highest."""
    if not places:
        return _fact(_("rank"), _("your place appears here day by day"), "dim")
    worst = max(rank for _, rank in places)
    said = " " + _("{rank} now", rank=ordinal(places[-1][1]))
    day, rank = places[0]
    if rank != places[-1][1]:
        said += _(", {rank} on {day}", rank=ordinal(rank), day=day_and_month(day))
    room = max(1, min(60, cells - NAME_CELLS - len(said)))
    drawn = spark([worst + 1 - rank for _, rank in places], room, scene.glyphs)
    return ((left(_("rank"), NAME_CELLS), "dim"), (drawn, "model"), (fit(said, cells), "value"))


def _week(name: str, days: Sequence[int | None], total: int, scene: Scene, cells: int) -> Line:
    best = max((day or 0 for day in days), default=0)
    spans: list[Span] = [(left(name, NAME_CELLS), "dim")]
    letters = day_initials()
    for day, amount in enumerate(days):
        text, role = sign(amount, level(amount or 0, [best]), scene.glyphs)
        wide = f"{letters[day]}{text} " if cells >= 60 else f"{text} "
        spans.append((wide, role))
    spans.append((f" {credit(total)}", "value"))
    return tuple(spans)


def _fact(name: str, text: str, role: str = "text") -> Line:
    return ((left(name, NAME_CELLS), "dim"), (text, role))
