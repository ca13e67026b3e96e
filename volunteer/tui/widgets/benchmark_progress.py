"""Progress of a benchmark, drawn on the first screen and on the device page."""

from __future__ import annotations

from volunteer.control.events import BenchmarkProgress
from volunteer.i18n.catalogue import _
from volunteer.tui.status_line import STAGES, stage_words
from volunteer.tui.text import Glyphs, Line, bar, paragraph, percent
from volunteer.tui.widgets.panel import Scene

ROOMY = len(STAGES) + 4  # rows for every stage, the bar, and the purpose


def progress_lines(scene: Scene, cells: int, height: int) -> list[Line]:
    """Return the lines of a running benchmark; [] if none runs."""
    now = scene.view.benchmark
    if now is None:
        return []
    tail = f" {percent(now.done)}"
    lines: list[Line] = [
        *(_stages(now, scene.glyphs) if height >= ROOMY else [((stage_words(now), "text"),)]),
        (*bar(now.done, cells - len(tail), scene.glyphs), (tail, "value")),
        (),
    ]
    sentence = _("Times the work that a task does; only the figures are sent.")
    return [*lines, *paragraph(sentence, cells, 3, "dim")][:height]


def _stages(now: BenchmarkProgress, glyphs: Glyphs) -> list[Line]:
    """Return every stage in order: done, present and later stages."""
    names = list(STAGES)
    at = names.index(now.stage) if now.stage in names else len(names)
    return [
        ((f"{glyphs.check} ", "good"), (words, "dim"))
        if number < at
        else ((f"{glyphs.on} ", "info"), (words, "value"))
        if number == at
        else ((f"{glyphs.off} ", "dim"), (words, "dim"))
        for number, words in enumerate(map(_, STAGES.values()))
    ]
