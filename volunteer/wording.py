"""Numbers and foreign text as people read them: durations, sizes, credits, sentences from the other side."""

from __future__ import annotations

TEXT_CHARS_MAX = 2000


def printable(text: str, limit: int = TEXT_CHARS_MAX) -> str:
    """Text of somebody else, safe for a terminal: no control characters, no direction marks, bounded."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else " " for c in cut)


def duration(seconds: float) -> str:
    """12 s, 3:05 min, 2:10 h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


def size(count: float) -> str:
    """Bytes in powers of ten, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def credit(micro: int) -> str:
    """Micro-credits as credits."""
    return f"{micro / 1_000_000:,.2f}"


def loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
