"""Sentences about texts that are not TOML: the line, and what is missing there."""

from __future__ import annotations

import tomllib

import pytest

from shared.files.toml_text import fault

QUOTE = "a text has no closing quotation mark"
BRACKET = "a list has no closing bracket ]"
TABLE = "the name of the table has no closing bracket ]"
SINGLE = "a text with backslashes stands in single quotes: 'C:\\data'"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('name = "x\nlr = 1\n', f"line 1: {QUOTE}"),
        ('lr = 1\nname = "x', f"line 2: {QUOTE}"),
        ('lr = 1\ntext = """x\ny = 2\n', f"line 2: {QUOTE}"),
        ("note = \"it's\"\nname = 'x\nlr = 1\n", f"line 2: {QUOTE}"),
        ("name = 'x\nother = 'y'\n", f"line 1: {QUOTE}"),
        ('long = """\n"a\n"""\nname = "a # b\nz = 1', f"line 4: {QUOTE}"),
        ("a = [1]\nb = [1, 2\nc = 3\n", f"line 2: {BRACKET}"),
        ("b = [1,\n 2", f"line 1: {BRACKET}"),
        (
            "a = {b = 1\nc = 2\n",
            "line 1: a table in braces stands on one line, with its closing brace",
        ),
        ("[model\nn = 1\n", f"line 1: {TABLE}"),
        ("[[tiers]\n", f"line 1: {TABLE}"),
        ("lr 3e-4\n", "line 1: a key is followed by = and a value"),
        ("lr =\n", "line 1: the value is missing"),
        ("lr = 0,1\n", "line 1: a number has a point, not a comma: 0.1"),
        ("lr = -.5 # half\n", "line 1: a number begins with a digit: -0.5"),
        ("lr = 3e-4;\n", "line 1: the line should end before ;"),
        ("[plan]\n[stop]\n[plan]\n", "line 3: this table is there twice"),
        ('from = "C:\\data"\n', f"line 1: {SINGLE}"),
        ('from = "C:\\Users"\n', f"line 1: {SINGLE}"),
        ("name = “x”\n", 'line 1: quotation marks are straight in TOML: "'),
        ("n\0a\0=\0001\0", "it is not UTF-8 text"),
        ("= 3\n", "line 1: a line is key = value or [table]"),
    ],
)
def test_a_slip_is_named_with_its_line_and_what_is_missing(text: str, reason: str) -> None:
    with pytest.raises(tomllib.TOMLDecodeError) as error:
        tomllib.loads(text)
    assert fault(text, error.value) == reason
