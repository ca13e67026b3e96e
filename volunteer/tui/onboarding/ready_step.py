"""Last step: training starts when the owner of the machine presses enter or space."""

from __future__ import annotations

from rich.cells import cell_len
from textual.app import ComposeResult
from typing_extensions import override

from volunteer.control import commands
from volunteer.i18n.catalogue import N_, _
from volunteer.tui.onboarding.onboarding_step import BACK, Step
from volunteer.tui.text import Line, wrap
from volunteer.tui.widgets.panel import FunctionPanel, Scene

START_BAR = N_("press  ENTER  to start")


class ReadyStep(Step):
    """Step that starts the work."""

    NAME = "Start"
    TITLE = N_("Start")
    HEADING = N_("Everything is ready.")
    KEYS = ((N_("enter"), N_("start"), "next"), *BACK)

    @override
    def compose(self) -> ComposeResult:
        yield FunctionPanel(self._draw, id="ready")

    @override
    def begin(self, why: str = "") -> None:
        self.query_one("#ready", FunctionPanel).focus()

    @override
    def proceed(self) -> None:
        """Start the work."""
        if self.control is not None:
            self.volunteer.command(self.control.do(commands.Resume()), self.finish)

    @override
    def press_space(self) -> None:
        self.proceed()

    def _draw(self, scene: Scene, width: int, height: int) -> list[Line]:
        words = _(START_BAR)
        inner = cell_len(words) + 8
        indent = " " * max(0, (width - inner) // 2)
        edge = (f"{indent}{' ' * inner}", "text")
        lines: list[Line] = [
            (),
            ((indent, "text"), (" " * inner, "here")),
            ((indent, "text"), (f"    {words}    ", "here")),
            ((indent, "text"), (" " * inner, "here")),
            (edge,),
        ]
        notes = (
            _("space pauses; your machine is free within two seconds"),
            _("f finishes the task in hand and takes no more"),
            _("q quits; finished work is kept"),
        )
        dot = scene.glyphs.dot
        column = max(0, (width - max(cell_len(n) for n in notes) - 2) // 2)
        for note in notes:
            for row, text in enumerate(wrap(note, width - column - 2, 2)):
                sign = "  " if row else f"{dot} "
                lines.append(((" " * column, "text"), (sign, "info"), (text, "dim")))
        return lines[:height]
