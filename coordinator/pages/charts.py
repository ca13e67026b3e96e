"""Charts as plain SVG: a line over versions, columns over time.

Only shapes are drawn. The words beside them are HTML, so that they keep their size on a phone; the
picture stretches between them. No element has an inline style, which the page's policy forbids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

WIDTH, HEIGHT = 1000.0, 300.0
POINTS_MAX = 240
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # round intervals, times a power of ten
TICKS = 4  # approximate number of intervals of the vertical scale
DIGITS = 6  # digits of the labels of the vertical scale, if neighbours differ in these


class Point(msgspec.Struct, frozen=True):
    """Point of a chart: the value `y` at the version `x`, with its error."""

    x: float
    y: float
    error: float = 0.0
    at: float = 0.0  # time of the measurement; 0 = unknown


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Drawn line: a path, its scale, and the points as numbers for screen readers."""

    path: str
    area: str
    bars: tuple[tuple[float, float, float], ...]  # error bars: x, top, bottom
    dots: tuple[tuple[float, float], ...]  # dots, where a line would have a single point
    labels: tuple[str, ...]  # labels of the vertical scale, from the top
    grid: tuple[float, ...]  # heights of the labels
    first: float  # first and last version of the horizontal scale
    last: float
    points: tuple[Point, ...]

    @property
    def places(self) -> list[tuple[float, float]]:
        """Return the points as shares of the picture, from the left and from the top."""
        low, high = float(self.labels[-1]), float(self.labels[0])
        span = (self.last - self.first) or 1.0
        return [((p.x - self.first) / span, (high - p.y) / (high - low)) for p in self.points]

    @property
    def series(self) -> str:
        """Return the points as `x:y:left:top` for the page's script, left and top in thousandths of
        the picture.
        """
        return " ".join(
            f"{p.x:g}:{p.y:.4g}:{1000 * left:.0f}:{1000 * top:.0f}"
            for p, (left, top) in zip(self.points, self.places, strict=True)
        )


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most `POINTS_MAX` points, evenly spread, including the first and the last."""
    if len(points) <= POINTS_MAX:
        return list(points)
    last = len(points) - 1
    return [points[n * last // (POINTS_MAX - 1)] for n in range(POINTS_MAX)]


def line(points: Sequence[Point], most: float = math.inf) -> Line | None:
    """Draw values over versions as a line; None if there is no finite value. `most` is the largest
    value that is possible: the scale does not go beyond it.
    """
    drawn = thinned([p for p in points if math.isfinite(p.y)])
    if not drawn:
        return None
    low, high = min(p.y - p.error for p in drawn), max(p.y + p.error for p in drawn)
    ticks = _ticks(low, high, most)
    low, high = ticks[0], ticks[-1]
    first, last = drawn[0].x, drawn[-1].x
    span = (last - first) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return WIDTH * (x - first) / span, HEIGHT * (high - y) / (high - low)

    places = [at(p.x, p.y) for p in drawn]
    path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in places)
    bars = [
        (round(at(p.x, p.y)[0], 1), round(at(p.x, p.y + p.error)[1], 1), at(p.x, p.y - p.error)[1])
        for p in drawn
        if p.error
    ]
    return Line(
        path=path,
        area=f"{path}L{places[-1][0]:.1f},{HEIGHT:.0f}L{places[0][0]:.1f},{HEIGHT:.0f}Z",
        bars=tuple((x, top, round(bottom, 1)) for x, top, bottom in bars),
        dots=tuple(places) if len(places) == 1 else (),
        labels=_labels(ticks[::-1]),
        grid=tuple(round(at(first, tick)[1], 1) for tick in reversed(ticks)),
        first=first,
        last=last,
        points=tuple(drawn),
    )


def _ticks(low: float, high: float, most: float) -> list[float]:
    """Return round, evenly spaced values that cover `low` to `high`. If both are equal, no value is
    above `most`, and none is below zero unless `low` is.
    """
    if high - low < 1e-9 * max(1.0, abs(high)):
        least = 0.0 if low >= 0 else -math.inf
        margin = 0.5 * (abs(low) or 1.0)
        low, high = max(least, low - margin), min(most, high + margin)
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in STEPS if s * power >= rough * 0.999)
    bottom, top = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 10) for n in range(bottom, top + 1)]


def _labels(ticks: Sequence[float]) -> tuple[str, ...]:
    """Return the values of a scale as texts, with as many digits as tell neighbours apart."""
    step = abs(ticks[0] - ticks[1])
    digits = 1 + math.ceil(math.log10(max(map(abs, ticks)) / step))
    return tuple(f"{tick:.{max(DIGITS, digits)}g}" for tick in ticks)


class ChartColumn(msgspec.Struct, frozen=True, kw_only=True):
    """One column of a picture that is 1,000 wide and 100 high."""

    x: float
    width: float
    top: float
    title: str


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """Value of a period of time."""

    start: float
    seconds: float
    value: float
    title: str


def columns(periods: Sequence[Period], start: float, end: float) -> list[ChartColumn]:
    """Return the columns of periods over an axis of time from `start` to `end`, within which each
    begins.
    """
    most = max((period.value for period in periods), default=0.0) or 1.0
    span = max(end - start, 1.0)
    return [
        ChartColumn(
            x=round(WIDTH * (period.start - start) / span, 1),
            width=round(WIDTH * min(0.8 * period.seconds, max(1.0, end - period.start)) / span, 1),
            top=round(100 - max(2.0, 100 * period.value / most), 1),
            title=period.title,
        )
        for period in periods
    ]
