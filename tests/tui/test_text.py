"""Words and numbers: every width is counted in cells, every number is short."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tests.support.sources import ROOT
from volunteer.tui.text import (
    ASCII,
    UNICODE,
    ago,
    ascii_only,
    bar,
    big_digits,
    countdown,
    fit,
    flops,
    left,
    percent,
    right,
    short_number,
    spark,
    spread,
    when,
    width,
    wrap,
)

words = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["C", "M"]), max_size=60)
cells = st.integers(0, 60)


@given(words, cells)
def test_a_text_never_takes_more_room_than_it_is_given(text: str, room: int) -> None:
    assert cell_len(fit(text, room)) <= room
    assert cell_len(left(text, room)) == room
    assert cell_len(right(text, room)) == room


def test_what_is_cut_says_so() -> None:
    assert fit("a long sentence", 8) == "a long…"
    assert fit("short", 8) == "short"
    assert fit("日本語", 4) == "日…"
    assert fit("ab", 1) == "…"


def test_a_moment_ahead_of_this_clock_has_a_time_of_day() -> None:
    assert re.fullmatch(r"\d\d:\d\d", when(1_005.0, 1_000.0))
    assert when(1_000.0, 1_000.0 + 3 * 86_400) == "3 d ago"


@given(words, st.integers(1, 40), st.integers(1, 6))
def test_wrapped_text_fits_its_rectangle(text: str, room: int, rows: int) -> None:
    lines = wrap(text, room, rows)
    assert len(lines) <= rows
    assert all(cell_len(line) <= max(room, 2) for line in lines)


def test_wrapping_breaks_between_words_and_cuts_only_what_is_longer_than_a_line() -> None:
    assert wrap("the loss of each new version", 12, 9) == ["the loss of", "each new", "version"]
    assert wrap("aaaaaaaaaaaa b", 5, 9) == ["aaaaa", "aaaaa", "aa b"]
    assert wrap("one two three four", 7, 2) == ["one two", "three…"]
    assert wrap("one\ntwo", 20, 5) == ["one", "two"]
    assert wrap("anything", 0, 5) == wrap("anything", 5, 0) == []


def test_text_of_others_cannot_move_the_cursor() -> None:
    assert wrap("a\x1b[2Jb\tc\x07", 20, 3) == ["a [2Jb c "]


def test_a_letter_loses_its_accent_before_it_is_lost() -> None:
    assert ascii_only("Fréchet, naïve, 平") == "Frechet, naive, ??"


@given(words)
def test_ascii_text_is_as_wide_as_before(text: str) -> None:
    plain = ascii_only(text)
    assert plain.isascii()
    assert cell_len(plain) == cell_len(text)


@given(st.floats(allow_nan=True, allow_infinity=True), st.integers(0, 100))
def test_a_bar_has_exactly_its_width(share: float, room: int) -> None:
    for glyphs in (UNICODE, ASCII):
        assert width(bar(share, room, glyphs)) == room


def test_a_bar_is_full_only_when_all_is_done() -> None:
    assert bar(1.0, 4) == (("━━━━", "fill"),)
    assert bar(0.0, 4) == (("────", "track"),)
    assert bar(0.99, 4) == (("━━━", "fill"), ("╸", "fill"))
    assert bar(0.99, 4, ASCII) == (("===", "fill"), ("-", "fill"))
    assert bar(0.625, 4) == (("━━", "fill"), ("╸", "fill"), ("─", "track"))
    assert (percent(0.999), percent(1.0), percent(-1.0)) == ("99 %", "100 %", "0 %")


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_number_is_short(value: float) -> None:
    assert len(short_number(value)) <= 9
    assert "e" not in short_number(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (1_234, "1.23 k"),
        (3_214_592, "3.21 M"),
        (-1_500, "-1.5 k"),
        (0.187, "0.187"),
        (math.nan, "-"),
        (None, "-"),
        (math.inf, "many"),
    ],
)
def test_numbers_in_few_letters(value: float | None, text: str) -> None:
    assert short_number(value) == text


def test_speeds_and_times() -> None:
    assert flops(118e9) == "118 GFLOP/s"
    assert flops(12.0) == "12 FLOP/s"
    assert [countdown(s) for s in (0, 0.2, 59.5, 192, 3723, -5, 1e12)] == [
        "0:00", "0:01", "1:00", "3:12", "1:02:03", "0:00", "99:59:59",
    ]  # fmt: skip
    assert [ago(s) for s in (0, 12, 200, 7_300, 400_000)] == ["now", "12 s", "3 min", "2 h", "4 d"]


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=80), st.integers(0, 40))
def test_a_row_of_columns_never_breaks(values: list[float], room: int) -> None:
    assert len(spark(values, room)) <= room


def test_big_digits_have_three_rows_of_one_width() -> None:
    rows = big_digits("1,234.50")
    assert rows is not None
    assert len({cell_len(row) for row in rows}) == 1
    assert big_digits("1 %") is None


def test_two_ends_of_a_line_share_its_room() -> None:
    line = spread((("left", "text"),), (("right", "dim"),), 20)
    assert "".join(text for text, _ in line) == "left           right"
    assert spread((("left", "text"),), (("right", "dim"),), 9) == (("left", "text"),)


def test_a_share_has_a_blank_before_its_sign_everywhere() -> None:
    """`percent` writes "32 %"; Python's format writes "32%"."""
    sources = (ROOT / "volunteer").rglob("*.py")
    assert [path for path in sources if re.search(r"\.\d%[\"}]", path.read_text())] == []
