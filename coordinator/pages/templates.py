"""Templates of the public pages and their filters, with every value escaped; static files."""

from __future__ import annotations

import hashlib
import re
import time
from functools import lru_cache
from importlib.resources import files

import jinja2
import msgspec

from shared.text import counted, credit, measured, printable, size
from shared.workloads.declaration import MEASURES, Measure
from shared.workloads.games import COLUMNS

KINDS = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
TAG_CHARS = 12

SIZE_MAX = len(COLUMNS)  # of a board
_TURN = re.compile(r"(\d+)\. ([a-z]\d{1,2})(?: ([a-z]\d{1,2}))?")

SAMPLE_CHARS_MAX = 4000
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def _read(name: str) -> str | None:
    template = files(__package__).joinpath("templates", name)
    return template.read_text(encoding="utf-8") if template.is_file() else None


@lru_cache(maxsize=1)
def static_files() -> dict[str, bytes]:
    """Return every file of the folder `static`, by name."""
    return {
        item.name: item.read_bytes()
        for item in files(__package__).joinpath("static").iterdir()
        if item.name.rpartition(".")[2] in KINDS
    }


@lru_cache(maxsize=16)
def static_url(name: str) -> str:
    """Return the address of a static file; it changes with the content."""
    return f"/static/{name}?{hashlib.sha256(static_files()[name]).hexdigest()[:TAG_CHARS]}"


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """Return the template environment and its functions."""
    templates = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(_read),
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    templates.filters |= {
        "amount": amount,
        "loss": loss,
        "measure": measure,
        "ago": ago,
        "hours": hours,
        "iso": iso,
        "day": day,
        "sample": plain,
        "board": board,
        "text": printable,
        "credits": credit,
        "counted": counted,
        "size": size,
    }
    templates.globals |= {"static": static_url}
    return templates


def render(template: str, **values: object) -> str:
    """Return a page, or another document, as text."""
    return environment().get_template(template).render(**values)


class Stone(msgspec.Struct, frozen=True):
    """One move: its name, its place on the board, and its player."""

    name: str
    x: int
    y: int
    player: str  # "x" or "o"


class PlayedGame(msgspec.Struct, frozen=True, kw_only=True):
    """Game of a sample: board size, moves and result."""

    size: int
    stones: tuple[Stone, ...]
    end: str  # "X wins after 12 moves"

    @property
    def moves(self) -> str:
        """Return every move by name, for screen readers."""
        return " ".join(stone.name for stone in self.stones)


@lru_cache(maxsize=256)
def board(text: str) -> PlayedGame | None:
    """Return the game that a sample text describes; None for any other text."""
    lines = text.split("\n")
    if len(lines) < 5:
        return None
    names = [name for turn in _TURN.findall(lines[0]) for name in turn[1:] if name]
    size = lines[-1].count(" ") - 2  # number of the board's columns, by their letters
    if not names or not 3 <= size <= SIZE_MAX or lines[-1].split() != list(COLUMNS[:size]):
        return None
    stones = []
    for ply, name in enumerate(names):
        x, row = COLUMNS.index(name[0]), int(name[1:])
        if not (x < size and 1 <= row <= size):
            return None
        stones.append(Stone(name, x, size - row, "xo"[ply % 2]))
    return PlayedGame(size=size, stones=tuple(stones), end=lines[1])


def amount(number: float) -> str:
    """Return a number in few characters: 970, 12.4 k, 1.2 M."""
    for factor, unit in UNITS:
        if abs(number) >= factor * 0.9995:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.0f}"


def loss(value: float | None, measure: Measure = "loss") -> str:
    """Return a loss in four digits, or for problems the share that is solved; a dash for an
    unmeasured loss.
    """
    return "–" if value is None else measured(value, measure)


def measure(name: Measure) -> str:
    """Return the name of a measure, as pages show it."""
    return "solved" if name == "share solved" else MEASURES[name]


def ago(seconds: float) -> str:
    """Return an age in words: just now, 5 minutes ago, 3 days ago."""
    for unit_s, unit in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= unit_s:
            count = int(seconds // unit_s)
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"


def hours(seconds: float) -> str:
    """Return device time: 40 s, 12 min, 3.4 h, 120 h."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h" if seconds < 360_000 else f"{seconds / 3600:,.0f} h"


def iso(at: float) -> str:
    """Return an instant in RFC 3339, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def day(at: float) -> str:
    """Return an instant for people: 2026-11-23 17:05, UTC."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(at))


def plain(text: str, limit: int = SAMPLE_CHARS_MAX) -> str:
    """Return foreign text without control and direction characters, except line breaks."""
    cut = text[:limit] + ("…" if len(text) > limit else "")
    return "\n".join(printable(line, limit + 1) for line in cut.expandtabs(4).split("\n"))
