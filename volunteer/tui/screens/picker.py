"""List of themes, languages or ends of a pause: the screen behind it previews, enter keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from volunteer.control.commands import pause_end
from volunteer.i18n import catalogue
from volunteer.i18n.catalogue import N_, _
from volunteer.tui import themes

if TYPE_CHECKING:
    from volunteer.tui.app import VolunteerApp


class Picker(ModalScreen[None]):
    """Choices with a preview; escape goes back. `options` are pairs of a value and its words."""

    CSS = """
    Picker { align: right top; background: $background 0%; }
    Picker Vertical {
        width: 32;
        height: 100%;
        max-height: 30;
        margin: 2 1;
        background: $background;
        border: round $primary;
        border-title-color: $primary;
    }
    Picker OptionList { height: 1fr; border: none; background: $background; padding: 0 1; }
    Picker Static { height: 1; color: $dim; padding: 0 1; }
    .-ascii Picker Vertical { border: ascii $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "back", "close", show=False)]

    def __init__(
        self,
        title: str,
        options: Sequence[tuple[str, str]],
        before: str,
        *,
        preview: Callable[[str], None],
        keep: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._title = title
        self._options = tuple(options)
        self._before = before
        self._preview = preview
        self._keep = keep

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = _(self._title)
            yield OptionList(*(Option(words, id=value) for value, words in self._options))
            yield Static(_("enter keeps, esc goes back"), markup=False)

    def on_mount(self) -> None:
        listed = self.query_one(OptionList)
        known = [value for value, _words in self._options]
        listed.highlighted = known.index(self._before) if self._before in known else 0
        listed.focus()

    @on(OptionList.OptionHighlighted)
    def _show(self, event: OptionList.OptionHighlighted) -> None:
        self._preview(event.option.id or self._before)
        self.query_one(Vertical).border_title = _(self._title)
        self.query_one(Static).update(_("enter keeps, esc goes back"))

    @on(OptionList.OptionSelected)
    def _take(self, event: OptionList.OptionSelected) -> None:
        self._keep(event.option.id or self._before)
        self.dismiss()

    def action_back(self) -> None:
        self._preview(self._before)
        self.dismiss()


def of_themes(app: VolunteerApp) -> Picker:
    """Return the list of the themes, ours first."""
    own = [theme.name for theme in themes.THEMES]
    others = sorted(set(app.available_themes) - {*own, "textual-ansi"})
    look = app.appearance
    return Picker(
        N_("Colours"),
        [(name, name) for name in (*own, *others)],
        app.theme,
        preview=look.preview,
        keep=look.keep,
    )


PAUSES = (
    ("30m", "", N_("for 30 minutes")),
    ("2h", "", N_("for 2 hours")),
    ("", "22:00", N_("until 22:00")),
    ("", "8:00", N_("until 8:00 in the morning")),
    ("", "login", N_("until somebody logs in")),
    ("", "", N_("until I resume")),
)


def of_pauses(app: VolunteerApp) -> Picker:
    """Return the list of the ends of a pause, for the device that is shown."""

    def keep(value: str) -> None:
        length, until, _words = PAUSES[int(value)]
        words, ends_at = pause_end(length, until, datetime.now().astimezone())
        if app.control is not None:
            app.command(app.control.pause(app.device, until=words, ends_at=ends_at))

    options = [(str(number), _(words)) for number, (_l, _u, words) in enumerate(PAUSES)]
    return Picker(N_("Pause"), options, "0", preview=lambda value: None, keep=keep)


def of_languages(app: VolunteerApp) -> Picker:
    """Return the list of the languages."""
    look = app.appearance
    return Picker(
        N_("Language"),
        [
            (catalogue.AUTO, catalogue.AUTO),
            *((name, catalogue.NAMES.get(name, name)) for name in catalogue.languages()),
        ],
        look.look.language,
        preview=look.speak,
        keep=look.keep_language,
    )
