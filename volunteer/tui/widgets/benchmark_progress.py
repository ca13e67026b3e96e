"""Progress of a benchmark, drawn on the first screen and on the device page."""

from __future__ import annotations

from volunteer.tui.status_line import stage_words
from volunteer.tui.text import Line, bar, percent, wrap
from volunteer.tui.widgets.panel import Scene


def progress_lines(scene: Scene, cells: int, height: int) -> list[Line]:
    """Return the lines of a benchmark under way."""
    now = scene.view.benchmark
    if now is None:
        return []
    tail = f" {percent(now.done)}"
    lines: list[Line] = [
        ((stage_words(now), "text"),),
        (*bar(now.done, cells - len(tail), scene.glyphs), (tail, "value")),
        (),
    ]
    said = "Times the work that a task does; only the figures are sent."
    return [*lines, *(((text, "dim"),) for text in wrap(said, cells, 3))][:height]
