"""Words, numbers and signs of the screens: pure functions, every width counted in terminal cells.

A line of a screen is a tuple of spans, a span is text and the name of its role ("dim", "good",
"bad" ...). Roles get their colours from the theme; no function here names a colour. A state is
always shown by a sign or a word, never by colour alone.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec
from rich.cells import cell_len, set_cell_size

from shared.text import printable, whole_percent
from shared.units import DAY_S
from volunteer.i18n.catalogue import _, localized
from volunteer.i18n.formats import credit

Span: TypeAlias = tuple[str, str]  # text, role
Line: TypeAlias = tuple[Span, ...]


class Role(msgspec.Struct, frozen=True):
    """Style of a text: the theme's variables for its colour and, if it has one, its background."""

    ink: str
    bold: bool = False
    paper: str = ""


ROLES = {
    "text": Role("foreground"),
    "dim": Role("dim"),
    "faint": Role("faint"),
    "value": Role("foreground", bold=True),
    "title": Role("primary", bold=True),
    "key": Role("accent", bold=True),
    "good": Role("success", bold=True),
    "warn": Role("warning", bold=True),
    "bad": Role("error", bold=True),
    "info": Role("primary", bold=True),
    "accent": Role("accent"),
    "big": Role("accent", bold=True),
    "mark": Role("mark", bold=True),
    "raw": Role("raw"),
    "mean": Role("mean", bold=True),
    "model": Role("model", bold=True),
    "track": Role("track"),
    "fill": Role("primary"),
    "tab": Role("dim"),
    "here": Role("background", bold=True, paper="primary"),
}

FOREIGN_CHARS_MAX = 2000  # longest text of others that is shown
MANY, TINY = 999.5e12, 1e-4  # a number above MANY is written as a word, one below TINY as 0


class Glyphs(msgspec.Struct, frozen=True, kw_only=True):
    """Signs of one character cell each."""

    on: str = "●"
    off: str = "○"
    paused: str = "‖"
    run: str = "▶"
    check: str = "✓"
    cross: str = "✗"
    warn: str = "▲"
    wait: str = "◌"
    mark: str = "◆"
    up: str = "↑"
    down: str = "↓"
    right: str = "→"
    left: str = "←"
    dot: str = "·"
    ellipsis: str = "…"
    full: str = "━"
    half: str = "╸"
    empty: str = "─"
    axis: str = "─"
    vertical: str = "│"
    corner: str = "└"
    tick: str = "┤"
    columns: str = " ▁▂▃▄▅▆▇█"  # from empty to full
    curve: str = "braille"  # alphabet of plots: "braille" or "ascii"


UNICODE = Glyphs()
ASCII = Glyphs(
    on="*",
    off="o",
    paused="=",
    run=">",
    check="+",
    cross="x",
    warn="!",
    wait="~",
    mark="#",
    up="^",
    down="v",
    right=">",
    left="<",
    dot="-",
    ellipsis="~",
    full="=",
    half="-",
    empty=".",
    axis="-",
    vertical="|",
    corner="+",
    tick="+",
    columns=" .:-=+*#",
    curve="ascii",
)

# Replacements for `--ascii`: foreign text (names, prompts, samples) may contain any character.
_PLAIN = {
    ord(a): b for a, b in zip("–—−…·‘’“”×≤≥→←↑↓±„«»ß¿¡", '---~-\'\'""x<>><^v~"""s?!', strict=True)
}


def ascii_only(text: str) -> str:
    """Return the text in 7 bits, in the same width."""
    if text.isascii():
        return text
    plain = text.translate(_PLAIN)
    return "".join(c if c.isascii() else _bare(c) for c in plain)


def _bare(letter: str) -> str:
    """Return a letter without its accent, or as many question marks as it has cells."""
    base = unicodedata.normalize("NFKD", letter)[:1]
    cells = cell_len(letter)
    return base if base.isascii() and cell_len(base) == cells else "?" * cells


def shown_name(name: str, instead: str, glyphs: Glyphs) -> str:
    """Return a name, or `instead` if `--ascii` would show only question marks."""
    plain = glyphs.curve == ASCII.curve
    return instead if plain and name and not ascii_only(name).strip("? ") else name


# ---------------------------------------------------------------------------------------- spans


def width(line: Iterable[Span]) -> int:
    """Return the cells of a line."""
    return sum(cell_len(text) for text, _ in line)


def fit(text: str, cells: int, ellipsis: str = "…") -> str:
    """Return text cut to at most `cells`, with an ellipsis if something was cut."""
    if cells <= 0:
        return ""
    if cell_len(text) <= cells:
        return text
    return set_cell_size(text, cells - 1).rstrip() + ellipsis if cells > 1 else ellipsis


def left(text: str, cells: int, ellipsis: str = "…") -> str:
    """Return text in exactly `cells`, aligned left."""
    cut = fit(text, cells, ellipsis)
    return cut + " " * max(0, cells - cell_len(cut))


def right(text: str, cells: int) -> str:
    """Return text in exactly `cells`, aligned right."""
    cut = fit(text, cells)
    return " " * max(0, cells - cell_len(cut)) + cut


def spread(start: Line, end: Line, cells: int) -> Line:
    """Return a line of `cells` with `start` at its left and `end` at its right; only `start` if
    there is no room for both.
    """
    room = cells - width(start)
    if width(end) + 1 > room:
        return start
    return (*start, (" " * (room - width(end)), "text"), *end)


def wrap(text: str, cells: int, rows: int, ellipsis: str = "…") -> list[str]:
    """Return the words of a text on at most `rows` lines of at most `cells`; cut text ends with
    `ellipsis`.
    """
    if cells <= 0 or rows <= 0:
        return []
    lines: list[str] = []
    for source in printable_lines(text):
        line = ""
        for word in source.split(" "):
            while cell_len(word) > cells:  # longer than a line: cut at its end
                room = cells - (cell_len(line) + 1 if line else 0)
                if room < 2:
                    lines.append(line)
                    line, room = "", cells
                head = set_cell_size(word, room).rstrip()
                lines.append(f"{line} {head}" if line else head)
                line, word = "", word[max(1, len(head)) :]
            if line and cell_len(line) + 1 + cell_len(word) > cells:
                lines.append(line)
                line = word
            else:
                line = f"{line} {word}" if line else word
        lines.append(line)
        if len(lines) > rows:
            break
    if len(lines) > rows:
        lines = lines[:rows]
        lines[-1] = fit(lines[-1] + ellipsis, cells, ellipsis)
    return lines


def paragraph(text: str, cells: int, rows: int, role: str = "text") -> list[Line]:
    """Return the words of a text on at most `rows` lines of at most `cells`, all in one role."""
    return [((line, role),) for line in wrap(text, cells, rows)]


def centred(sentence: str, cells: int, rows: int, ellipsis: str = "…") -> list[Line]:
    """Return a sentence in the middle of an empty panel of `cells` x `rows`."""
    rows_of_text = wrap(sentence, min(cells, 48), rows, ellipsis) if sentence else []
    lines: list[Line] = [()] * ((rows - len(rows_of_text)) // 2)
    return lines + [
        ((" " * ((cells - cell_len(text)) // 2) + text, "dim"),) for text in rows_of_text
    ]


def printable_lines(text: str, limit: int = FOREIGN_CHARS_MAX) -> list[str]:
    """Return the lines of a foreign text, safe for a terminal."""
    return [printable(line, limit) for line in text[:limit].splitlines()] or [""]


# -------------------------------------------------------------------------------------- numbers


def short_number(value: float | None, digits: int = 3) -> str:
    """Return a number with at most `digits` significant digits and a unit prefix, such as 4.21 M; a
    whole number below 1000 with all its digits; "-" for None and NaN.
    """
    if value is None or value != value:
        return "-"
    if abs(value) >= MANY:
        return _("many") if value > 0 else _("-many")
    if abs(value) < TINY:
        return "0"
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            break
        value /= 1000
    text = f"{value:.0f}" if value == int(value) and not unit else f"{value:.{digits}g}"
    return f"{localized(text)} {unit}".rstrip()


def flops(value: float) -> str:
    """Return floating point operations a second: 4.21 MFLOP/s."""
    return (
        f"{short_number(value)}FLOP/s"
        if " " in short_number(value)
        else f"{short_number(value)} FLOP/s"
    )


def gain(micro: int) -> str:
    """Return micro-credits as credits with their sign: +50.00, -3.20."""
    return f"{'+' if micro >= 0 else ''}{credit(micro)}"


def gain_role(micro: int) -> str:
    """Return the role of a gain; a gain below zero is a loss."""
    return "good" if micro > 0 else "bad" if micro < 0 else "text"


def countdown(seconds: float) -> str:
    """Return a time left: 3:12, 1:02:03; never below 0:00."""
    whole = int(max(0.0, min(seconds, 359_999.0)) + 0.999)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"


def soon(seconds: float) -> str:
    """Return a time left, in seconds up to 99: 42 s, 3:12."""
    return f"{int(max(0.0, seconds) + 0.999)} s" if seconds <= 99 else countdown(seconds)


def rate(value: float) -> str:
    """Return a number a second with three digits: 2.00, 0.187, 383."""
    if TINY <= value < 999.5:
        return localized(f"{value:#.3g}".rstrip("."))
    return short_number(value)


def ago(seconds: float) -> str:
    """Return a duration up to now in its largest whole unit: now, 12 s, 3 min, 2 h, 4 d."""
    if seconds < 2:
        return _("now")
    for size, name in ((60.0, "s"), (3600.0, "min"), (DAY_S, "h")):
        if seconds < size:
            per = {"s": 1.0, "min": 60.0, "h": 3600.0}[name]
            return f"{int(seconds / per)} {name}"
    return f"{int(seconds / 86_400)} d"


def as_of(seconds: float) -> str:
    """Return the age of a reply in words: as of 3 min ago."""
    return _("as of now") if seconds < 2 else _("as of {time} ago", time=ago(seconds))


def clock_time(at: float) -> str:
    """Return a moment's local time of day."""
    return time.strftime("%H:%M", time.localtime(at)) if 0 < at < 4e9 else "--:--"


def when(at: float, now: float) -> str:
    """Return the time of day of a moment in the last 20 hours, or ahead of this machine's clock;
    else the time since: 2 d ago.
    """
    return clock_time(at) if now - at < 20 * 3600 else _("{time} ago", time=ago(now - at))


def percent(share: float) -> str:
    """Return a share (0 to 1) as whole per cent; 100 % only for 1."""
    return f"{whole_percent(share)} %"


def bar(share: float, cells: int, glyphs: Glyphs = UNICODE) -> Line:
    """Return a bar of exactly `cells`; its full and empty parts differ in sign and in colour."""
    if cells <= 0:
        return ()
    share = 0.0 if share != share else min(1.0, max(0.0, share))
    halves = int(share * cells * 2)
    full, rest = divmod(halves, 2)
    spans = [(glyphs.full * full, "fill"), (glyphs.half * rest, "fill")]
    spans.append((glyphs.empty * (cells - full - rest), "track"))
    return tuple(span for span in spans if span[0])


def spark(values: Sequence[float], cells: int, glyphs: Glyphs = UNICODE) -> str:
    """Return the newest values as a row of small columns, scaled from zero to the highest value."""
    finite = [v for v in values if v == v and 0 <= v < float("inf")]
    tail = finite[-cells:] if cells > 0 else []
    top = max(tail, default=0.0)
    if top <= 0:
        return ""
    last = len(glyphs.columns) - 1  # full height is left for a later, higher value
    return "".join(glyphs.columns[round(v / top * (last - 2))] for v in tail)


# Digits three cells wide and three lines high, for the most important number of a screen.
_BIG = {
    "0": ("╭─╮", "│ │", "╰─╯"),
    "1": ("╶╮ ", " │ ", "╶┴╴"),
    "2": ("╶─╮", "╭─╯", "╰─╴"),
    "3": ("╶─╮", " ─┤", "╶─╯"),
    "4": ("╷ ╷", "╰─┤", "  ╵"),
    "5": ("╭─╴", "╰─╮", "╶─╯"),
    "6": ("╭─╴", "├─╮", "╰─╯"),
    "7": ("╶─╮", "  │", "  ╵"),
    "8": ("╭─╮", "├─┤", "╰─╯"),
    "9": ("╭─╮", "╰─┤", "╶─╯"),
    ".": (" ", " ", "."),
    ",": (" ", " ", ","),
    "-": ("  ", "──", "  "),
    " ": (" ", " ", " "),
}


def big_digits(text: str) -> tuple[str, str, str] | None:
    """Return a number's digits on three lines; None if a character has no big form."""
    if any(sign not in _BIG for sign in text):
        return None
    top, middle, bottom = ("".join(_BIG[sign][row] for sign in text) for row in range(3))
    return top, middle, bottom
