"""Base of every page: tabs, state and keys around a body, redrawn while it is visible."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, cast

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container
from textual.events import ScreenResume
from textual.screen import Screen
from textual.widgets import Input
from typing_extensions import override

from volunteer.i18n.catalogue import N_
from volunteer.tui import keys
from volunteer.tui.widgets.bars import KeyBar, NewsBar, StateBar, TabBar
from volunteer.tui.widgets.panel import Scene, panels
from volunteer.tui.widgets.search_box import Finder

if TYPE_CHECKING:
    from volunteer.tui.app import VolunteerApp

SEARCH = keys.KeyCommand(
    key="slash",
    action="search",
    short=N_("search"),
    help=N_("Show only lines that hold a text."),
    rank=36,
)


class Page(Screen[None]):
    """Base of the pages. Subclasses set `NAME`, yield widgets in `body`, and send queries or update
    widgets other than panels in `update_from`.

    This class draws the panels, anywhere on the page. The keys of a page's `ACTIONS` (each runs the
    page's method `action_<name>`) come first in the footer, and are in the palette and the help.
    A page with a `Finder` lists only rows that contain `needle`; a page with a `ChoiceRow` shows
    the choice of `CHOICES` that `active_choice` names.
    """

    NAME: ClassVar[str]
    ACTIONS: ClassVar[tuple[keys.KeyCommand, ...]] = ()
    CHOICES: ClassVar[tuple[tuple[str, str], ...]] = ()  # names and words; the first is the default
    BINDINGS: ClassVar[list[BindingType]] = []

    def __init__(self) -> None:
        super().__init__()
        self._styled_for: tuple[object, ...] = ()
        self.active_choice = self.CHOICES[0][0] if self.CHOICES else ""
        for command in self.ACTIONS:
            self._bindings.bind(command.key, command.action, command.short, show=False)

    @property
    def volunteer(self) -> VolunteerApp:
        """Return the application of this page."""
        return cast("VolunteerApp", self.app)

    @override
    def compose(self) -> ComposeResult:
        yield TabBar(self.NAME)
        yield StateBar(id="state")
        yield NewsBar(id="news")
        with Container(id="body"):
            yield from self.body()
        yield KeyBar(id="keys")

    @abstractmethod
    def body(self) -> ComposeResult:
        """Yield the page's own widgets."""

    def update_from(self, scene: Scene) -> None:
        """Update widgets other than panels; called after each drawing of the visible page."""

    def useful(self, command: keys.KeyCommand) -> bool:
        """Return True if a `command` of the page's keys has an effect now."""
        return True

    def show(self, scene: Scene, *, at_once: bool = False, hurried: bool = False) -> None:
        """Draw a scene on the panels that are due, on all panels (`at_once`), or on the quick panels
        (`hurried`).
        """
        for panel in panels(self):
            if panel.quick or not hurried:
                panel.show(scene, at_once=at_once or hurried)
            else:
                panel.hurry(scene)
        self.update_from(scene)

    def on_screen_resume(self, event: ScreenResume) -> None:
        """Draw the newest scene. Styles are recomputed only if the theme or the terminal's focus
        changed while the page was hidden: they take three quarters of the time of a page change.
        """
        outer = (self.app.theme, self.app.classes, frozenset(self.app.pseudo_classes))
        event.refresh_styles = outer != self._styled_for
        self._styled_for = outer
        self.show(self.volunteer.scene(), at_once=True)

    @property
    def needle(self) -> str:
        return self.query_one(Finder).needle

    def action_choose(self) -> None:
        """Switch to the next choice."""
        names = [name for name, _ in self.CHOICES]
        self.action_pick(names[(names.index(self.active_choice) + 1) % len(names)])

    def action_pick(self, name: str) -> None:
        self.active_choice = name
        self._redraw()

    def action_search(self) -> None:
        self.query_one(Finder).open()

    @on(Input.Changed, "#finder")
    def _redraw(self) -> None:
        self.show(self.volunteer.scene(), at_once=True)

    @on(Finder.Left)
    def _finder_closed(self) -> None:
        self.query_one(str(self.AUTO_FOCUS)).focus()

    def on_mount(self) -> None:
        self.call_after_refresh(lambda: self.show(self.volunteer.scene(), at_once=True))
