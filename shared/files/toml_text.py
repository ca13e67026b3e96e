"""Reason why a text is not TOML, in words: the form of another language, a text without quotes."""

from __future__ import annotations

import re
import tomllib

from shared.errors import why
from shared.sentences import Sentence, of
from shared.text import escaped

DEEP_MAX = 32  # depth of tables and lists inside each other

_SPELLED = re.compile(r"[^=]*=\s*(True|False|TRUE|FALSE|yes|no|on|off|None|null)\s*(#.*)?")
_UNQUOTED = re.compile(r"[^=]*=\s*([A-Za-z][\w ./-]*?)\s*(#.*)?")
_AT_LINE = re.compile(r"(?P<complaint>.*) \(at line (?P<line>\d+), column \d+\)", re.DOTALL)


def fault(text: str, error: Exception) -> Sentence:
    """Return why a text is not TOML, with the line, from the error of its parser."""
    if isinstance(error, RecursionError):
        return Sentence("it nests more than {count} tables or lists", count=DEEP_MAX)
    if isinstance(error, UnicodeDecodeError):
        return of(why(error))
    if not isinstance(error, tomllib.TOMLDecodeError):
        return Sentence("it holds a number that is too large")  # thousands of digits
    place = _AT_LINE.fullmatch(str(error))
    lines = text.splitlines()
    if place is None or int(place["line"]) > len(lines):
        return of(escaped(error, 200))
    reason = _reason(text, lines[int(place["line"]) - 1].strip(), place["complaint"])
    return Sentence("line {line}: {reason}", line=int(place["line"]), reason=reason)


def _reason(text: str, line: str, complaint: str) -> Sentence:
    """Return the fault of a line: the form of another language, or the parser's complaint."""
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
    if complaint == "Cannot overwrite a value":
        return Sentence("a key is given twice")
    return Sentence("the form is not TOML's: {complaint}", complaint=escaped(complaint, 200))
