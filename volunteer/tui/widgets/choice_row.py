"""Row of choices, one of which is active; a click activates another choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.cells import cell_len
from typing_extensions import override

from volunteer.i18n.catalogue import _
from volunteer.tui.text import Line, Span
from volunteer.tui.widgets.bars import Bar
from volunteer.tui.widgets.panel import Scene

KEY = "w"  # switches to the next choice


class ChoiceRow(Bar):
    """Row of choices.

    `options` are pairs of a name and its words; `chosen` returns the active name. A click calls the
    page's `action_pick` with a name.
    """

    DEFAULT_CSS = "ChoiceRow { height: 1; }"

    def __init__(
        self,
        options: Sequence[tuple[str, str]],
        choice: Callable[[], str],
        *,
        id: str | None = None,
    ) -> None:
        super().__init__(id=id)
        self._options = tuple(options)
        self._active = choice

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        spans: list[Span] = [(f" {KEY} ", "key")]
        at = len(KEY) + 2
        hits = []
        choice = self._active()
        for name, words in self._options:
            text = f" {_(words)} "
            spans.append((text, "here" if name == choice else "tab"))
            hits.append((at, at + cell_len(text), f"screen.pick('{name}')"))
            at += cell_len(text)
        self.hits = tuple(hits)
        return (tuple(spans),)
