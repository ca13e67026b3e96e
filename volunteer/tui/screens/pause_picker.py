"""List of the ends of a pause; enter takes one."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, ClassVar, cast

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option
from typing_extensions import override

from volunteer.control import commands
from volunteer.control.commands import pause_end
from volunteer.i18n.catalogue import N_, _

if TYPE_CHECKING:
    from volunteer.tui.app import VolunteerApp

PAUSES = (
    ("30m", "", N_("for 30 minutes")),
    ("2h", "", N_("for 2 hours")),
    ("", "22:00", N_("until 22:00")),
    ("", "8:00", N_("until 8:00 in the morning")),
    ("", "login", N_("until somebody logs in")),
    ("", "", N_("until I resume")),
)


class PausePicker(ModalScreen[None]):
    """List of the ends of a pause, for the chosen device or for all; escape closes it."""

    CSS = """
    PausePicker { align: right top; background: $background 0%; }
    PausePicker Vertical {
        width: 32;
        height: 100%;
        max-height: 30;
        margin: 2 1;
        background: $background;
        border: round $primary;
        border-title-color: $primary;
    }
    PausePicker OptionList { height: 1fr; border: none; background: $background; padding: 0 1; }
    PausePicker Static { height: 1; color: $dim; padding: 0 1; }
    .-ascii PausePicker Vertical { border: ascii $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "close", show=False)]

    @override
    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = _("Pause")
            options = (Option(_(words), id=str(n)) for n, (_l, _u, words) in enumerate(PAUSES))
            yield OptionList(*options)
            yield Static(_("enter keeps, esc goes back"), markup=False)

    @on(OptionList.OptionSelected)
    def _take(self, event: OptionList.OptionSelected) -> None:
        length, until, _words = PAUSES[event.option_index]
        words, ends_at = pause_end(length, until, datetime.now().astimezone())
        app = cast("VolunteerApp", self.app)
        if app.control is not None:
            app.command(
                app.control.do(commands.Pause(device=app.device, until=words, ends_at=ends_at))
            )
        self.dismiss()
