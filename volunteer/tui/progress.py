"""How a benchmark under way is drawn, on the first screen and on the page of the devices."""

from __future__ import annotations

from volunteer.tui.text import Line, bar, percent, wrap
from volunteer.tui.widgets.panel import Scene
from volunteer.wording import printable

STAGES = {
    "fp32": "matrix products in float32",
    "bf16": "matrix products in bfloat16",
    "memory": "memory",
    "step": "real training steps",
    "disk": "disk",
}


def progress_lines(scene: Scene, cells: int, height: int) -> list[Line]:
    """A benchmark under way."""
    now = scene.view.benchmark
    if now is None:
        return []
    tail = f" {percent(now.done)}"
    lines: list[Line] = [
        ((STAGES.get(now.stage, printable(now.stage, 40)), "text"),),
        (*bar(now.done, cells - len(tail), scene.glyphs), (tail, "value")),
        (),
    ]
    said = "The same things that a task does are timed; nothing is sent but the figures."
    return [*lines, *(((text, "dim"),) for text in wrap(said, cells, 3))][:height]
