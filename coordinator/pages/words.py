"""Numbers, times and foreign text as the page writes them."""

from __future__ import annotations

import time

from shared.text import printable

SAMPLE_CHARS_MAX = 4000
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def amount(number: float) -> str:
    """970, 12.4 k, 1.2 M."""
    for size, unit in UNITS:
        if abs(number) >= size * 0.9995:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def loss(value: float | None) -> str:
    """Four digits, or a dash where nothing was measured."""
    return "–" if value is None else f"{value:.4g}"


def ago(seconds: float) -> str:
    """just now, 5 minutes ago, 3 days ago."""
    for size, unit in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"


def hours(seconds: float) -> str:
    """Device time: 40 s, 12 min, 3.4 h, 120 h."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h" if seconds < 360_000 else f"{seconds / 3600:,.0f} h"


def iso(at: float) -> str:
    """RFC 3339, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def day(at: float) -> str:
    """2026-11-23 17:05, UTC."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(at))


def plain(text: str, limit: int = SAMPLE_CHARS_MAX) -> str:
    """Return foreign text without control characters and marks of direction; lines stay lines."""
    cut = text[:limit] + ("…" if len(text) > limit else "")
    return "\n".join(printable(line, limit + 1) for line in cut.expandtabs(4).split("\n"))
