"""The style sheet of the app parses again what has changed, and nothing else."""

from __future__ import annotations

from textual.color import Color

from volunteer.tui.themes import SteadyStylesheet


def sheet() -> SteadyStylesheet:
    found = SteadyStylesheet(variables={"mark": "red"})
    found.add_source("Label { color: $mark; }", read_from=("one.tcss", ""))
    found.parse()
    return found


def test_a_page_opened_under_the_same_theme_parses_only_its_own() -> None:
    steady = sheet()
    before = steady.rules[0]
    steady.add_source("Input { color: $mark; }", read_from=("two.tcss", ""))
    steady.set_variables({"mark": "red"})
    steady.reparse()
    assert steady.rules[0] is before
    assert len(steady.rules) == 2


def test_another_theme_changes_every_rule() -> None:
    steady = sheet()
    steady.set_variables({"mark": "blue"})
    steady.reparse()
    assert steady.rules[0].styles.color == Color.parse("blue")
