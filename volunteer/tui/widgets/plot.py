"""Plot of curves with axes: ticks at round numbers, marks below, a sentence if empty."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import groupby

import msgspec
from typing_extensions import override

from shared.workloads.declaration import Measure
from volunteer.i18n.catalogue import localized
from volunteer.tui.text import Glyphs, Line, Span, centred, fit, left, right, short_number
from volunteer.tui.widgets.panel import Panel, Scene
from volunteer.tui.widgets.raster import (
    BRAILLE,
    PLAIN,
    Alphabet,
    PlotFrame,
    Point,
    dots,
    finite,
    frame,
)

LABEL_MAX = 7


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One curve and the role that colours it."""

    points: Sequence[Point]
    role: str


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a plot. Later series are drawn over earlier ones."""

    series: tuple[Series, ...] = ()
    marks: tuple[float, ...] = ()  # places on the x axis
    x_name: str = ""
    x_end: float | None = None  # end of the axis, if beyond the points
    empty: str = ""  # sentence shown without points


def as_drawn(points: Sequence[Point], measure: Measure) -> Sequence[Point]:
    """Return the points of a measure as they are drawn: for the share solved, as a percentage that
    rises.
    """
    return [(x, 100 * (1 - y)) for x, y in points] if measure == "share solved" else points


class Plot(Panel):
    """Panel with a chart, usually drawn at most once a second."""

    pace_s = 1.0
    quick = False  # drawing a curve takes four times as long as all other panels together

    _subject: object = None

    @abstractmethod
    def chart(self, scene: Scene) -> Chart:
        """Return the chart of a scene."""

    @override
    def show(self, scene: Scene, *, at_once: bool = False) -> None:
        """Draw a scene, or only its titles while the curve is not due, since a number in a title
        must not be older than the same number on another panel. A new subject is drawn at once.
        """
        subject = self.subject(scene)
        other, self._subject = subject != self._subject, subject
        super().show(scene, at_once=at_once or other)
        self.draw_heading()

    @override
    def hurry(self, scene: Scene) -> None:
        """Draw only the titles, and the curve too if its subject is new."""
        if self.subject(scene) == self._subject:
            super().hurry(scene)
        else:
            self.show(scene, at_once=True)

    def subject(self, scene: Scene) -> object:
        """Return the run or task whose curve is drawn."""
        return scene.view.run()

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        return plot(self.chart(scene), width, height, scene.glyphs)


class FunctionPlot(Plot):
    """Plot whose chart and title come from functions of its page."""

    def __init__(
        self,
        chart: Callable[[Scene], Chart],
        title: Callable[[Scene], tuple[str, str]],
        *,
        id: str | None = None,
        classes: str | None = None,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._chart = chart
        self._title = title

    @override
    def chart(self, scene: Scene) -> Chart:
        return self._chart(scene)

    @override
    def heading(self, scene: Scene) -> tuple[str, str]:
        return self._title(scene)

    @override
    def subject(self, scene: Scene) -> object:
        return self._title(scene)


def margins(view: PlotFrame, width: int, height: int) -> tuple[int, int, dict[int, str]]:
    """Return the cells left of the curve, the rows below it, and the labels of the y axis."""
    bottom = 2 if height >= 5 and width >= 12 else 0
    ticks = y_ticks(view, height - bottom) if width >= 20 else {}
    return max((len(label) for label in ticks.values()), default=-1) + 1, bottom, ticks


def plot(chart: Chart, width: int, height: int, glyphs: Glyphs) -> list[Line]:
    """Return the lines of a chart, for any size from one cell on."""
    if width <= 0 or height <= 0:
        return []
    view = frame([s.points for s in chart.series], right=chart.x_end)
    if view is None:
        return centred(chart.empty, width, height, glyphs.ellipsis)
    margin, bottom, ticks = margins(view, width, height)
    area = (width - margin, height - bottom)
    alphabet = BRAILLE if glyphs.curve == "braille" else PLAIN
    cells = _layers(chart, area, view, alphabet)
    lines: list[Line] = []
    for row, spans in enumerate(cells):
        label = ticks.get(row)
        side: tuple[Span, ...] = ()
        if margin:
            sign = glyphs.tick if label else glyphs.vertical
            side = ((right(label or "", margin - 1), "dim"), (sign, "track"))
        lines.append((*side, *spans))
    if bottom:
        lines.append(_axis(chart, view, margin, width, glyphs))
        lines.append(x_labels(chart, view, margin, width))
    return lines


def _layers(chart: Chart, area: tuple[int, int], view: PlotFrame, alphabet: Alphabet) -> list[Line]:
    """Draw the curves over each other; a cell has the colour of its topmost curve."""
    width, height = area
    pictures = [(dots(s.points, area, view, alphabet), s.role) for s in chart.series]
    lines = []
    for row in range(height):
        signs: list[Span] = []
        for column in range(width):
            sign, role = " ", "text"
            for cells, curve_role in pictures:
                if cells[row][column]:
                    sign, role = alphabet.signs[cells[row][column]], curve_role
            signs.append((sign, role))
        lines.append(
            tuple(
                ("".join(sign for sign, _ in group), role)
                for role, group in groupby(signs, key=lambda span: span[1])
            )
        )
    return lines


def _axis(chart: Chart, view: PlotFrame, margin: int, width: int, glyphs: Glyphs) -> Line:
    """Return the bottom line with its marks."""
    room = width - margin
    signs = [glyphs.axis] * room
    for x in chart.marks:
        if view.left <= x <= view.right:
            signs[view.across(x, room)] = glyphs.mark
    corner = " " * (margin - 1) + glyphs.corner if margin else ""
    groups = groupby(signs, key=lambda sign: "mark" if sign == glyphs.mark else "track")
    return ((corner, "track"), *(("".join(group), role) for role, group in groups))


def x_labels(chart: Chart, view: PlotFrame, margin: int, width: int) -> Line:
    """Return the ends of the x axis and the name of its unit."""
    start, end = number(view.left, 0.0), number(view.right, 0.0)
    name = f"{chart.x_name} " if chart.x_name else ""
    room = width - margin
    first = fit(f"{name}{start}", room)
    rest = room - len(first)
    last = right(end, rest) if end != start and len(end) < rest else ""
    return ((" " * margin + left(first, room - len(last)) + last, "dim"),)


def y_ticks(view: PlotFrame, rows: int) -> dict[int, str]:
    """Return labels at round numbers by row from the top, about one in three rows."""
    if rows < 1:
        return {}
    tick_count = max(2, min(8, rows // 3 + 1)) if rows > 1 else 1
    labels: dict[int, str] = {}
    for step, value in _round_values(view, tick_count):
        row = rows - 1 - view.up(value, rows * 4) // 4
        label = number(value, step)
        if label not in labels.values():
            labels.setdefault(row, label)
    return labels


def _round_values(view: PlotFrame, tick_count: int) -> list[tuple[float, float]]:
    """Return about `tick_count` round values inside the frame as (step, value); the frame's ends if
    it has no round values; [] if its height is 0 or too large for floats.
    """
    span = view.high / 2 - view.low / 2
    if not 0 < span < 5e307:
        return []
    ticks: list[tuple[float, float]] = []
    step = 2 * round_step(span / tick_count)
    while len(ticks) < 2 and step > span * 1e-3:  # a scale needs at least two labels
        ticks = _multiples(view, step)
        step /= 2
    return ticks or [(0.0, view.low), (0.0, view.high)]


def _multiples(view: PlotFrame, step: float) -> list[tuple[float, float]]:
    """Return all multiples of a step inside the frame; [] if floats cannot distinguish them."""
    first = math.ceil(view.low / step)
    if abs(first) > 1e12:
        return []
    return [(step, (first + i) * step) for i in range(20) if (first + i) * step <= view.high]


def round_step(span: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is at least `span`."""
    if not 0 < span < 1e308:
        return math.inf
    power = 10.0 ** math.floor(math.log10(span))
    if power == 0:
        return math.inf
    return next((m * power for m in (1, 2, 5) if m * power >= span * 0.999), 10 * power)


def number(value: float, step: float) -> str:
    """Return a label of at most seven characters, with the decimals that its step needs."""
    size = max(abs(value), abs(step))
    if value == 0:
        return "0"
    if size >= 1e15 or size < 1e-4:
        return f"{value:.0e}".replace("e+", "e").replace("e0", "e").replace("e-0", "e-")
    if size >= 10_000:
        return short_number(value).replace(" ", "")
    if step <= 0:
        return f"{value:.6g}"[:LABEL_MAX]
    decimals = min(5, max(0, -math.floor(math.log10(step) + 1e-9)))
    return localized(f"{value:.{decimals}f}"[:LABEL_MAX])


def last_value(points: Sequence[Point]) -> float | None:
    """Return the newest finite value of a curve's last 50 points; None without a finite value."""
    good = finite(points[-50:])
    return good[-1][1] if good else None
