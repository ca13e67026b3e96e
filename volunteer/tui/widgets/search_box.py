"""Search box: filters rows by substring."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import Input
from typing_extensions import override

from volunteer.i18n.catalogue import _


class Field(Input):
    """Text input whose cursor does not blink, so that nothing is drawn while nobody types."""

    cursor_blink = reactive(False, init=False)
    brief: ClassVar[bool] = False  # True for an input that enter and escape close


class Finder(Field):
    """Search box, hidden until opened; enter keeps the text, escape clears it."""

    brief = True
    DEFAULT_CSS = """
    Finder { height: 3; display: none; border: round $primary; background: $background; }
    Finder:focus { border: round $primary; background-tint: $background 0%; }
    .-ascii Finder, .-ascii Finder:focus { border: ascii $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "forget", show=False)]

    class Left(Message):
        """Message: the box was closed."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)

    @property
    def needle(self) -> str:
        return self.value.strip()

    def open(self) -> None:
        """Show the box and focus it."""
        self.placeholder = _("search: enter keeps the text, esc shows all again")
        self.display = True
        self.focus()

    def action_forget(self) -> None:
        self.value = ""
        self._close()

    @override
    async def action_submit(self) -> None:
        self._close()

    def _close(self) -> None:
        self.display = False
        self.post_message(self.Left())
