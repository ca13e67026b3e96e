"""Numbers and foreign text for people: sizes, credits, durations, table cells.

The command lines, listings and screens of both programs use this module. The width of a text comes
from the Unicode tables of the standard library.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence
from json import dumps
from typing import TYPE_CHECKING

from shared.sentences import Sentence, sentence_of

if TYPE_CHECKING:
    from shared.workloads.declaration import Measure

TEXT_CHARS_MAX = 2000
SHOWN_CHARS_MAX = 60
MICRO = 1_000_000  # micro-credits in a credit
BARS = "▁▂▃▄▅▆▇█"
SPARKS_MAX = 60  # characters of a sparkline

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of a spreadsheet's formula
_ZERO_WIDTH = ("Mn", "Me", "Cf", "Cc")  # Unicode categories
_EMOJI_STYLE = "\ufe0f"  # selects the coloured form, two cells wide, of the sign before it


# Unicode's Default_Ignorable_Code_Point: code points that are not drawn, or only as a blank.
_UNDRAWN = (
    *((0x00AD, 0x00AD), (0x034F, 0x034F), (0x061C, 0x061C), (0x115F, 0x1160), (0x17B4, 0x17B5)),
    *((0x180B, 0x180F), (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164)),
    *((0xFE00, 0xFE0F), (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8)),
    *((0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF)),
)


def is_undrawn(char: str) -> bool:
    """Return True for a character that is invisible in a name."""
    return any(first <= ord(char) <= last for first, last in _UNDRAWN)


def printable(text: str, limit: int = TEXT_CHARS_MAX) -> str:
    """Return foreign text, safe for a terminal: no control characters, no direction marks, at most
    `limit` characters. For a `Sentence` the result is a `Sentence` too, with safe text and values.
    """
    if isinstance(text, Sentence):
        values = {
            n: printable(v, limit) if isinstance(v, str) else v for n, v in text.values.items()
        }
        return sentence_of(printable(str(text), limit), text.message, values, text.many)
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else " " for c in cut)


def escaped(text: object, limit: int = SHOWN_CHARS_MAX) -> str:
    """Return foreign text for a message: control characters as `\\x1b`, cut after `limit`."""
    whole = str(text)
    excerpt = whole[:limit] + ("…" if len(whole) > limit else "")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in excerpt)


def ascii_json(text: str) -> str:
    """Return JSON in ASCII, so that foreign text cannot send control codes to a terminal."""
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(c if c == "\n" or " " <= c <= "~" else _json_escape(c) for c in text)


def _json_escape(letter: str) -> str:
    """Return the JSON escape of a character: two escapes beyond U+FFFF."""
    data = letter.encode("utf-16-be")
    return "".join(f"\\u{data[at : at + 2].hex()}" for at in range(0, len(data), 2))


def cells(text: str) -> int:
    """Return the width of a text in cells of a terminal: two for wide East Asian letters, none for
    combining marks (Unicode Standard Annex 11).
    """
    if text.isascii():
        return len(text)
    width = 0
    for before, letter in zip(" " + text, text, strict=False):
        if letter == _EMOJI_STYLE:
            width += unicodedata.east_asian_width(before) not in "WF" and before != " "
        elif unicodedata.category(letter) not in _ZERO_WIDTH:
            width += 2 if unicodedata.east_asian_width(letter) in "WF" else 1
    return width


def left(text: str, width: int) -> str:
    """Return the text, padded on the right to `width` cells; wider text stays whole."""
    return text + " " * (width - cells(text))


def right(text: str, width: int) -> str:
    """Return the text, padded on the left to `width` cells; wider text stays whole."""
    return " " * (width - cells(text)) + text


def csv_cell(value: object) -> object:
    """Return the value for a cell of CSV, with an apostrophe before a text that a spreadsheet would
    run as a formula.
    """
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    if value[0] in "+-" and value[1:].replace(".", "", 1).isdecimal():
        return value
    return "'" + value


def sparkline(values: Sequence[float]) -> str:
    """Return a curve of one text line: the newest SPARKS_MAX values as bars of eight heights,
    scaled between their extremes.
    """
    tail = list(values)[-SPARKS_MAX:]
    if not tail:
        return ""
    low, high = min(tail), max(tail)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in tail)


def duration(seconds: float) -> str:
    """Return a duration: 12 s, 3:05 min, 2:10 h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


def size(count: float) -> str:
    """Return bytes in powers of ten, three digits: 512 B, 1.23 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def counted(number: int, thing: str) -> str:
    """Return a count: 1 task, 2,000 tasks."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def whole_percent(share: float) -> int:
    """Return a share in whole per cent, 100 only when complete."""
    return min(100, int(max(0.0, share) * 100 + 1e-9))


def measured(loss: float, measure: Measure) -> str:
    """Return a run's loss in four digits; for the measure "share solved", the per cent solved."""
    return f"{whole_percent(1 - loss)} %" if measure == "share solved" else f"{loss:.4g}"


def measure_word(measure: Measure) -> str:
    return "solved" if measure == "share solved" else "loss"


def credit(micro: int, digits: int = 2) -> str:
    """Return micro-credits as credits."""
    return f"{micro / MICRO:,.{digits}f}"


def exact_credit(micro: int) -> str:
    """Return micro-credits as credits, with two digits or as many as it takes."""
    digits = next((d for d in range(2, 6) if micro % 10 ** (6 - d) == 0), 6)
    return credit(micro, digits)


def table_lines(
    names: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[int] = ()
) -> list[str]:
    """Return the lines of a table, the header first; the columns whose indices are in `numbers` are
    aligned to the right.
    """
    widths = [max(map(cells, column)) for column in zip(names, *rows, strict=True)]
    return [
        "  ".join(
            (right if at in numbers else left)(cell, width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in ([name.upper() for name in names], *rows)
    ]


def error_line(program: str, sentence: object, code: int, *, json: bool) -> str:
    """Return the line that a program prints about an error: its name and the sentence, or with
    `json` a JSON document.
    """
    if not json:
        return f"{program}: {sentence}"
    return ascii_json(dumps({"error": str(sentence), "exit_code": code}, ensure_ascii=False))
