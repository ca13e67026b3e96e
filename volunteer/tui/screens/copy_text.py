"""Screen with a link or key to pass on. The text stands alone on its rows from the first column, so
that a mouse selects nothing else; one key copies it, and a link gets a QR code if there is room.
"""

from __future__ import annotations

from typing import ClassVar
from urllib.parse import urlsplit

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import Static
from typing_extensions import override

from shared.network.links import is_loopback
from shared.network.qr import qr_rows
from volunteer.i18n.catalogue import _

TITLE_ROWS = 5  # title and margins


def for_others(link: str, words: str) -> str:
    """Return the sentence above a link: how others use it, or that only this machine can."""
    if not is_loopback(urlsplit(link).hostname or ""):
        return words
    return _("This link works on this machine only; the organiser has one for other machines:")


class CopyText(ModalScreen[None]):
    """Screen with a link and its QR code; escape closes it."""

    CSS = """
    CopyText { background: $background; }
    CopyText Static { width: 100%; height: auto; background: $background; }
    CopyText #title { color: $foreground; text-style: bold; }
    CopyText #what { color: $foreground; margin: 1 0; }
    CopyText #text { color: $accent; }
    CopyText #code { width: auto; margin: 1 0 0 2; color: #ffffff; background: #000000; }
    CopyText #hint { color: $dim; margin-top: 1; }
    CopyText.-tight #title { display: none; }
    CopyText.-tight #what, CopyText.-tight #hint { margin: 0; }
    CopyText.-tight #code { margin: 0 0 0 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "dismiss", "close", show=False),
        Binding("c", "copy", "copy", show=False),
    ]

    def __init__(self, title: str, sentence: str, text: str) -> None:
        super().__init__()
        self._title = title
        self._what = sentence
        self._text = text
        self._code = qr_rows(text)

    @override
    def compose(self) -> ComposeResult:
        yield Static(self._title, id="title", markup=False)
        yield Static(self._what, id="what", markup=False)
        yield Static(self._text, id="text", markup=False)
        yield Static(_("c copy   esc close"), id="hint", markup=False)
        yield Static("\n".join(self._code), id="code", markup=False)

    def on_resize(self, event: Resize) -> None:
        """Show the code only if it fits, perhaps without title and margins, and never in ASCII."""
        width, height = event.size
        rows = 2 + sum(len(text) // max(1, width) + 1 for text in (self._what, self._text))
        tall = len(self._code) + rows
        wide = len(self._code[0]) + 2 <= width and not self.app.has_class("-ascii")
        self.query_one("#code").display = wide and tall <= height
        self.set_class(tall + TITLE_ROWS > height, "-tight")

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(self._text)
        self.notify(_("copied, if your terminal allows it"), markup=False)
