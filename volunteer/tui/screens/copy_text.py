"""A text to pass on, such as a link: shown, and copied with one key."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static


class Told(ModalScreen[None]):
    """Closed by escape."""

    CSS = """
    Told { align: center middle; }
    Told > Vertical { width: 76; max-width: 96%; height: auto; max-height: 90%; background: $surface; padding: 1 2; }
    Told #what { color: $foreground; margin-bottom: 1; }
    Told #text { color: $accent; text-style: bold; }
    Told #keys { color: $dim; margin-top: 1; height: 1; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "dismiss", "close", show=False),
        Binding("c", "copy", "copy", show=False),
    ]

    def __init__(self, title: str, what: str, text: str) -> None:
        super().__init__()
        self._title = title
        self._what = what
        self._text = text

    def compose(self) -> ComposeResult:
        with Vertical(classes="card") as box:
            box.border_title = self._title
            yield Static(self._what, id="what", markup=False)
            yield Static(self._text, id="text", markup=False)
            yield Static("c copy   esc close", id="keys", markup=False)

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(self._text)
        self.notify("copied, if your terminal allows it", markup=False)
