"""The line in which a text is typed that rows must hold."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import Input

# A line to type into. Its cursor stands still, as everything here does that tells nothing new.


class Field(Input):
    """Text input without a blinking cursor."""

    cursor_blink = reactive(False, init=False)


class Finder(Field):
    """Hidden until it is opened; enter keeps the text, escape forgets it."""

    DEFAULT_CSS = """
    Finder { height: 3; display: none; border: round $primary; background: $background; }
    .-ascii Finder { border: ascii $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "forget", show=False)]

    class Left(Message):
        """Somebody is done with typing."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(placeholder="search: enter keeps the text, esc shows all again", id=id)

    @property
    def needle(self) -> str:
        return self.value.strip()

    def open(self) -> None:
        """Show it and take the keys."""
        self.display = True
        self.focus()

    def action_forget(self) -> None:
        self.value = ""
        self._close()

    async def action_submit(self) -> None:
        self._close()

    def _close(self) -> None:
        self.display = False
        self.post_message(self.Left())
