"""List of the themes: the screen behind it shows the one under the cursor, enter keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from volunteer.tui import themes

if TYPE_CHECKING:
    from volunteer.tui.app import VolunteerApp


class ThemePicker(ModalScreen[None]):
    """Themes to choose from; escape brings back the one before."""

    CSS = """
    ThemePicker { align: right top; background: $background 0%; }
    ThemePicker Vertical {
        width: 32;
        height: 100%;
        max-height: 30;
        margin: 2 1;
        background: $background;
        border: round $primary;
        border-title-color: $primary;
    }
    ThemePicker OptionList { height: 1fr; border: none; background: $background; padding: 0 1; }
    ThemePicker Static { height: 1; color: $dim; padding: 0 1; }
    .-ascii ThemePicker Vertical { border: ascii $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "back", "close", show=False)]

    def __init__(self, before: str) -> None:
        super().__init__()
        self._before = before

    def compose(self) -> ComposeResult:
        own = [theme.name for theme in themes.THEMES]
        others = sorted(set(self.app.available_themes) - {*own, "textual-ansi"})
        names = [*own, *others]
        with Vertical() as box:
            box.border_title = "Colours"
            yield OptionList(*(Option(name, id=name) for name in names))
            yield Static("enter keeps, esc goes back", markup=False)

    def on_mount(self) -> None:
        listed = self.query_one(OptionList)
        listed.highlighted = listed.get_option_index(self._before)
        listed.focus()

    @property
    def _app(self) -> VolunteerApp:
        return cast("VolunteerApp", self.app)

    @on(OptionList.OptionHighlighted)
    def _preview(self, event: OptionList.OptionHighlighted) -> None:
        self._app.appearance.preview(event.option.id or self._before)

    @on(OptionList.OptionSelected)
    def _keep(self, event: OptionList.OptionSelected) -> None:
        self._app.appearance.keep(event.option.id or self._before)
        self.dismiss()

    def action_back(self) -> None:
        self._app.appearance.preview(self._before)
        self.dismiss()
