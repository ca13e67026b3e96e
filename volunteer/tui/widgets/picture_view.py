"""PNG in a terminal, in half blocks, as large as the room allows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from volunteer.control.events import Picture
from volunteer.tui.text import Line
from volunteer.tui.widgets.panel import Panel, Scene
from volunteer.tui.widgets.pictures import decoded, half_blocks


class PictureView(Panel):
    """Shows one picture; `await show_png(png)` changes it, and refuses any other file."""

    DEFAULT_CSS = """
    PictureView { width: 1fr; height: 1fr; }
    """

    picture: Picture | None = None

    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        return () if self.picture is None else half_blocks(self.picture, width, height)

    async def show_png(self, png: bytes | None) -> None:
        """Show a PNG, or nothing. Raises BadRequest for an unreadable file."""
        found = None if png is None else await asyncio.to_thread(decoded, png)
        if self.is_attached:
            self.picture = found
            self.draw()
