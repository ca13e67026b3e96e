"""Text for people: widths in cells, cells of a spreadsheet, sizes."""

from __future__ import annotations

import pytest

from coordinator.cli.listing import table
from shared.text import cells, credit, csv_cell, escaped, left, right, size


@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("Ann", 3),
        ("山田太郎", 8),
        ("é", 1),
        ("e\u0301", 1),
        ("한국", 4),
        ("\uff21", 2),
        ("\u2764\ufe0f", 2),
    ],
)
def test_the_width_counts_terminal_cells(text: str, width: int) -> None:
    assert cells(text) == width
    assert cells(left(text, 10)) == cells(right(text, 10)) == 10


def test_columns_stay_in_line_with_wide_names(capsys: pytest.CaptureFixture[str]) -> None:
    table([("山田太郎", 7), ("Ann", 12)], {"name": lambda r: r[0], "n": lambda r: r[1]}, "")
    lines = capsys.readouterr().out.splitlines()
    assert {cells(line) for line in lines} == {12}


@pytest.mark.parametrize("text", ["=1+1", "@x", "+cmd", "-2+3", "\tx", "\rx", "-"])
def test_no_cell_begins_a_formula(text: str) -> None:
    assert csv_cell(text) == "'" + text


@pytest.mark.parametrize("value", ["Ann", "-12.5", "+3", -3, 2.5, ""])
def test_numbers_and_plain_text_stay(value: object) -> None:
    assert csv_cell(value) == value


def test_numbers_are_short() -> None:
    assert [size(n) for n in (12, 1500, 2.5e6, 9e13)] == ["12 B", "1.5 kB", "2.5 MB", "90 TB"]
    assert (credit(1_234_567_890), credit(2_500_000, 1)) == ("1,234.57", "2.5")


def test_a_value_in_a_message_is_escaped_and_cut() -> None:
    assert escaped("a\x1b\n") == "a\\x1b\\n"
    assert escaped("x" * 100, 3) == "xxx…"
