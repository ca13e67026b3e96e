"""A panel whose lines come from a function of its page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from volunteer.tui.text import Line
from volunteer.tui.widgets.panel import Panel, Scene

Draw: TypeAlias = Callable[[Scene, int, int], Sequence[Line]]  # scene, width, height
Heading: TypeAlias = Callable[[Scene], tuple[str, str]]  # title, subtitle


class Drawn(Panel):
    """See the module."""

    def __init__(
        self,
        draw: Draw,
        *,
        title: str | Heading = "",
        id: str | None = None,
        classes: str | None = None,
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._function = draw
        self._title = title

    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        return self._function(scene, width, height)

    def heading(self, scene: Scene) -> tuple[str, str]:
        return (self._title, "") if isinstance(self._title, str) else self._title(scene)
