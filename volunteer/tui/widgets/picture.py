"""Text that is a picture: a board, images in dots. Shown as it is, never wrapped."""

from __future__ import annotations

from rich.cells import cell_len

from volunteer.tui.text import Line, count, left, printable_lines


def drawn(text: str) -> bool:
    """Whether a text is a picture or a board: its last lines are all as wide."""
    rows = text.splitlines()[-3:]
    return len(rows) == 3 and len({cell_len(row) for row in rows}) == 1


def picture(preview: str, metrics: dict[str, float], cells: int, height: int) -> list[Line]:
    """Lines as they are, and beside or below them the numbers of the work."""
    rows = printable_lines(preview)
    facts: list[Line] = [
        ((left(name.replace("_", " "), 17), "dim"), (count(value, 4), "value"))
        for name, value in list(metrics.items())[:height]
    ]
    wide = max(cell_len(row) for row in rows)
    if wide + 28 > cells:
        return ([((row, "text"),) for row in rows] + facts)[:height]
    nothing: Line = ()
    facts += [nothing] * (len(rows) - len(facts))
    rows += [""] * (len(facts) - len(rows))
    beside = zip(rows[:height], facts[:height], strict=True)
    return [((left(row, wide + 3), "text"), *fact) for row, fact in beside]
