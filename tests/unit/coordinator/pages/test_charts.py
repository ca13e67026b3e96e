"""Charts of the public page: axes within what can be, columns at their time."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.pages.charts import Period, Point, columns, line


@pytest.mark.parametrize("value", [0.0, 0.4, 99.9, 100.0])
@pytest.mark.parametrize("more", [(), (0.0,), (100.0,), (37.0, 12.0)])
def test_the_axis_of_shares_lies_within_0_and_100(value: float, more: tuple[float, ...]) -> None:
    drawn = line([Point(x, y) for x, y in enumerate((value, *more))], 100.0)
    assert drawn is not None
    labels = [float(label) for label in drawn.labels]
    assert 0 <= min(labels) < max(labels) <= 100
    assert min(labels) <= min((value, *more)) <= max((value, *more)) <= max(labels)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=4))
@example([6.8001234, 6.8001236])  # updates of almost nothing
@example([1e6, 1e6 + 0.01])
def test_every_finite_value_has_its_place_on_a_scale_whose_labels_differ(
    values: list[float],
) -> None:
    drawn = line([Point(x, y) for x, y in enumerate(values)])
    assert drawn is not None
    assert len(set(drawn.labels)) == len(drawn.labels)
    assert all(0 <= left <= 1 and -1e-6 <= top <= 1 + 1e-6 for left, top in drawn.places)
    assert len(drawn.series.split(" ")) == len(values)


def test_only_values_below_zero_have_an_axis_below_zero() -> None:
    zero, below = line([Point(0, 0.0)]), line([Point(0, 0.0), Point(1, -40.0)])
    assert zero is not None
    assert below is not None
    assert float(zero.labels[-1]) == 0
    assert float(below.labels[-1]) == -40


def test_columns_lie_at_their_time_up_to_now() -> None:
    periods = [
        Period(start=start, seconds=60.0, value=1.0, title="") for start in (1000.0, 1060.0, 1240.0)
    ]
    first, second, last = columns(periods, 1000.0, 1250.0)
    assert (first.x, second.x, last.x) == (0.0, 240.0, 960.0)
    assert first.width == second.width == 192.0
    assert last.x + last.width <= 1000.0


def test_one_column_of_a_run_that_began_now_fits() -> None:
    (column,) = columns([Period(start=5.0, seconds=60.0, value=3.0, title="")], 5.0, 5.0)
    assert 0 <= column.x <= column.x + column.width <= 1000.0
