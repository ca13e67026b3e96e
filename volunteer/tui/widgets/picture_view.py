"""PNG in a terminal, as large as the room allows: drawn by the terminal's own protocol where it has
one, in half blocks elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, cast

from textual.app import ComposeResult
from textual.containers import Container
from textual.events import Resize

from volunteer.control.events import Picture
from volunteer.tui.terminal import graphics
from volunteer.tui.text import Line
from volunteer.tui.widgets.panel import Panel, Scene
from volunteer.tui.widgets.pictures import decoded, half_blocks, png_of, size_in

if TYPE_CHECKING:
    from textual_image.widget import SixelImage, TGPImage

    from volunteer.tui.app import VolunteerApp


class HalfBlocks(Panel):
    """A picture in half blocks."""

    picture: Picture | None = None

    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        return () if self.picture is None else half_blocks(self.picture, width, height)


class PictureView(Container):
    """Shows one picture; `await show(png)` changes it, and refuses any other file."""

    DEFAULT_CSS = """
    PictureView { width: 1fr; height: 1fr; }
    PictureView HalfBlocks { width: 100%; height: 100%; }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.picture: Picture | None = None
        self._own: SixelImage | TGPImage | None = None  # by the terminal's protocol

    def compose(self) -> ComposeResult:
        how = cast("VolunteerApp", self.app).appearance.pictures
        if how == "blocks":
            yield HalfBlocks()
        else:
            self._own = graphics.widget(how)
            yield self._own

    async def show(self, png: bytes | None) -> None:
        """Show a PNG, or nothing. Raises BadRequest for an unreadable file."""
        found = None if png is None else await asyncio.to_thread(decoded, png)
        clean = None
        if found is not None and self._own is not None:
            clean = await asyncio.to_thread(png_of, found)
        if not self.is_attached:
            return
        self.picture = found
        if self._own is not None:
            self._own.image = None if clean is None else BytesIO(clean)
            self._fit()
        else:
            blocks = self.query_one(HalfBlocks)
            blocks.picture = found
            blocks.draw()

    def on_resize(self, event: Resize) -> None:
        self._fit()

    def on_unmount(self) -> None:
        if self._own is not None:  # the terminal keeps it until it is told
            self._own.image = None

    def _fit(self) -> None:
        """Give the picture the most cells that keep its shape."""
        if self._own is None or self.picture is None:
            return
        wide, high = graphics.cell_size()
        # as if a cell were two squares
        shape = (self.picture.width * high, self.picture.height * wide * 2)
        room = self.content_size
        cells, rows = size_in(shape, room.width, room.height)
        self._own.styles.width, self._own.styles.height = cells, rows
