"""Dialog with a text to pass on, such as a link; one key copies it."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static


class CopyText(ModalScreen[None]):
    """Dialog with a text; escape closes it."""

    CSS = """
    CopyText { align: center middle; }
    CopyText > Vertical { width: 76; max-width: 96%; height: auto; max-height: 90%; background: $surface; padding: 1 2; }
    CopyText #what { color: $foreground; margin-bottom: 1; }
    CopyText #text { color: $accent; text-style: bold; }
    CopyText #keys { color: $dim; margin-top: 1; height: 1; background: $surface; }
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
