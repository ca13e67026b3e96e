"""Curves: right at any size, for any numbers, and no spike is lost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from volunteer.tui.text import ASCII, UNICODE
from volunteer.tui.widgets.plot import Chart, Series, number, plot, round_step, y_ticks
from volunteer.tui.widgets.raster import (
    BRAILLE,
    PlotFrame,
    Point,
    average,
    columns,
    dots,
    frame,
    line_strokes,
)

anything = st.floats(allow_nan=True, allow_infinity=True)
sane = st.floats(min_value=-1e6, max_value=1e6)
sizes = st.tuples(st.integers(1, 300), st.integers(1, 80))


def curve(values: list[float]) -> list[Point]:
    return [(float(step), value) for step, value in enumerate(values)]


def braille(points: list[Point], width: int, height: int) -> list[str]:
    """Return a curve that fills `height` rows of `width` cells."""
    view = frame([points])
    if view is None:
        return [" " * width] * height
    cells = dots(points, (width, height), view)
    return ["".join(BRAILLE.signs[cell] for cell in row) for row in cells]


def drawn(picture: list[str]) -> int:
    """Return the dots that are set."""
    return sum((ord(sign) - 0x2800).bit_count() for row in picture for sign in row if sign != " ")


@given(st.lists(anything, max_size=200), sizes)
def test_every_picture_has_exactly_its_size(values: list[float], size: tuple[int, int]) -> None:
    picture = braille(curve(values), *size)
    assert len(picture) == size[1]
    assert all(len(row) == size[0] for row in picture)


@given(st.lists(st.tuples(anything, anything), max_size=50), sizes)
def test_points_in_any_place_never_break_a_picture(
    points: list[Point], size: tuple[int, int]
) -> None:
    assert len(braille(points, *size)) == size[1]


@pytest.mark.parametrize(
    "values",
    [
        [],
        [math.nan] * 5,
        [math.inf, -math.inf],
        [1.0],
        [2.5] * 40,
        [0.0, 1e30],
        [-1e308, 1e308],
        [1e-320, 2e-320],
        [1e15, 1e15 + 1],
    ],
)
@pytest.mark.parametrize("size", [(1, 1), (2, 1), (20, 5), (80, 24), (300, 80)])
def test_hard_numbers_are_drawn_or_left_out(values: list[float], size: tuple[int, int]) -> None:
    chart = Chart(series=(Series(points=curve(values), role="raw"),), empty="nothing yet")
    for glyphs in (UNICODE, ASCII):
        lines = plot(chart, *size, glyphs)
        assert len(lines) <= size[1]
        assert all(cell_len("".join(text for text, _ in line)) <= size[0] for line in lines)


@given(st.lists(anything, max_size=60), sizes, st.booleans())
def test_a_chart_keeps_inside_its_rectangle(
    values: list[float], size: tuple[int, int], plain: bool
) -> None:
    glyphs = ASCII if plain else UNICODE
    points = curve(values)
    chart = Chart(
        series=(Series(points=points, role="raw"), Series(points=average(points), role="mean")),
        marks=(0.0, 3.0, 1e9),
        x_name="step",
        x_end=100.0,
        empty="nothing yet",
    )
    lines = plot(chart, *size, glyphs)
    assert len(lines) <= size[1]
    for line in lines:
        text = "".join(part for part, _ in line)
        assert cell_len(text) <= size[0]
        assert text.isascii() or not plain


def test_nothing_one_point_and_a_constant() -> None:
    assert braille([], 10, 3) == [" " * 10] * 3
    assert drawn(braille([(5.0, 1.0)], 10, 3)) == 1
    level = braille(curve([4.0] * 100), 10, 3)
    assert drawn(level) == 20  # one row of dots, from edge to edge
    assert level[0].strip() == level[2].strip() == ""


def test_a_spike_between_many_points_is_seen() -> None:
    values = [1.0] * 10_000
    values[5_003] = 9.0
    picture = braille(curve(values), 40, 10)
    assert drawn([picture[0]]) + drawn([picture[1]]) > 0


@given(st.lists(sane, min_size=2, max_size=400), st.integers(2, 120), st.integers(1, 40))
def test_a_line_has_no_gap(values: list[float], width: int, height: int) -> None:
    points = curve(values)
    view = frame([points])
    assert view is not None
    strokes = line_strokes(points, view, width * 2, height * 4)
    covered: dict[int, set[int]] = {}
    for column, low, high in strokes:
        assert 0 <= low <= high < height * 4
        covered.setdefault(column, set()).update(range(low, high + 1))
    assert sorted(covered) == list(range(width * 2))
    for column in range(1, width * 2):
        here, before = covered[column], covered[column - 1]
        assert any(abs(a - b) <= 1 for a in here for b in before)
        assert max(here) - min(here) + 1 == len(here)


@given(st.lists(sane, min_size=1, max_size=300), st.integers(1, 100))
def test_a_column_holds_the_lowest_and_highest_of_its_points(
    values: list[float], width: int
) -> None:
    points = curve(values)
    view = frame([points])
    assert view is not None
    found = [column for column in columns(points, view, width) if column is not None]
    assert min(column[2] for column in found) == min(values)
    assert max(column[3] for column in found) == max(values)


def test_marks_stand_under_their_place() -> None:
    chart = Chart(series=(Series(points=curve([3.0, 2.0, 1.0]), role="model"),), marks=(0.0, 2.0))
    axis = "".join(text for text, _ in plot(chart, 40, 10, UNICODE)[-2])
    assert axis.endswith("◆")
    assert axis.count("◆") == 2
    assert axis[axis.index("└") + 1] == "◆"


def test_the_curve_on_top_colours_the_cell() -> None:
    points = curve([1.0] * 10)
    chart = Chart(series=(Series(points=points, role="raw"), Series(points=points, role="mean")))
    roles = {
        role for line in plot(chart, 30, 3, UNICODE) for text, role in line if text.strip("│┤ ")
    }
    assert "mean" in roles
    assert "raw" not in roles


@given(
    st.floats(min_value=-1e12, max_value=1e12),
    st.floats(min_value=1e-3, max_value=1e12),
    st.integers(4, 60),
)
def test_heights_have_labels_that_differ(low: float, span: float, rows: int) -> None:
    view = PlotFrame(left=0.0, right=1.0, low=low, high=low + span)
    labels = list(y_ticks(view, rows).values())
    assert len(set(labels)) == len(labels)
    assert all(0 < len(label) <= 8 for label in labels)


def test_labels_are_round_and_at_least_two() -> None:
    labels = y_ticks(PlotFrame(left=0, right=1, low=3.13, high=8.6), 6)
    assert list(labels.values()) == ["4", "6", "8"] or set(labels.values()) == {"4", "8"}
    assert len(y_ticks(PlotFrame(left=0, right=1, low=3.13, high=8.6), 4)) >= 2
    assert [round_step(x) for x in (0.9, 1.1, 3.0, 7.0, 0.03)] == [1.0, 2.0, 5.0, 10.0, 0.05]


@pytest.mark.parametrize(
    ("value", "step", "label"),
    [
        (3.4, 0.2, "3.4"),
        (8.0, 2.0, "8"),
        (0.0, 0.5, "0"),
        (0.25, 0.05, "0.25"),
        (12_500.0, 500.0, "12.5k"),
        (1e30, 1e30, "1e30"),
        (2e-7, 1e-7, "2e-7"),
        (-1.5, 0.5, "-1.5"),
    ],
)
def test_numbers_on_axes_are_short(value: float, step: float, label: str) -> None:
    assert number(value, step) == label


def test_an_average_lies_between_its_points_and_follows_them() -> None:
    noisy = curve([1.0 if step % 2 else 3.0 for step in range(200)])
    smooth = average(noisy)
    assert len(smooth) == len(noisy)
    assert all(1.0 <= value <= 3.0 for _, value in smooth)
    assert abs(smooth[-1][1] - 2.0) < 0.3
    assert average(curve([1.0, math.nan])) == []


def test_dots_use_every_pixel_of_a_cell() -> None:
    view = PlotFrame(left=0, right=1, low=0, high=1)
    corners = [dots([(x, y)], (1, 1), view)[0][0] for x in (0, 1) for y in (0, 1)]
    assert [BRAILLE.signs[cell] for cell in corners] == ["⡀", "⠁", "⢀", "⠈"]
