"""Reason why a text is not TOML, in words, such as a text without quotes or a line of YAML."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping

from shared.errors import why
from shared.sentences import Sentence, sentence_of
from shared.text import escaped

DEEP_MAX = 32  # depth of tables and lists inside each other

# Lines with a mistake: true or false, a text without quotes, curly quotes, a decimal comma, and a
# number that begins with its point.
_SPELLED = re.compile(r"[^=]*=\s*(True|False|TRUE|FALSE|yes|no|on|off|None|null)\s*(#.*)?")
_UNQUOTED = re.compile(r"[^=]*=\s*([A-Za-z][\w ./-]*?)\s*(#.*)?")
_CURLY = re.compile(r"[^=]*=\s*[“”„‘’«»].*")
_COMMA = re.compile(r"[^=]*=\s*(-?\d+),(\d+)\s*(#.*)?")
_POINT_FIRST = re.compile(r"[^=]*=\s*(-?)(\.\d+)\s*(#.*)?")
_AT_LINE = re.compile(
    r"(?P<complaint>.*) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)",
    re.DOTALL,
)
_LONG = re.compile(r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'', re.DOTALL)  # texts of several lines
_CLOSED = re.compile(r""" "(?:\\.|[^"\\])*" | '[^']*' | \#.* """, re.VERBOSE)  # texts, a comment
# Beginnings of the parser's errors about a text, list or table that is not closed. The line that
# such an error names may come after the line of the fault.
_OPEN: Mapping[str, Sentence] = {
    **dict.fromkeys(
        (
            *(
                f"{words} character '\\{end}'"
                for words in ("Illegal", "Found invalid")
                for end in "nr"
            ),
            "Unterminated string",
            "Expected \"'",
        ),
        Sentence("a text has no closing quotation mark"),
    ),
    "Unclosed array": Sentence("a list has no closing bracket ]"),
    "Unclosed inline table": Sentence(
        "a table in braces stands on one line, with its closing brace"
    ),
}
_COMPLAINTS: Mapping[str, Sentence] = {
    **_OPEN,
    "Expected ']": Sentence("the name of the table has no closing bracket ]"),
    "Expected '=' after a key": Sentence("a key is followed by = and a value"),
    **dict.fromkeys(
        ("Unescaped '\\'", "Invalid hex value"),
        Sentence("a text with backslashes stands in single quotes: 'C:\\data'"),
    ),
    "Cannot declare": Sentence("this table is there twice"),
    "Cannot overwrite a value": Sentence("a key is given twice"),
    "Invalid statement": Sentence("a line is key = value or [table]"),
    "Invalid value": Sentence("the value is no number, text in quotes, true, false, date or list"),
}


def fault(text: str, error: Exception) -> Sentence:
    """Return why a text is not TOML, with the number of the line, from the error of its parser."""
    if isinstance(error, RecursionError):
        return Sentence("it nests more than {count} tables or lists", count=DEEP_MAX)
    if isinstance(error, UnicodeDecodeError):
        return sentence_of(why(error))
    if "\0" in text:
        return Sentence("it is not UTF-8 text")  # UTF-16 without its mark
    if not isinstance(error, tomllib.TOMLDecodeError):
        return Sentence("it holds a number that is too large")  # thousands of digits
    place, lines = _AT_LINE.fullmatch(str(error)), text.splitlines()
    if place is None:
        return sentence_of(escaped(error, 200))
    last = int(place["line"] or len(lines))
    number = _opening(text, last, place["complaint"]) or last
    if not 0 < number <= len(lines):
        return sentence_of(escaped(error, 200))
    rest = lines[number - 1][int(place["column"] or 1) - 1 :].strip()
    reason = _reason(text, lines[number - 1].strip(), place["complaint"], rest)
    return Sentence("line {line}: {reason}", line=number, reason=reason)


def _opening(text: str, last: int, complaint: str) -> int:
    """Return the number of the line, at most `last`, whose text or list is not closed; 0 for other
    complaints.
    """
    if not complaint.startswith(tuple(_OPEN)):
        return 0
    lines = _LONG.sub(lambda long: "\n" * long[0].count("\n"), text).splitlines()[:last]
    if complaint.startswith("Unclosed"):
        numbers = [number for number, line in enumerate(lines, 1) if _unclosed(line)]
        return numbers[-1] if numbers else 0
    quoted = enumerate((_CLOSED.sub("", line) for line in lines), 1)
    return next((number for number, line in quoted if {"'", '"'} & {*line}), 0)


def _unclosed(line: str) -> bool:
    """Return True if a line opens more brackets than it closes."""
    signs = _CLOSED.sub("", line).partition("=")[2]
    return any(signs.count(pair[0]) > signs.count(pair[1]) for pair in ("[]", "{}"))


def _reason(text: str, line: str, complaint: str, rest: str) -> Sentence:
    """Return the mistake in a line of a text, by the line itself or by the parser's complaint about
    the `rest` of the line.
    """
    language = "JSON" if text.lstrip("\ufeff \t\r\n").startswith("{") else ""
    if re.match(r"(---|[\w-]+:(\s|$)|- )", line):
        language = language or "YAML"
    if language:
        return Sentence(
            "this is {language}, not TOML, which has lines such as key = value and [table]",
            language=language,
        )
    if word := _SPELLED.fullmatch(line):
        return Sentence("{word} is written true or false in TOML, in small letters", word=word[1])
    if word := _UNQUOTED.fullmatch(line):
        return Sentence('a text stands in quotes: "{text}"', text=word[1])
    if _CURLY.fullmatch(line):
        return Sentence('quotation marks are straight in TOML: "')
    if digits := _COMMA.fullmatch(line):
        number = f"{digits[1]}.{digits[2]}"
        return Sentence("a number has a point, not a comma: {number}", number=number)
    if digits := _POINT_FIRST.fullmatch(line):
        number = f"{digits[1]}0{digits[2]}"
        return Sentence("a number begins with a digit: {number}", number=number)
    if re.fullmatch(r"[^=#]*=\s*(#.*)?", line):
        return Sentence("the value is missing")
    for beginning, sentence in _COMPLAINTS.items():
        if complaint.startswith(beginning):
            return sentence
    if complaint.startswith("Expected newline"):
        return Sentence("the line should end before {rest}", rest=escaped(rest, 40))
    return Sentence("the form is not TOML's: {complaint}", complaint=escaped(complaint, 200))
