"""Base of the widgets: `lines` returns the content, and only changed rows are painted.

In a prototype, redrawing whole widgets twice a second took several times as much CPU, which
training needs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeAlias

import msgspec
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.content import Content
from textual.dom import DOMNode
from textual.events import Resize
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget
from typing_extensions import override

from shared.text import printable
from volunteer.control.commands import How
from volunteer.i18n.catalogue import _
from volunteer.tui.agent_view import AgentView
from volunteer.tui.text import ROLES, UNICODE, Glyphs, Line, as_of


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """All data that a panel draws: the view, the time, the glyphs, and the shown device."""

    view: AgentView = AgentView()
    now: float = 0.0  # UTC epoch seconds of this machine
    glyphs: Glyphs = UNICODE
    device: str = ""  # device of the shown task; "" = the most advanced task
    leaving: How | None = None  # requested way to end


def aged(lines: list[Line], scene: Scene) -> list[Line]:
    """Return lines of the coordinator's data, dimmed during an outage."""
    if not age(scene):
        return lines
    return [tuple((text, "dim") for text, _ in line) for line in lines]


def age(scene: Scene) -> str:
    """Return the age of the coordinator's data during an outage; otherwise ""."""
    since = scene.view.status.away_since
    return "" if since is None else as_of(scene.now - since)


def _same(one: AgentView, other: AgentView) -> bool:
    """Return True if run, account and losses, which several panels show, are unchanged."""
    if one.status.me is not other.status.me or one.models is not other.models:
        return False
    return one.run() == other.run()


class Panel(Widget):
    """Rectangle of lines. Subclasses return `lines` and, if the border has a title, `heading`."""

    ALLOW_SELECT = False
    pace_s: ClassVar[float] = 0.5  # least time between two redraws
    quick: ClassVar[bool] = True  # drawn at once while a person waits for the effect of a key

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.scene = Scene()
        self._lines: Sequence[Line] = ()
        self._drawn_at = float("-inf")
        self._styles: dict[str, Style] = {}
        self._heading = ("", "")

    @abstractmethod
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        """Return the lines of a scene; lines beyond `height` are cut off."""

    def heading(self, scene: Scene) -> tuple[str, str]:
        """Return title and subtitle of the border."""
        return "", ""

    def show(self, scene: Scene, *, at_once: bool = False) -> None:
        """Draw a scene, unless this panel was drawn less than `pace_s` ago and the data that other
        panels show too is unchanged.
        """
        same = _same(self.scene.view, scene.view)
        self.scene = scene
        if not at_once and same and 0 <= scene.now - self._drawn_at < self.pace_s - 0.05:
            return
        self._drawn_at = scene.now
        self.draw()

    def hurry(self, scene: Scene) -> None:
        """Draw only the titles of a scene, while a person waits for the effect of a key."""
        self.scene = scene
        self.draw_heading()

    def draw_heading(self) -> None:
        """Paint changed titles and subtitles."""
        if not self.is_attached or not self.display:
            return
        heading = self.heading(self.scene)
        if heading != self._heading:
            self._heading = heading
            # as content: a plain string would be parsed as markup, and names are foreign text
            self.border_title, self.border_subtitle = (Content(printable(t)) for t in heading)

    def draw(self) -> None:
        """Compare the lines with the screen and paint the rows that differ."""
        if not self.is_attached or not self.display:
            return
        self.draw_heading()
        width, height = self.content_size
        if width <= 0 or height <= 0:
            return
        before = self._lines
        self._lines = tuple(self.lines(self.scene, width, height))[:height]
        if len(before) != len(self._lines):
            self.refresh()
            return
        for y, (old, new) in enumerate(zip(before, self._lines, strict=True)):
            if old != new:
                self.refresh(Region(0, y, width, 1))

    def on_resize(self, event: Resize) -> None:
        self._lines = ()
        self.draw()
        self.refresh()

    @override
    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._styles = {}

    def _style(self, role: str) -> Style:
        style = self._styles.get(role)
        if style is None:
            ink, is_colour, paper = role.partition("/")
            if is_colour:  # colours of pictures are not cached: there are millions
                return Style(color=ink, bgcolor=paper)
            style = self._styles[role] = self._of_theme(role)
        return style

    def _of_theme(self, role: str) -> Style:
        """Return the theme's style of a role on this panel's background.

        Component classes would do the same, but each widget resolves all of them when mounted: with
        twenty roles that took a third of the CPU of the first paint (measured).
        """
        colours = self.app.theme_variables
        look = ROLES[role]
        paper = Color.parse(colours[look.paper]) if look.paper else self.background_colors[1]
        ink = Color.parse(colours[look.ink])
        return Style(color=ink.rich_color, bgcolor=paper.rich_color, bold=look.bold or None)

    @override
    def render_line(self, y: int) -> Strip:
        width = self.content_size.width
        base = self._style("text")
        if y >= len(self._lines):
            return Strip.blank(width, base)
        segments = [
            # foreign text may hold control codes that a terminal would obey
            Segment(text if text.isprintable() else printable(text), self._style(role))
            for text, role in self._lines[y]
            if text
        ]
        return Strip(segments).adjust_cell_length(width, base)


def panels(node: DOMNode) -> Iterator[Panel]:
    """Iterate over all panels below a node."""
    return (widget for widget in node.query("Panel") if isinstance(widget, Panel))


Draw: TypeAlias = Callable[[Scene, int, int], Sequence[Line]]  # scene, width, height
Heading: TypeAlias = Callable[[Scene], tuple[str, str]]  # title, subtitle


class FunctionPanel(Panel):
    """Panel whose lines come from a function of its page."""

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

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        return self._function(scene, width, height)

    @override
    def heading(self, scene: Scene) -> tuple[str, str]:
        return (_(self._title), "") if isinstance(self._title, str) else self._title(scene)
