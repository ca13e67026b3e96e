"""One sample as large as the room allows: text, a board, or a picture."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from textual.app import ComposeResult
from textual.containers import Container
from textual.content import Content
from typing_extensions import override

from shared.errors import VolunteerError
from shared.protocol.versions import VersionInfo
from shared.workloads.declaration import Measure
from volunteer.control import commands
from volunteer.i18n.catalogue import _
from volunteer.text import loss, measure_word
from volunteer.tui.text import ASCII, Line, printable_lines, wrap
from volunteer.tui.widgets.panel import Panel, Scene
from volunteer.tui.widgets.pictures import decoded, half_blocks, is_drawing, shades

if TYPE_CHECKING:
    from volunteer.control.events import Picture
    from volunteer.tui.app import VolunteerApp

CHARS_MAX = 20_000  # longest part of a sample that is shown
ROWS_MAX = 400


class PictureView(Panel):
    """Panel with one picture, which `show_png` changes."""

    DEFAULT_CSS = """
    PictureView { width: 1fr; height: 1fr; }
    """

    picture: Picture | None = None

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        return () if self.picture is None else half_blocks(self.picture, width, height)

    async def show_png(self, png: bytes | None) -> None:
        """Show a PNG, or nothing. Raises BadRequest for an unreadable file."""
        decoded_picture = None if png is None else await asyncio.to_thread(decoded, png)
        if self.is_attached:
            self.picture = decoded_picture
            self.draw()


class SampleText(Panel):
    """Text of a sample from row `top` on, or in ASCII its picture in shades."""

    text = ""
    picture: Picture | None = None
    top = 0
    rows = 0

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        if self.picture is not None:
            return shades(self.picture, width, height)
        rows = text_rows(self.text, width)
        self.rows = len(rows)
        self.top = max(0, min(self.top, len(rows) - height))
        return [((row, "text"),) for row in rows[self.top : self.top + height]]


class SampleView(Container):
    """Card with the sample of one version, which `look_at` changes."""

    DEFAULT_CSS = """
    SampleView { border: round $line; padding: 0 1; border-title-color: $primary; }
    SampleView { border-title-style: bold; border-subtitle-color: $dim; }
    .-ascii SampleView { border: ascii $line; }
    SampleView PictureView { display: none; }
    SampleView.-drawn PictureView { display: block; }
    SampleView.-drawn SampleText { display: none; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._version: int | None = None

    @override
    def compose(self) -> ComposeResult:
        yield SampleText()
        yield PictureView()

    def look_at(self, run: str, row: VersionInfo | None, measure: Measure) -> None:
        """Show the sample of a version; its picture follows after its download."""
        version = row.version if row else None
        if version == self._version:
            return
        self._version = version
        value = row.loss if row else None
        self.border_title = Content(_("version {version}", version=version)) if row else ""
        self.border_subtitle = Content("" if value is None else _measure_words(value, measure))
        words = self.query_one(SampleText)
        words.text, words.picture, words.top = (row.sample if row else ""), None, 0
        drawing = row is not None and row.picture is not None
        if not drawing:
            self.workers.cancel_group(self, "picture")  # the picture of the version before
            self.remove_class("-drawn")
        words.draw()
        if drawing:
            self.run_worker(self._fetch(run, version or 0), group="picture", exclusive=True)

    def scroll_text(self, by: int) -> None:
        """Scroll the text by some rows."""
        words = self.query_one(SampleText)
        words.top = max(0, words.top + by)
        words.draw()

    async def _fetch(self, run: str, version: int) -> None:
        app = cast("VolunteerApp", self.app)
        control = app.control
        if control is None:
            return
        try:
            png = await control.do(commands.GetPicture(run=run, version=version))
            plain = app.appearance.glyphs.curve == ASCII.curve
            if plain:
                self.query_one(SampleText).picture = decoded(png)
                self.query_one(SampleText).draw()
            else:
                await self.query_one(PictureView).show_png(png)
        except VolunteerError:
            self.remove_class("-drawn")  # the text shows the sample in dots
            return
        self.set_class(not plain, "-drawn")


def _measure_words(value: float, measure: Measure) -> str:
    """Return the value of a version's measure, named if it is the share of problems solved."""
    named = f"{measure_word(measure)} " if measure == "share solved" else ""
    return f"{named}{loss(value, measure)}"


def text_rows(text: str, cells: int) -> list[str]:
    """Return a sample in rows: drawings unchanged, words wrapped with their indentation."""
    text = text[:CHARS_MAX].expandtabs(4)
    if is_drawing(text):
        return printable_lines(text, CHARS_MAX)[:ROWS_MAX]
    rows: list[str] = []
    for line in printable_lines(text, CHARS_MAX):
        margin = " " * min(len(line) - len(line.lstrip(" ")), cells // 2)
        rows += [margin + row for row in wrap(line.strip(" "), cells - len(margin), ROWS_MAX)]
        if len(rows) >= ROWS_MAX:
            break
    return rows[:ROWS_MAX]
