"""A line to type into. Its cursor stands still, as everything here does that tells nothing new."""

from __future__ import annotations

from textual.reactive import reactive
from textual.widgets import Input


class Field(Input):
    """See the module."""

    cursor_blink = reactive(False, init=False)
