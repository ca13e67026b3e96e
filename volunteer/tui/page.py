"""Base of every page: tabs, state and keys around a body, redrawn while it is visible."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container
from textual.events import ScreenResume
from textual.screen import Screen
from textual.widgets import Input

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
    """Base of the pages. Subclasses set `NAME`, yield widgets in `body`, and update in `shown`
    the widgets that are not panels.

    This class draws the panels, anywhere on the page. The keys of a page's `ACTIONS` (each runs the
    page's method `action_<name>`) come first in the footer, and are in the palette and the help.
    A page with a `Finder` or a `ChoiceRow` of its `CHOICES` draws what `needle` and `picked` leave.
    """

    NAME: ClassVar[str]
    ACTIONS: ClassVar[tuple[keys.KeyCommand, ...]] = ()
    CHOICES: ClassVar[tuple[tuple[str, str], ...]] = ()  # names and words; the first is the default
    BINDINGS: ClassVar[list[BindingType]] = []

    def __init__(self) -> None:
        super().__init__()
        self._styled_for: tuple[object, ...] = ()
        self.picked = self.CHOICES[0][0] if self.CHOICES else ""
        for command in self.ACTIONS:
            self._bindings.bind(command.key, command.action, command.short, show=False)

    @property
    def volunteer(self) -> VolunteerApp:
        """Return the application of this page."""
        return cast("VolunteerApp", self.app)

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

    def shown(self, scene: Scene) -> None:
        """Fill tables and the like; called at most twice a second while the page is visible."""

    def show(self, scene: Scene, *, at_once: bool = False, hurried: bool = False) -> None:
        """Draw a scene on the panels that are due, on all of them (`at_once`), or on the quick ones
        (`hurried`).
        """
        for panel in panels(self):
            if panel.quick or not hurried:
                panel.show(scene, at_once=at_once or hurried)
            else:
                panel.hurry(scene)
        self.shown(scene)

    def on_screen_resume(self, event: ScreenResume) -> None:
        """Draw the newest scene. Styles are recomputed only if the theme or the terminal's focus
        changed while the page was hidden: that took three quarters of a page change.
        """
        outer = (self.app.theme, self.app.classes, frozenset(self.app.pseudo_classes))
        event.refresh_styles = outer != self._styled_for
        self._styled_for = outer
        self.show(self.volunteer.scene(), at_once=True)

    @property
    def needle(self) -> str:
        return self.query_one(Finder).needle

    def action_choose(self) -> None:
        """Take the next choice."""
        names = [name for name, _ in self.CHOICES]
        self.action_pick(names[(names.index(self.picked) + 1) % len(names)])

    def action_pick(self, name: str) -> None:
        self.picked = name
        self._again()

    def action_search(self) -> None:
        self.query_one(Finder).open()

    @on(Input.Changed, "#finder")
    def _again(self) -> None:
        self.show(self.volunteer.scene(), at_once=True)

    @on(Finder.Left)
    def _left(self) -> None:
        self.query_one(str(self.AUTO_FOCUS)).focus()

    def on_mount(self) -> None:
        self.call_after_refresh(lambda: self.show(self.volunteer.scene(), at_once=True))


def commands(pages: Sequence[type[Page]]) -> list[tuple[str, keys.KeyCommand]]:
    """Return the commands of several pages, for help and palette."""
    pairs: list[tuple[str, Any]] = [(page.NAME, c) for page in pages for c in page.ACTIONS]
    return pairs
